"""What the host and the lanes did in the last steps, and how long each took since the start.

The engine's loop calls its phases through the wrappers below, so it reads as if nothing was timed;
a wrapper costs a few tenths of a microsecond. Written by the engine's thread alone; what `recent`
returns is a copy, so any thread may read it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from engine.plan import StepPlan, StepResult, StepTiming

P = ParamSpec("P")
T = TypeVar("T")
Annotate = Callable[[str], AbstractContextManager[Any]]
"""Makes a range of a profiler, `torch.cuda.nvtx.range` say."""

IDLE, COLLECT = "idle", "collect"
WORK = ("inbox", "schedule", "prepare", "launch", "commit", "publish")
"""The host's own work. Beside it there is `collect`, waiting for the device, and `idle`, for requests."""
PHASES = (*WORK, COLLECT, IDLE)

_AHEAD, _BEHIND = 0, 1


class ApplyInbox(Protocol):
    def __call__(self, block: bool) -> None: ...


class Span(NamedTuple):
    """The host in one phase, for one step. Seconds of `time.perf_counter`."""

    phase: str
    step: int
    begin: float
    end: float


class StepTimes(NamedTuple):
    """One step that was collected. Times by the host's `time.perf_counter`, durations in seconds."""

    step: int
    requests: int
    tokens: int
    decodes: int
    """Requests that decoded, one token each."""
    carried: int
    """Of these, those whose input token came from the step before, on the device."""
    after_idle: bool
    """Nothing was there to do before it: its gap says nothing."""
    timing: StepTiming
    launched: float
    """When the host began to launch it."""
    waited: float
    """How long the host waited for it."""
    collected: float
    work: float
    """The host's work since the step before was collected."""

    @property
    def kind(self) -> str:
        return "decode" if self.tokens == self.decodes else "mixed" if self.decodes else "prefill"


class Recording(NamedTuple):
    """The last steps and the host's phases around them, oldest first."""

    steps: list[StepTimes]
    spans: list[Span]


@dataclass(slots=True)
class Totals:
    """Since the start."""

    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds of the engine's thread in each."""
    active: float = 0.0
    """Seconds in which the device computed steps."""
    gap: float = 0.0
    """Seconds between steps in which it did not, though there was work."""
    work: float = 0.0
    """Seconds that the host worked on steps, waiting left out."""
    hidden: float = 0.0
    """Of these, the seconds in which the device computed: the host's work beyond the gap."""
    steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("decode", "mixed", "prefill"), 0))
    decodes: int = 0
    """Decoded tokens."""
    carried: int = 0
    """Of these, those whose input the host did not know."""


class Timeline:
    """Records the last `size` steps."""

    def __init__(self, size: int = 2048, annotate: Annotate | None = None) -> None:
        self.totals = Totals()
        self._steps: deque[StepTimes] = deque(maxlen=size)
        self._spans: deque[Span] = deque(maxlen=size * (len(PHASES) + 2))
        self._launched: deque[tuple[StepPlan, bool, float, float]] = deque()
        self._at = [0, 0]  # the step that is planned next, and the one collected last
        self._idle = True
        self._work = 0.0
        self._annotate = annotate

    def recent(self, steps: int | None = None, after: int = -1) -> Recording:
        """The last `steps` steps (all that are kept by default), those after step `after` only."""
        found = self.steps_after(after)
        found = found[-steps:] if steps else found
        spans = self._spans.copy() if found else ()
        first = found[0].step if found else 0
        kept = [span for span in spans if span.step >= first]
        return Recording(found, sorted(kept, key=lambda span: span.begin))

    def steps_after(self, step: int) -> list[StepTimes]:
        """Those kept that come after step `step`, oldest first."""
        later = itertools.takewhile(lambda each: each.step > step, reversed(self._steps.copy()))
        return list(later)[::-1]

    # The phases of the loop

    def inbox(self, call: ApplyInbox) -> ApplyInbox:
        note = self._note

        def timed(block: bool) -> None:
            begin = perf_counter()
            call(block=block)
            if block:
                self._idle = True
            note(IDLE if block else "inbox", self._at[_AHEAD], begin, perf_counter())

        return timed

    def schedule(self, call: Callable[P, T]) -> Callable[P, T]:
        return self._timed("schedule", _AHEAD, call)

    def launch(self, call: Callable[[StepPlan], None]) -> Callable[[StepPlan], None]:
        call = self._annotated("launch", call)

        def timed(plan: StepPlan) -> None:
            begin = perf_counter()
            call(plan)
            end = perf_counter()
            self._launched.append((plan, self._idle, begin, end))
            self._idle = False
            self._at[_AHEAD] = plan.step + 1
            self._work += end - begin

        return timed

    def collect(self, call: Callable[[], StepResult]) -> Callable[[], StepResult]:
        call = self._annotated(COLLECT, call)

        def timed() -> StepResult:
            begin = perf_counter()
            result = call()
            end = perf_counter()
            self._note(COLLECT, result.step, begin, end)
            self._keep(result, begin, end)
            return result

        return timed

    def commit(self, call: Callable[P, T]) -> Callable[P, T]:
        return self._timed("commit", _BEHIND, call)

    def publish(self, call: Callable[P, T]) -> Callable[P, T]:
        return self._timed("publish", _BEHIND, call)

    def _timed(self, phase: str, which: int, call: Callable[P, T]) -> Callable[P, T]:
        call, note, at = self._annotated(phase, call), self._note, self._at

        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            begin = perf_counter()
            result = call(*args, **kwargs)
            note(phase, at[which], begin, perf_counter())
            return result

        return timed

    def _annotated(self, phase: str, call: Callable[P, T]) -> Callable[P, T]:
        annotate = self._annotate
        if annotate is None:
            return call

        def annotated(*args: P.args, **kwargs: P.kwargs) -> T:
            with annotate(phase):
                return call(*args, **kwargs)

        return annotated

    def _note(self, phase: str, step: int, begin: float, end: float) -> None:
        self._spans.append(Span(phase, step, begin, end))
        self.totals.phases[phase] += end - begin
        if phase is not IDLE and phase is not COLLECT:
            self._work += end - begin

    def _keep(self, result: StepResult, asked: float, collected: float) -> None:
        plan, after_idle, launched, enqueued = self._launched.popleft()
        timing, totals = result.timing, self.totals
        assert timing is not None and plan.step == result.step
        for phase, begin, end in (
            ("prepare", launched, timing.prepared),
            ("launch", timing.prepared, enqueued),
        ):
            self._spans.append(Span(phase, plan.step, begin, end))
            totals.phases[phase] += end - begin
        times = StepTimes(
            step=plan.step,
            requests=len(plan.sequences),
            tokens=len(plan.tokens),
            decodes=plan.num_decodes,
            carried=int(np.count_nonzero(plan.tokens["carry_row"][: plan.num_decodes] >= 0)),
            after_idle=after_idle,
            timing=timing,
            launched=launched,
            waited=collected - asked,
            collected=collected,
            work=self._work,
        )
        self._steps.append(times)
        self._work = 0.0
        self._at[_BEHIND] = plan.step
        totals.active += timing.compute
        totals.work += times.work
        if not after_idle:
            totals.gap += timing.gap
            totals.hidden += max(times.work - timing.gap, 0.0)
        totals.steps[times.kind] += 1
        totals.decodes += times.decodes
        totals.carried += times.carried
