"""What goes over the tapes of one replica, and how soon the Routers answer."""

from __future__ import annotations

import time
from collections import deque


class TapeMeter:
    """Totals since the start. `tape` names an open tape, in any way that is its own."""

    def __init__(self) -> None:
        self.frames = 0
        self.bytes = 0
        self.records = 0
        self._tapes: dict[object, float | None] = {}  # when its frame without an answer was sent
        self._round_trips: deque[float] = deque(maxlen=10_000)

    @property
    def open(self) -> int:
        return len(self._tapes)

    def opened(self, tape: object) -> None:
        self._tapes[tape] = None

    def closed(self, tape: object) -> None:
        self._tapes.pop(tape, None)

    def sent(self, tape: object, size: int, records: int) -> None:
        """A frame of `size` bytes."""
        self.frames += 1
        self.bytes += size
        self.records += records
        self._tapes[tape] = time.monotonic()

    def answered(self, tape: object) -> None:
        sent = self._tapes.get(tape)
        if sent is not None:
            self._round_trips.append(time.monotonic() - sent)
            self._tapes[tape] = None

    def lag(self) -> float:
        """Age in seconds of the oldest frame without an answer; 0 if there is none."""
        sent = [each for each in self._tapes.values() if each is not None]
        return time.monotonic() - min(sent) if sent else 0.0

    def round_trips(self) -> list[float]:
        """Seconds from a frame to its answer, each given out once."""
        return [self._round_trips.popleft() for _ in range(len(self._round_trips))]
