"""When the lanes worked on each step, by events of its own that order nothing and that nobody waits for."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.lanes import Lanes, Timer
from engine.plan import StepTiming


class Marks(NamedTuple):
    """Points in the lanes' work on one step."""

    uploaded: Timer
    begin: Timer
    """Of the step's compute: its inputs are there and the lane is free."""
    end: Timer
    downloaded: Timer


class StepClock:
    """Marks for steps in flight. `take` them at launch, `read` them in order, each after its step is through.

    There is one set more than steps in flight: the gap before a step is read against the step before.
    """

    def __init__(self, lanes: Lanes, depth: int) -> None:
        self._free = deque(Marks(*(lanes.new_timer() for _ in range(4))) for _ in range(depth + 1))
        self._before: Marks | None = None

    def take(self) -> Marks:
        return self._free.popleft()

    def read(self, marks: Marks, prepared: float) -> StepTiming:
        before, self._before = self._before, marks
        if before is None:
            gap = 0.0
        else:
            gap = before.end.elapsed_time(marks.begin) / 1e3
            self._free.append(before)
        return StepTiming(
            prepared=prepared,
            gap=gap,
            ready=marks.uploaded.elapsed_time(marks.begin) / 1e3,
            compute=marks.begin.elapsed_time(marks.end) / 1e3,
            download=marks.end.elapsed_time(marks.downloaded) / 1e3,
        )
