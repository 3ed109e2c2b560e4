"""Lanes run work in order without making the host wait; events order work between lanes.

On a GPU a lane is a CUDA stream and an event a CUDA event. On a CPU a lane is a worker thread, so
the pipeline, its overlap and its races are the same there. Semantics are CUDA's: `wait` and
`synchronize` refer to the latest `record` made before the call, and an event never recorded does
not block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch

Work = Callable[[], None]


class Event(Protocol):
    """A point in a lane's order of work."""

    def synchronize(self) -> None:
        """Block the host until the recorded point is reached. Raises what failed in the lane."""


class Timer(Event, Protocol):
    """An event that also notes when it was reached."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this point to a later one of the same device, both reached."""


class Lane(Protocol):
    """Work runs in the order in which it was enqueued. No method blocks the host."""

    def run(self, work: Work) -> None: ...

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None:
        """Work enqueued after this runs after the point that `event` names."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The three lanes of an engine, and how to make their events and end them."""

    h2d: Lane
    compute: Lane
    d2h: Lane
    new_event: Callable[[], Event]
    close: Callable[[], None]
    new_timer: Callable[[], Timer]


class CudaLane:
    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.record(self.stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)


class _Point:
    """One record of a ThreadEvent: reached once, with the lane's failure if it had one."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.failure: BaseException | None = None
        self.time = 0.0


class ThreadEvent:
    def __init__(self) -> None:
        self.point = _Point()
        self.point.reached.set()

    def synchronize(self) -> None:
        self.point.reached.wait()
        if self.point.failure is not None:
            raise self.point.failure

    def elapsed_time(self, later: ThreadEvent) -> float:
        return (later.point.time - self.point.time) * 1e3


class ThreadLane:
    """A worker thread. After a failure its work is skipped and its events carry the failure on."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def run(self, work: Work) -> None:
        def guarded() -> None:
            if self._failure is None:
                try:
                    work()
                except BaseException as failure:
                    self._failure = failure

        self._queue.put(guarded)

    def record(self, event: Event) -> None:
        assert isinstance(event, ThreadEvent)
        event.point = point = _Point()

        def reach() -> None:
            point.failure = self._failure
            point.time = time.perf_counter()
            point.reached.set()

        self._queue.put(reach)

    def wait(self, event: Event) -> None:
        assert isinstance(event, ThreadEvent)
        point = event.point

        def wait() -> None:
            point.reached.wait()
            self._failure = self._failure or point.failure

        self._queue.put(wait)

    def close(self) -> None:
        """Run what is enqueued, then end the thread."""
        self._queue.put(None)
        self._thread.join()


def make_lanes(device: torch.device) -> Lanes:
    """Three lanes for the device: CUDA streams on a GPU, worker threads on a CPU."""
    if device.type == "cuda":
        h2d, compute, d2h = (CudaLane(device) for _ in range(3))
        timer = partial(torch.cuda.Event, enable_timing=True)
        return Lanes(h2d, compute, d2h, torch.cuda.Event, lambda: torch.cuda.synchronize(device), timer)
    first, second, third = threads = [ThreadLane(name) for name in ("h2d", "compute", "d2h")]

    def close() -> None:
        for lane in threads:
            lane.close()

    return Lanes(first, second, third, ThreadEvent, close, ThreadEvent)
