"""Fractions and traces of recordings whose truth is known."""

from __future__ import annotations

import itertools
import json

import pytest

from engine.overlap import LANES, align, overlap_report, trace_events
from engine.plan import StepTiming
from engine.timeline import Recording, Span, StepTimes

COMPUTE, WORK, DOWNLOAD, UPLOAD = 0.010, 0.002, 0.0005, 0.0003


def step(number: int, launched: float, begin: float, last_end: float | None, asked: float) -> StepTimes:
    """A step on one true clock, as the engine would have recorded it."""
    prepared = launched + WORK / 2
    through = begin + COMPUTE + DOWNLOAD
    return StepTimes(
        step=number,
        requests=3,
        tokens=3,
        decodes=3,
        carried=3,
        after_idle=last_end is None,
        timing=StepTiming(
            prepared=prepared,
            gap=0.0 if last_end is None else begin - last_end,
            ready=begin - (prepared + UPLOAD),
            compute=COMPUTE,
            download=DOWNLOAD,
        ),
        launched=launched,
        waited=max(through - asked, 0.0),
        collected=max(through, asked),
        work=WORK,
    )


def synchronous(n: int, start: float = 100.0, first: int = 0) -> Recording:
    """The host works for WORK, then waits for the device; nothing overlaps."""
    steps, spans, end = [], [], None
    t = start
    for number in range(first, first + n):
        begin = t + WORK
        steps.append(step(number, t, begin, end, asked=begin))
        end = begin + COMPUTE
        spans += [
            Span("prepare", number, t, t + WORK / 2),
            Span("launch", number, t + WORK / 2, begin),
            Span("collect", number, begin, end + DOWNLOAD),
        ]
        t = end + DOWNLOAD
    return Recording(steps, spans)


def asynchronous(n: int) -> Recording:
    """Step N+1 is made while N computes; the device never waits."""
    steps, spans = [], []
    for number in range(n):
        begin = 100.0 + WORK + number * COMPUTE
        launched = 100.0 if not number else begin - COMPUTE + DOWNLOAD + 0.001
        asked = begin + DOWNLOAD + 0.001 + WORK  # the next one is launched by then
        steps.append(step(number, launched, begin, begin if number else None, asked))
        spans += [
            Span("launch", number, launched, launched + WORK),
            Span("collect", number, asked, begin + COMPUTE + DOWNLOAD),
        ]
    return Recording(steps, spans)


def test_lanes_come_to_lie_on_the_hosts_clock() -> None:
    """The lanes' own clock does not matter: only differences are recorded."""
    recording = synchronous(5)
    lanes = align(recording.steps)
    period = WORK + COMPUTE + DOWNLOAD
    for i in range(5):
        begin = 100.0 + WORK + i * period
        assert lanes.begin[i] == pytest.approx(begin, abs=1e-9)
        assert lanes.end[i] == pytest.approx(begin + COMPUTE, abs=1e-9)
        assert lanes.downloaded[i] == pytest.approx(begin + COMPUTE + DOWNLOAD, abs=1e-9)
        assert lanes.uploaded[i] == pytest.approx(begin - WORK / 2 + UPLOAD, abs=1e-9)


def test_a_host_that_never_waits_bounds_the_clock_from_the_other_side() -> None:
    """Each step is through long before the host asks for it."""
    steps, end = [], None
    for number in range(4):
        launched = 100.0 + number
        begin = launched + WORK / 2  # at once
        steps.append(step(number, launched, begin, end, asked=launched + 0.5))
        end = begin + COMPUTE
    assert align(steps).begin == pytest.approx([100 + i + WORK / 2 for i in range(4)], abs=1e-9)


def test_without_overlap_nothing_is_hidden() -> None:
    n = 8
    report = overlap_report(synchronous(n))
    period = WORK + COMPUTE + DOWNLOAD
    assert report.steps == n
    assert report.seconds == pytest.approx(n * period)
    assert report.step_ms == pytest.approx(period * 1e3)
    assert report.active_ratio == pytest.approx(COMPUTE / period)
    assert report.host_ratio == pytest.approx(WORK / period)
    assert report.waiting_ratio == pytest.approx((COMPUTE + DOWNLOAD) / period)
    assert report.overlap_ratio == pytest.approx(0, abs=1e-9)
    assert report.gap_us_p50 == pytest.approx((WORK + DOWNLOAD) * 1e6)
    assert report.compute_ms == pytest.approx(COMPUTE * 1e3)
    assert report.host_ms == pytest.approx(WORK * 1e3)


def test_with_overlap_all_but_the_first_step_is_hidden() -> None:
    n = 9
    report = overlap_report(asynchronous(n))
    assert report.overlap_ratio == pytest.approx((n - 1) / n)
    assert report.active_ratio == pytest.approx(n * COMPUTE / (n * COMPUTE + WORK + DOWNLOAD))
    assert report.gap_us_p99 == pytest.approx(0, abs=1e-3)
    assert report.step_ms == pytest.approx(COMPUTE * 1e3)


def test_idle_time_counts_nowhere() -> None:
    """Two busy periods far apart, on lanes whose clock has drifted between them."""
    first, second = synchronous(4), synchronous(4, start=5000.0, first=4)
    idle = Span("idle", 4, 101.0, 5000.0)
    both = Recording(first.steps + second.steps, [*first.spans, idle, *second.spans])
    report, alone = overlap_report(both), overlap_report(first)
    assert report.seconds == pytest.approx(2 * alone.seconds)
    for ratio in ("active_ratio", "host_ratio", "waiting_ratio", "overlap_ratio", "step_ms", "gap_us_p99"):
        assert getattr(report, ratio) == pytest.approx(getattr(alone, ratio), rel=1e-6, abs=1e-9)


def test_nothing_recorded_is_said() -> None:
    with pytest.raises(ValueError, match="no step"):
        overlap_report(Recording([], []))
    assert [event["ph"] for event in trace_events(Recording([], []), "empty")] == ["M"] * 5


def test_a_trace_has_a_track_for_each_lane_and_one_for_the_host() -> None:
    recording = asynchronous(6)
    events = trace_events(recording, "replica 1", pid=7)
    assert all(type(e["ts"]) is type(e["dur"]) is float for e in events if e["ph"] == "X"), "no numpy"
    events = json.loads(json.dumps(events))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[i] for i in range(4)] == list(LANES)
    assert {e["pid"] for e in events} == {7}
    for tid, lane in names.items():
        drawn = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == tid)
        assert len(drawn) == (12 if lane == "host" else 6)
        for (begin, duration), (following, _) in itertools.pairwise(drawn):
            assert duration >= 0
            if lane != "H2D":  # an upload is drawn from when it was enqueued
                assert begin + duration <= following + 2, "a lane does one thing at a time, µs"
    computing = [e for e in events if e.get("cat") == "compute"]
    assert [e["args"]["step"] for e in computing] == list(range(6))
    assert computing[1]["args"]["requests"] == 3
