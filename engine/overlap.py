"""How well the host's work hides behind the device's: both on one clock, as fractions and as a trace."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.timeline import WORK, Recording, StepTimes

Times = npt.NDArray[np.float64]

_REALLY_WAITED = 2e-5
"""Seconds: the host that waited so long for a step was woken by its end."""

LANES = ("host", "H2D", "compute", "D2H")


class LaneTimes(NamedTuple):
    """The lanes' work on each step, [steps], on the host's clock (`time.perf_counter`, seconds)."""

    uploaded: Times
    begin: Times
    end: Times
    downloaded: Times


def busy_periods(steps: list[StepTimes]) -> list[tuple[int, int]]:
    """Ranges (first, behind the last) of steps without idleness between them."""
    firsts = [i for i, each in enumerate(steps) if each.after_idle or not i]
    return list(itertools.pairwise([*firsts, len(steps)]))


def align(steps: list[StepTimes]) -> LaneTimes:
    """Put the lanes' clock beside the host's, anew in each busy period, since clocks drift.

    A step cannot begin before its inputs stand, nor can the host know its result before it is
    there. Where the host waited, the second bound is tight to a few microseconds (waking up);
    where it never did, the first is (the device began at once).
    """
    timings = np.array([each.timing for each in steps], np.float64).reshape(len(steps), 5)
    prepared, gap, ready, compute, download = timings.T
    collected = np.array([each.collected for each in steps])
    waited = np.array([each.waited for each in steps]) > _REALLY_WAITED
    begin, end = np.empty(len(steps)), np.empty(len(steps))
    for first, last in busy_periods(steps):
        period = slice(first, last)
        ends = np.cumsum(np.where(np.arange(first, last) > first, gap[period], 0) + compute[period])
        begins = ends - compute[period]
        offset = (prepared[period] - begins).max()
        if waited[period].any():
            known = (collected[period] - ends - download[period])[waited[period]]
            offset = max(offset, known.min())
        begin[period], end[period] = begins + offset, ends + offset
    return LaneTimes(begin - ready, begin, end, end + download)


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """Of the recorded steps, idle time left out. Ratios are of `seconds`, but `overlap_ratio`."""

    steps: int
    seconds: float
    step_ms: float
    """Median, from one step's result to the next; 0 for fewer than two steps."""
    compute_ms: float
    """Median."""
    host_ms: float
    """Median of the host's work on a step, waiting left out."""
    gap_us_p50: float
    gap_us_p99: float
    active_ratio: float
    """The device computed."""
    host_ratio: float
    """The host worked."""
    waiting_ratio: float
    """The host waited for the device."""
    overlap_ratio: float
    """Share of the host's work during which the device computed: what it costs nothing to do."""


def overlap_report(recording: Recording) -> OverlapReport:
    """Raises `ValueError` where nothing was recorded."""
    steps = recording.steps
    if not steps:
        raise ValueError("no step is recorded")
    lanes = align(steps)
    # Device time up to each moment; np.interp gives it for any.
    moments = np.maximum.accumulate(np.stack([lanes.begin, lanes.end], 1).ravel())
    durations = np.diff(moments, prepend=moments[0])
    durations[::2] = 0
    active = np.cumsum(durations)

    periods = busy_periods(steps)
    bounds = [(steps[a].launched, max(steps[b - 1].collected, lanes.end[b - 1])) for a, b in periods]
    seconds = sum(end - begin for begin, end in bounds)
    spans = [
        (span.phase in WORK, max(span.begin, begin), min(span.end, end))
        for begin, end in bounds
        for span in recording.spans
        if span.begin < end and span.end > begin and span.phase != "idle"
    ]
    begins, ends = (np.array([span[i] for span in spans]) for i in (1, 2))
    work = np.array([span[0] for span in spans], bool)
    hidden = np.interp(ends, moments, active) - np.interp(begins, moments, active)
    worked = float((ends - begins)[work].sum())
    between = [
        later.collected - earlier.collected
        for a, b in periods
        for earlier, later in zip(steps[a:b], steps[a + 1 : b], strict=False)
    ]
    gaps = [each.timing.gap for a, b in periods for each in steps[a + 1 : b]] or [0.0]
    return OverlapReport(
        steps=len(steps),
        seconds=seconds,
        step_ms=float(np.median(between)) * 1e3 if between else 0.0,
        compute_ms=float(np.median([each.timing.compute for each in steps])) * 1e3,
        host_ms=float(np.median([each.work for each in steps])) * 1e3,
        gap_us_p50=float(np.percentile(gaps, 50)) * 1e6,
        gap_us_p99=float(np.percentile(gaps, 99)) * 1e6,
        active_ratio=float(active[-1]) / seconds,
        host_ratio=worked / seconds,
        waiting_ratio=float((ends - begins)[~work].sum()) / seconds,
        overlap_ratio=float(hidden[work].sum()) / worked if worked else 0.0,
    )


def trace_events(recording: Recording, name: str, pid: int = 1) -> list[dict[str, Any]]:
    """Events of Chrome's trace format: a process `name` with one track per lane and one for the host.

    `ts` is in microseconds since the epoch, so that traces of several machines lie side by side. An
    upload is drawn from when it was enqueued, a download from the end of compute.
    """
    epoch = time.time() - time.perf_counter()

    def event(lane: str, text: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
        at = {"pid": pid, "tid": LANES.index(lane), "ts": (begin + epoch) * 1e6}
        return {"name": text, "cat": lane, "ph": "X", "dur": max(end - begin, 0) * 1e6, "args": args} | at

    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}},
        *(
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": i, "args": {"name": lane}}
            for i, lane in enumerate(LANES)
        ),
    ]
    events += [event("host", span.phase, span.begin, span.end, step=span.step) for span in recording.spans]
    steps = recording.steps
    lanes = (times.tolist() for times in align(steps))
    for each, uploaded, begin, end, downloaded in zip(steps, *lanes, strict=True):
        what = {"step": each.step, "requests": each.requests, "tokens": each.tokens}
        events += [
            event("H2D", f"upload {each.step}", each.timing.prepared, uploaded, **what),
            event("compute", f"{each.kind} {each.step}", begin, end, gap_us=each.timing.gap * 1e6, **what),
            event("D2H", f"download {each.step}", end, downloaded, **what),
        ]
    return events
