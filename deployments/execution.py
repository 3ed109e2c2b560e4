"""Runs what Routers submit on the engine of one replica, and puts what comes out on their tapes."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Protocol

from opentelemetry.trace import Span, Tracer

from deployments.load import LoadMeter
from deployments.submission import Reason, Refusal, Submission
from deployments.tape import Address, Key, Record, Tape, TapeLost
from deployments.tape_meter import TapeMeter
from deployments.tracing import received, tracer_to
from engine.request import EngineUnavailable, FinishReason, Output, QueueFull, Request, RequestError
from engine.stats import EngineStats

PROBATION = 1.0
"""Seconds, about, that a request waits for each replica that it has lost in a row without a token from it. If
it is what kills them, others that it takes along get a token from the next one first: they are never refused.
"""


class Engine(Protocol):
    """What is needed of an engine here."""

    @property
    def healthy(self) -> bool: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    async def submit(
        self, request: Request, sink: Callable[[Output], None], *, promised: bool = False
    ) -> None: ...
    def abort(self, request_id: str, cause: str) -> None: ...
    def stats(self) -> EngineStats: ...


class Executor:
    """One per replica, which Ray Serve calls `name` and which serves `model`; all on one event loop."""

    def __init__(self, engine: Engine, name: str, model: str, tracer: Tracer | None = None) -> None:
        self._engine = engine
        self._name = name
        self._model = model
        self.load = LoadMeter(engine.stats).read
        self.meter = TapeMeter()
        self._tracer = tracer or tracer_to(None)
        self._tapes: dict[Address, asyncio.Task[Tape]] = {}

    async def run(self, submission: Submission) -> Refusal | None:
        """Run one attempt; return when it has ended and the Router has all its tokens.

        However this ends, cancellation included, the engine does not go on with it.
        """
        with self._tracer.start_as_current_span("execute", received(submission.trace)) as span:
            span.set_attributes({"stepahead.replica": self._name, "stepahead.attempt": submission.attempt})
            refusal = await self._run(submission, span)
            if refusal is not None:
                span.set_attribute("stepahead.refusal", refusal.reason)
            return refusal

    async def _run(self, submission: Submission, span: Span) -> Refusal | None:
        if submission.model != self._model:
            return self._refuse("other model", f"this replica serves {self._model}")
        number, attempt = key = submission.request, submission.attempt
        first = len(submission.generated)
        sampling = submission.sampling
        eos = () if sampling.ignore_eos else self._engine.eos_token_ids
        request = Request(
            id=_request_id(submission.tape, key),
            prompt=submission.prompt,
            # A client that ignores the model's own end still means the stop tokens that it names.
            sampling=dataclasses.replace(
                sampling, stop_token_ids=sampling.stop_token_ids + eos, ignore_eos=False
            ),
            generated=submission.generated,
            **submission.scheduling.for_engine(),
        )
        if submission.lost:
            await asyncio.sleep(PROBATION * submission.lost * random.uniform(0.5, 1.5))
        try:
            tape = await self._tape(submission.tape)
        except TapeLost as error:
            return self._refuse("lost", str(error))
        if tape.moving:
            return self._refuse("moved", "the Router wants nothing more from this replica")
        failure, begun = "", False

        def put(output: Output) -> None:
            nonlocal failure, begun
            begun = True
            position, tokens, reason = output.position, output.tokens, output.finish_reason
            logprobs = list(output.logprobs)
            if position == first and tokens:
                span.add_event("first token")
            if reason is None:
                return tape.put(Record(number, attempt, position, list(tokens), logprobs=logprobs))
            span.set_attribute("stepahead.finish_reason", reason)
            if reason is FinishReason.ERROR and not self._engine.healthy:
                # Whatever broke the engine, nearly all whom it takes along are innocent.
                reason, failure = FinishReason.ABORT, output.error or "the engine failed"
            tape.put(Record(*key, position, list(tokens), reason, output.error, request.num_cached, logprobs))

        try:
            with tape.delivery(key) as delivered:
                accepting = asyncio.ensure_future(
                    self._engine.submit(request, put, promised=submission.promised)
                )
                accepting.add_done_callback(lambda task: task.cancelled() or task.exception())
                try:  # one that hangs does not answer, and the Router has it back before
                    await asyncio.wait((accepting, delivered), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    accepting.cancel()
                if accepting.done():
                    await accepting
                    if not begun:
                        tape.put(Record(*key, first, []))  # it is in
                    self._tell_others(submission)
                await delivered
        except QueueFull as error:
            return self._refuse("full", str(error), retry_after=error.retry_after)
        except EngineUnavailable as error:
            return self._refuse("unavailable", str(error))
        except RequestError as error:
            return self._refuse("invalid", str(error), error.field)
        except TapeLost as error:
            self._engine.abort(request.id, "tape_lost")
            return self._refuse("lost", str(error))
        except asyncio.CancelledError:
            self._engine.abort(request.id, "cancelled")
            raise
        if failure:
            return self._refuse("lost", failure)
        return self._refuse("moved", "the Router asked for it back") if tape.moving else None

    def _tell_others(self, submission: Submission) -> None:
        """So that each Router knows of all prefixes: one session's requests come through any of them."""
        others = [
            opened.result()
            for address, opened in self._tapes.items()
            if address != submission.tape and opened.done() and not (opened.cancelled() or opened.exception())
        ]
        if others:
            prefix = submission.prefix()
            for tape in others:
                tape.tell(prefix)

    def _refuse(
        self, reason: Reason, message: str, field: str | None = None, retry_after: float | None = None
    ) -> Refusal:
        return Refusal(reason, message, field, self._name, retry_after)

    async def _tape(self, address: Address) -> Tape:
        """The tape to one Router, opened by the first request that it sends."""
        opening = self._tapes.get(address)
        if opening is None:
            opening = self._tapes[address] = asyncio.create_task(self._open(address))
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # maybe all left
        return await asyncio.shield(opening)

    async def _open(self, address: Address) -> Tape:
        tape: Tape | None = None

        def abort(key: Key) -> None:
            moving = tape is not None and tape.moving
            self._engine.abort(_request_id(address, key), "moved" if moving else "unwanted")

        mine = asyncio.current_task()

        def closed() -> None:
            if self._tapes.get(address) is mine:  # and not the one opened since
                del self._tapes[address]

        try:
            tape = await Tape.connect(address, self._name, self.load, abort, closed, self.meter)
            return tape
        except TapeLost:
            closed()
            raise


def _request_id(router: Address, key: Key) -> str:
    """Unique among the requests of all Routers."""
    return f"{router.router}-{key[0]}-{key[1]}"
