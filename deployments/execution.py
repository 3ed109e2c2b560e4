"""Runs what Routers submit on the engine of one replica, and puts what comes out on their tapes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from deployments.load import LoadMeter
from deployments.submission import Refusal, Submission
from deployments.tape import Address, Key, Record, Tape, TapeLost
from engine.request import EngineUnavailable, Output, QueueFull, Request, RequestError

if TYPE_CHECKING:
    from engine.engine import EngineStats  # imports torch


class Engine(Protocol):
    """What is needed of an engine here."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def submit(self, request: Request, sink: Callable[[Output], None]) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...


class Executor:
    """One per replica, which Ray Serve calls `name`; all on one event loop."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._load = LoadMeter(engine.stats)
        self._tapes: dict[Address, asyncio.Task[Tape]] = {}

    async def run(self, submission: Submission) -> Refusal | None:
        """Run one attempt; return when it has ended and the Router has all its tokens.

        However this ends, cancellation included, the engine does not go on with it.
        """
        key = submission.request, submission.attempt
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
        )
        try:
            tape = await self._tape(submission.tape)
        except TapeLost as error:
            return Refusal("lost", str(error))

        def put(output: Output) -> None:
            tokens = list(output.tokens)
            tape.put(
                Record(*key, output.position, tokens, output.finish_reason, output.error, request.num_cached)
            )

        try:
            self._engine.submit(request, put)
        except QueueFull as error:
            return Refusal("full", str(error))
        except EngineUnavailable as error:
            return Refusal("unavailable", str(error))
        except RequestError as error:
            return Refusal("invalid", str(error), error.field)
        try:
            await tape.delivery(key)
        except TapeLost as error:
            self._engine.abort(request.id)
            return Refusal("lost", str(error))
        except asyncio.CancelledError:
            self._engine.abort(request.id)
            raise
        return None

    async def _tape(self, address: Address) -> Tape:
        """The tape to one Router, opened by the first request that it sends."""
        opening = self._tapes.get(address)
        if opening is None:
            opening = self._tapes[address] = asyncio.create_task(self._open(address))
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # maybe all left
        return await asyncio.shield(opening)

    async def _open(self, address: Address) -> Tape:
        def abort(key: Key) -> None:
            self._engine.abort(_request_id(address, key))

        def closed() -> None:
            self._tapes.pop(address, None)

        try:
            return await Tape.connect(address, self._name, self._load.read, abort, closed)
        except TapeLost:
            closed()
            raise


def _request_id(router: Address, key: Key) -> str:
    """Unique among the requests of all Routers."""
    return f"{router.router}-{key[0]}-{key[1]}"
