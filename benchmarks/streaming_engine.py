"""The engine of the streaming benchmark: it only counts, and its replica is the real one around it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

from ray import serve

from deployments.execution import Executor
from deployments.replica import EngineReplica
from deployments.submission import Submission
from deployments.tape import Record
from engine.process import EngineProcess
from engine.request import FinishReason, Output, Request
from engine.stats import EngineStats


@dataclass(slots=True)
class _Running:
    request: Request
    sink: Callable[[Output], None]
    position: int = 0


class PacedEngine:
    """One token for each request every `interval` seconds, from a thread of its own, as a GPU would.

    It waits until `batch` requests are there, then runs them to their end.
    """

    eos_token_ids = ()
    healthy = True

    def __init__(self, words: list[int], context_length: int) -> None:
        self.context_length = context_length
        self._words = words
        self._asyncio = asyncio.get_running_loop()
        self._waiting: list[_Running] = []
        self._batch = 0
        self._interval = 0.0
        self.emitted: list[float] = []
        """The time of each step since `pace`."""

    def pace(self, interval: float, batch: int) -> None:
        self._interval, self._batch, self.emitted = interval, batch, []

    async def submit(
        self, request: Request, sink: Callable[[Output], None], *, promised: bool = False
    ) -> None:
        self._waiting.append(_Running(request, sink))
        if len(self._waiting) == self._batch:
            running, self._waiting = self._waiting, []
            threading.Thread(target=self._run, args=(running,), daemon=True).start()

    def abort(self, request_id: str, cause: str) -> None:
        """It runs to its end all the same."""

    def stats(self) -> EngineStats:
        none: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 0) | {"finished": {}}
        return EngineStats(**none)

    async def turn(self) -> None:
        """It always does."""

    def _run(self, running: list[_Running]) -> None:
        due = time.perf_counter()
        while running:
            due += self._interval
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            outputs = [(each.sink, self._step(each)) for each in running]
            self.emitted.append(time.perf_counter())
            self._asyncio.call_soon_threadsafe(_deliver, outputs)
            running = [each for each in running if each.position < (each.request.sampling.max_tokens or 0)]

    def _step(self, each: _Running) -> Output:
        request, position = each.request, each.position
        each.position += 1
        word = self._words[(request.prompt[0] + position) % len(self._words)]
        last = each.position == request.sampling.max_tokens
        return Output(request, position, (word,), FinishReason.LENGTH if last else None)


def _deliver(outputs: list[tuple[Callable[[Output], None], Output]]) -> None:
    for sink, output in outputs:
        sink(output)


class PacedReplica(EngineReplica):
    """The real one but for its engine."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: str, words: list[int], context_length: int
    ) -> None:
        self._model = model
        self._paced = PacedEngine(words, context_length)
        self._engine = cast(EngineProcess, self._paced)
        self._executor = Executor(self._paced, serve.get_replica_context().replica_id.unique_id, model)

    async def items(self, submission: Submission) -> AsyncIterator[Record]:
        """The same tokens, each as an item of this stream."""
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        request = Request(str(submission.request), submission.prompt, submission.sampling)
        await self._paced.submit(request, outputs.put_nowait)
        reason = None
        while reason is None:
            output = await outputs.get()
            reason = output.finish_reason
            yield Record(submission.request, submission.attempt, output.position, list(output.tokens), reason)

    async def pace(self, interval: float, batch: int) -> None:
        self._paced.pace(interval, batch)

    async def emitted(self) -> list[float]:
        return self._paced.emitted
