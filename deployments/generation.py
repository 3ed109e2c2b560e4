"""One sequence as the Router sees it: submitted, followed on the tape, resubmitted if its replica dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeAlias

from deployments.load import Load
from deployments.submission import Refusal, Submission
from deployments.tape import Address, Record, TapeListener
from engine.request import FinishReason, SamplingParams

logger = logging.getLogger(__name__)

Submit: TypeAlias = Callable[[Submission], Awaitable[Refusal | None]]
"""Returns when the request has ended on its replica and its last tokens have been delivered."""

ATTEMPTS = 3
"""A request that has lost this many replicas is not tried on another: it may be what kills them."""


class Generation:
    """The tokens of one sequence, growing until `finish_reason` or `refusal` is set.

    It holds at most the tokens that the request may generate, however slowly they are read.
    """

    def __init__(
        self, request: int, prompt: list[int], sampling: SamplingParams, notify: Callable[[], None]
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.sampling = sampling
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.refusal: Refusal | None = None
        self.num_cached = 0
        self._attempt = 0
        self._notify = notify

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.refusal is not None

    def take(self, record: Record) -> bool:
        """Add what `record` brought. False if it does not continue this sequence."""
        if self.ended or record.attempt != self._attempt or record.position != len(self.tokens):
            return False
        if record.finish_reason is FinishReason.ABORT:
            return False  # nobody here asked for it: the attempt is lost
        self.tokens += record.tokens
        self.num_cached = record.num_cached
        if record.finish_reason is FinishReason.ERROR:
            self.refusal = Refusal("failed", record.error or "the engine failed")
        else:
            self.finish_reason = record.finish_reason
        self._notify()
        return True

    async def run(self, submit: Submit, tape: Address) -> None:
        """Submit until the sequence has ended; each time a replica is lost, again with the tokens so far."""
        refusal: Refusal | None = None
        for self._attempt in range(ATTEMPTS):
            refusal = await submit(
                Submission(tape, self.request, self._attempt, self.prompt, self.sampling, list(self.tokens))
            )
            if self.ended:
                return
            if refusal is None:  # it ended, but what it sent was not taken
                refusal = Refusal("lost", "tokens of this request were lost")
            if refusal.reason != "lost":
                break
            logger.warning("request %d, attempt %d: %s", self.request, self._attempt, refusal.message)
        self.refusal = refusal
        self._notify()


class Dispatcher:
    """The generations of one Router, and its end of the tapes they come on.

    `observe` is called with the name and the load of a replica, whenever that is heard of.
    """

    def __init__(self, submit: Submit, observe: Callable[[str, Load], None] = lambda *_: None) -> None:
        self._submit = submit
        self._requests = count()
        self._running: dict[int, tuple[Generation, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = TapeListener(self._deliver, observe)
        self._tape: Address | None = None

    async def open(self, host: str) -> None:
        """Listen for replicas on `host`, an address of this machine that they can reach."""
        self._tape = await self._listener.start(host)

    async def close(self) -> None:
        """Stop everything. The replicas abort what this Router had submitted."""
        for task in self._tasks:
            task.cancel()
        await self._listener.close()

    def start(self, prompt: list[int], sampling: SamplingParams, notify: Callable[[], None]) -> Generation:
        """Begin a sequence; `notify` is called whenever it has grown or ended. `stop` it in any case."""
        if self._tape is None:
            raise RuntimeError("the dispatcher is not open")
        generation = Generation(next(self._requests), prompt, sampling, notify)
        task = asyncio.create_task(generation.run(self._submit, self._tape))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._running[generation.request] = generation, task
        return generation

    def stop(self, generation: Generation) -> None:
        """Forget a sequence. If it has not ended, it is aborted on its replica."""
        _, task = self._running.pop(generation.request)
        if not generation.ended:  # else the submission is about to return
            task.cancel()

    def _deliver(self, record: Record) -> bool:
        running = self._running.get(record.request)
        return running is not None and running[0].take(record)
