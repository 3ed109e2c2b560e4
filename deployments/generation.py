"""One sequence as the Router sees it: submitted, followed on the tape, resubmitted if it must move."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from itertools import count
from typing import TypeAlias

from deployments.submission import ANY_TIME, Refusal, SchedulingParams, Submission
from deployments.tape import Address, Observe, Record, TapeListener
from deployments.telemetry import Watch
from engine.request import FinishReason, Logprobs, SamplingParams

logger = logging.getLogger(__name__)

Submit: TypeAlias = Callable[[Submission], Awaitable[Refusal | None]]
"""Returns when the request has ended on its replica and its last tokens have been delivered."""

ATTEMPTS = 3
"""A request that has lost so many replicas in a row without a token from any is not tried on another: it
may be what kills them."""

GRACE = 2.0
"""Seconds past its time in which a replica should have said that a request is over."""

SHUTTING_DOWN = Refusal("unavailable", "the server is shutting down")


class Generation:
    """The tokens of one sequence, growing until `finish_reason` or `refusal` is set.

    It holds at most the tokens that the request may generate, however slowly they are read.
    """

    def __init__(
        self,
        request: int,
        prompt: list[int],
        sampling: SamplingParams,
        notify: Callable[[], None],
        scheduling: SchedulingParams,
        watch: Watch | None = None,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.sampling = sampling
        self.scheduling = scheduling
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        """One for each of `tokens`, if `sampling` asks for them."""
        self.finish_reason: FinishReason | None = None
        self.refusal: Refusal | None = None
        self.num_cached = 0
        self.admitted = asyncio.Event()
        """Set when a replica has accepted it, or when it has ended without."""
        self._attempt = 0
        self._notify = notify
        self.watch = watch
        self._began = time.monotonic()

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.refusal is not None

    def take(self, record: Record) -> bool:
        """Add what `record` brought. False if it does not continue this sequence."""
        if self.ended or record.attempt != self._attempt or record.position != len(self.tokens):
            return False
        if record.finish_reason is FinishReason.ABORT:
            return False  # nobody here asked for it: the attempt is lost
        self.admitted.set()
        if not record.tokens and record.finish_reason is None:
            return True
        self.tokens += record.tokens
        self.logprobs += record.logprobs
        if self.watch and record.tokens:
            self.watch.took(len(record.tokens))
        self.num_cached = record.num_cached
        if record.finish_reason is FinishReason.ERROR:
            self.refusal = Refusal("failed", record.error or "the engine failed")
        else:
            self.finish_reason = record.finish_reason
        self._notify()
        return True

    def refuse(self, refusal: Refusal) -> None:
        """End it without a finish reason, unless it has ended."""
        if not self.ended:
            self.refusal = refusal
            self.admitted.set()
            self._notify()

    def _time_out(self) -> None:
        if not self.ended:
            self.finish_reason = FinishReason.TIMEOUT
            self.admitted.set()
            self._notify()

    async def run(
        self, submit: Submit, model: str, tape: Address, replicas: Callable[[], Collection[str]]
    ) -> None:
        """Submit until it has ended; with the tokens so far when it must move, or its replica is lost.

        `replicas`: the names of those that take requests, as far as is known. None of them is asked for room
        twice.
        """
        limit = self.scheduling.timeout
        try:
            async with asyncio.timeout(None if limit is None else limit + GRACE):
                await self._run(submit, model, tape, replicas)
        except TimeoutError:  # no replica says so: it hangs, or there is none
            self._time_out()

    async def _run(
        self, submit: Submit, model: str, tape: Address, replicas: Callable[[], Collection[str]]
    ) -> None:
        lost, tried, refused = 0, list[str](), set[str]()
        cause: str | None = None
        for self._attempt in count():
            scheduling = self.scheduling.after(time.monotonic() - self._began, began=bool(self.tokens))
            if scheduling.over:
                return self._time_out()
            before = len(self.tokens)
            refusal = await submit(
                Submission(
                    model,
                    tape,
                    self.request,
                    self._attempt,
                    self.prompt,
                    self.sampling,
                    scheduling,
                    list(self.tokens),
                    promised=self.admitted.is_set(),
                    avoid=tuple(tried),
                    lost=lost,
                    trace=self.watch.submitted(cause) if self.watch else {},
                )
            )
            if self.ended:
                return
            if refusal is None:  # it ended, but what it sent was not taken
                refusal = Refusal("lost", "tokens of this request were lost")
            cause = refusal.reason
            idle = len(self.tokens) == before
            if not idle:
                lost = 0
            elsewhere = refusal.replica is not None and refusal.replica not in tried
            if elsewhere and refusal.replica is not None:
                tried.append(refusal.replica)
            if refusal.replica is not None and refusal.reason in ("full", "unavailable", "other model"):
                refused.add(refusal.replica)
            everywhere = bool(replicas()) and refused.issuperset(replicas())
            match refusal.reason:
                case "full" | "unavailable" | "other model" if elsewhere and not everywhere:
                    pass
                case "moved" if elsewhere:
                    pass
                case "lost" | "moved" if (lost := lost + idle) < ATTEMPTS:
                    logger.warning("request %d, attempt %d: %s", self.request, self._attempt, refusal.message)
                case _:
                    return self.refuse(refusal)


class Dispatcher:
    """The generations of one Router, and its end of the tapes they come on.

    `observe` is called with what is heard of a replica: its name, its load, what others have sent it.
    `watch` gives each sequence, by its number of prompt tokens, somebody who follows it.
    """

    def __init__(
        self,
        submit: Submit,
        model: str,
        observe: Observe = lambda *_: None,
        watch: Callable[[int], Watch] | None = None,
    ) -> None:
        self._submit = submit
        self._watch = watch
        self._model = model
        self._requests = count()
        self._running: dict[int, tuple[Generation, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = TapeListener(self._deliver, observe)
        self._tape: Address | None = None
        self._replicas: Collection[str] = ()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def open(self, host: str) -> None:
        """Listen for replicas on `host`, an address of this machine that they can reach."""
        self._tape = await self._listener.start(host)

    async def close(self) -> None:
        """Stop everything. The replicas abort what this Router had submitted."""
        for task in self._tasks:
            task.cancel()
        await self._listener.close()

    def keep(self, replicas: Collection[str]) -> None:
        """Move what runs on other replicas than these: it is aborted there, and submitted again."""
        self._listener.keep(replicas)

    def welcome(self, replicas: Collection[str]) -> None:
        """These take requests; what comes to run on them stays there, until others are kept."""
        self._replicas = replicas
        self._listener.welcome(replicas)

    async def drain(self, grace: float) -> None:
        """Begin nothing more; return when nothing runs. What still does after `grace` seconds is refused."""
        self._draining = True
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            for generation, task in self._running.values():
                generation.refuse(SHUTTING_DOWN)
                task.cancel()
            await self._idle.wait()  # until their readers have seen it

    def start(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        notify: Callable[[], None],
        scheduling: SchedulingParams = ANY_TIME,
    ) -> Generation:
        """Begin a sequence; `notify` is called whenever it has grown or ended. `stop` it in any case."""
        if self._tape is None:
            raise RuntimeError("the dispatcher is not open")
        watch = self._watch(len(prompt)) if self._watch else None
        generation = Generation(next(self._requests), prompt, sampling, notify, scheduling, watch)
        task = asyncio.create_task(
            generation.run(self._submit, self._model, self._tape, lambda: self._replicas)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._running[generation.request] = generation, task
        self._idle.clear()
        if self._draining:
            generation.refuse(SHUTTING_DOWN)
            task.cancel()
        return generation

    def stop(self, generation: Generation, reason: FinishReason | None = None) -> None:
        """Forget a sequence. If it has not ended, it is aborted on its replica.

        `reason`: by which its reader ended it, having found a stop string, say.
        """
        _, task = self._running.pop(generation.request)
        if generation.watch:
            refusal = generation.refusal
            ended = reason or generation.finish_reason or (refusal and refusal.reason) or FinishReason.ABORT
            generation.watch.ended(ended, refusal.message if refusal else "")
        if not generation.ended:  # else the submission is about to return
            task.cancel()
        if not self._running:
            self._idle.set()

    def _deliver(self, record: Record) -> bool:
        running = self._running.get(record.request)
        return running is not None and running[0].take(record)
