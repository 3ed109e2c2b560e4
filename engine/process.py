"""An engine in a process of its own: nobody else there wants the GIL that its loop needs.

Here are the caller's end and what goes over the socket between the two; `engine/worker.py` is what
runs in the process. Calls go there by the name of a method, pickled. Back come their answers, log
records, and after each step one frame with all that it brought for any request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import msgspec

from engine.config import EngineConfig
from engine.frames import Frames
from engine.request import EngineUnavailable, FinishReason, Output, Request, RequestError
from engine.stats import EngineStats, Reading
from engine.timeline import Recording

logger = logging.getLogger(__name__)

END = 10.0
"""Seconds after which a process that does not end by itself is killed."""


class Facts(NamedTuple):
    """What is known of an engine once it has started. See `AsyncEngine`."""

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    gpu_uuid: str | None
    startup_s: dict[str, float]
    stats: EngineStats


class Told(msgspec.Struct, array_like=True, gc=False):
    """An `Output`, with the request's id in its place."""

    id: str
    position: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None
    num_cached: int


class Step(msgspec.Struct, array_like=True, tag=0):
    """What came of one turn of the engine's loop, or that a request came, and how the engine was after it."""

    stats: EngineStats
    failure: str | None
    outputs: list[Told]


class Answer(msgspec.Struct, array_like=True, tag=1):
    """To the call of that number: what it returned or, if it `failed`, raised. Pickled."""

    number: int
    failed: bool
    value: bytes


class LogRecord(msgspec.Struct, array_like=True, tag=2):
    """The attributes of a `logging.LogRecord`, pickled."""

    attributes: bytes


class EngineProcess(Frames):
    """The face of an `AsyncEngine` that lives in a child process. All methods are called on one event loop.

    Either process ends the other's part when it dies, whatever it dies of: the child ends itself, and
    here every request gets an error and `healthy` is False.
    """

    def __init__(self, config: EngineConfig, make: Callable[[EngineConfig], Any] | None = None) -> None:
        """`make`, which is pickled, makes something else than an `AsyncEngine`: a subclass, say."""
        super().__init__()
        self.config = config
        self.failure: str | None = "it has not started"
        """Why it takes no requests, if it takes none."""
        self._make = make
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._live: dict[str, tuple[Request, Callable[[Output], None]]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._stopped = False
        self._decode = msgspec.msgpack.Decoder(Step | Answer | LogRecord).decode

    # Life

    async def start(self) -> None:
        """Start the process and the engine in it. Raises what goes wrong in that. Once only."""
        if self._process is not None:
            raise RuntimeError("an engine starts once")
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.worker", str(there.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, sock=here)
            level = logging.getLogger("engine").getEffectiveLevel()
            facts: Facts = await self.call("start", self.config, self._make, level)
        except BaseException as error:  # cancellation included
            await self.stop()
            self.failure = f"it did not start: {error!r}"
            raise
        self.context_length, self.vocab_size, self.eos_token_ids = facts[:3]
        self.device, self.gpu_uuid, self.startup_s, self._stats = facts[3:]
        self.failure, self._started = None, True

    async def stop(self) -> None:
        """End the process and, with an error, what is left in it."""
        self.failure = self.failure or "it was stopped"
        self._stopped = True
        self.close()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)

    @property
    def healthy(self) -> bool:
        return self.failure is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    # Requests, as in AsyncEngine

    async def submit(
        self, request: Request, sink: Callable[[Output], None], *, promised: bool = False
    ) -> None:
        """As `AsyncEngine.submit`, but `sink` may be called before this returns."""
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        if request.id in self._live:
            raise RequestError(f"a request with id {request.id!r} is running", "id")
        self._live[request.id] = request, sink
        try:
            await self.call("submit", request, promised)
        except asyncio.CancelledError:
            self.abort(request.id)
            raise
        except Exception:
            self._live.pop(request.id, None)
            raise

    def abort(self, request_id: str, cause: str = "cancelled") -> None:
        """End a request. Nothing happens if it has ended, or was never there."""
        if request_id in self._live:
            self.send(pickle.dumps((None, "abort", (request_id, cause))))

    def stats(self) -> EngineStats:
        """As last told: with whatever came for a request, and whenever anybody asked."""
        return self._stats

    async def ask_stats(self) -> EngineStats:
        """As they are now."""
        self._stats = await self.call("stats")
        return self._stats

    async def reading(self, after: int) -> Reading:
        """What is to be exported, of steps those after step `after`."""
        found: Reading = await self.call("reading", after)
        self._stats = found.stats
        return found

    async def recent(self, steps: int) -> Recording:
        """The last steps, and the host's phases around them."""
        found: Recording = await self.call("recent", steps)
        return found

    async def call(self, method: str, *args: Any) -> Any:
        """What a method of the engine there returns, awaited if need be, or raises.

        Raises `EngineUnavailable` if there is no process, or it ends before it answers.
        """
        if self._transport is None:
            raise EngineUnavailable(self.failure or "its process has ended")
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(pickle.dumps((number, method, args)))
            return await answer
        finally:
            del self._calls[number]

    # What comes from the process

    def frame_received(self, payload: bytes) -> None:
        message = self._decode(payload)
        if isinstance(message, Step):
            self._stats, self.failure = message.stats, message.failure
            self._deliver(message.outputs)
        elif isinstance(message, Answer):
            answer = self._calls.get(message.number)
            if answer is None or answer.done():
                return
            value = pickle.loads(message.value)
            if message.failed:
                answer.set_exception(value)
            else:
                answer.set_result(value)
        else:
            record = logging.makeLogRecord(pickle.loads(message.attributes))
            logging.getLogger(record.name).handle(record)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._stopped:
            code = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process and self._process.wait(0.1)
            logger.error("the engine's process %s ended with exit code %s", self.pid, code)
            if self.healthy or not self._started:
                self.failure = f"its process ended with exit code {code}"
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(self.failure or ""))
        error = FinishReason.ERROR
        self._deliver([Told(id, 0, (), error, self.failure, 0) for id in self._live])

    def _deliver(self, outputs: list[Told]) -> None:
        live = self._live
        for told in outputs:
            request, sink = live.get(told.id) or (None, None)
            if request is None or sink is None:
                continue
            if told.finish_reason is not None:
                del live[told.id]
                request.num_cached = told.num_cached
            try:
                sink(Output(request, told.position, told.tokens, told.finish_reason, told.error))
            except Exception:
                logger.exception("the reader of request %s failed", told.id)
                self.abort(told.id, "reader_failed")
