"""An engine in a process of its own: nobody else there wants the GIL that its loop needs.

Here are the caller's end and what goes over the socket between the two; `engine/worker.py` is what
runs in the process. Calls go there by the name of a method, their arguments pickled. Back come answers,
log records, and after each step one frame with all that it brought for any request.
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
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.frames import Frames
from engine.request import EngineUnavailable, FinishReason, Logprobs, Output, Request, RequestError
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
    max_tokens_per_step: int
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
    logprobs: tuple[Logprobs, ...] = ()


class Step(msgspec.Struct, array_like=True, tag=0):
    """What came of one turn of the engine's loop, or that a request came, and how the engine was after it."""

    stats: EngineStats
    failure: str | None
    outputs: list[Told]


class Answer(msgspec.Struct, array_like=True, tag=1):
    """To the call of that number: what it returned, or raised, pickled."""

    number: int
    value: bytes
    error: str | None
    """What it raised, in words: an error's class may be known there only."""


class LogRecord(msgspec.Struct, array_like=True, tag=2):
    """The attributes of a `logging.LogRecord`; what is no plain value, as its `repr`."""

    attributes: dict[str, str | int | float | None]


class EngineProcess(Frames):
    """The face of an `AsyncEngine` that lives in a child process. All methods are called on one event loop.

    Either process ends the other's part when it dies, whatever it dies of: the child ends itself, and
    here `failed` is done, `healthy` is False, and every request gets an error.
    """

    def __init__(self, config: EngineConfig, make: Callable[[EngineConfig], Any] | None = None) -> None:
        """`make`, which is pickled, makes something else than an `AsyncEngine`: a subclass, say."""
        super().__init__()
        self.config = config
        self.failure: str | None = "the engine has not started"
        """Why it takes no requests, if it takes none."""
        self.failed: asyncio.Future[str]
        """As in `AsyncEngine`."""
        self._make = make
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._live: dict[str, tuple[Request, Callable[[Output], None]]] = {}
        self._asked: set[str] = set()  # those live that the engine has not accepted yet
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
                # -P: modules are found where they are found here, and not first in the working directory.
                [sys.executable, "-P", "-m", "engine.worker", str(there.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )
        loop = asyncio.get_running_loop()
        self.failed = loop.create_future()
        try:
            await loop.create_connection(lambda: self, sock=here)
            level = logging.getLogger("engine").getEffectiveLevel()
            facts: Facts = await self.call("start", self.config, self._make, level)
            if self.failed.done():
                raise EngineUnavailable(self.failed.result())
        except BaseException as error:  # cancellation included
            await self.stop()
            self.failure = f"the engine did not start: {error!r}"
            raise
        self.context_length, self.vocab_size, self.eos_token_ids, self.max_tokens_per_step = facts[:4]
        self.device, self.gpu_uuid, self.startup_s, self._stats = facts[4:]
        self.failure, self._started = None, True

    async def stop(self) -> None:
        """End the process and, with an error, what is left in it."""
        self.failure = self.failure or "the engine was stopped"
        self._stopped = True
        self.close()
        if self._process is not None:
            if not self._started:
                self._process.kill()  # while it imports, it hears nothing
            try:
                await asyncio.to_thread(self._process.wait, END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
            except asyncio.CancelledError:
                self._process.kill()
                raise

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
        answer = self._ask("submit", _packed(request), promised)
        self._live[request.id] = request, sink
        self._asked.add(request.id)
        answer.add_done_callback(partial(self._answered, request.id))
        try:
            await asyncio.shield(answer)
        except asyncio.CancelledError:
            self.abort(request.id)
            raise

    def _answered(self, request_id: str, answer: asyncio.Future[Any]) -> None:
        self._asked.discard(request_id)
        if answer.exception() is not None:
            self._live.pop(request_id, None)

    def abort(self, request_id: str, cause: str = "cancelled") -> None:
        """End a request. Nothing happens if it has ended, or was never there."""
        if request_id in self._live:
            self.send(_encoded(None, "abort", request_id, cause))

    def stats(self) -> EngineStats:
        """As last told: with each request, whatever came for one, and whenever anybody asked.

        Raises `EngineUnavailable` before `start` is through.
        """
        if not self._started:
            raise EngineUnavailable(self.failure or "")
        return self._stats

    async def ask_stats(self) -> EngineStats:
        """As they are now."""
        self._stats = await self.call("stats")
        return self._stats

    async def reading(self, after: int, most: int) -> Reading:
        """As in `AsyncEngine`."""
        found: Reading = await self.call("reading", after, most)
        self._stats = found.stats
        return found

    async def recent(self, steps: int) -> Recording:
        """The last steps, and the host's phases around them."""
        found: Recording = await self.call("recent", steps)
        return found

    async def turn(self) -> None:
        """Return once the engine's loop has come round: neither it nor the process hangs."""
        await self.call("turn")

    async def call(self, method: str, *args: Any) -> Any:
        """What a method of the engine there returns, awaited if need be, or raises.

        Raises `EngineUnavailable` if there is no process, or it ends before it answers.
        """
        return await asyncio.shield(self._ask(method, *args))

    def _ask(self, method: str, *args: Any) -> asyncio.Future[Any]:
        number = next(self._numbers)
        call = _encoded(number, method, *args)
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: answer.exception())  # whoever asked may have left
        if self._transport is None:
            answer.set_exception(EngineUnavailable(self.failure or "the engine's process has ended"))
        else:
            self._calls[number] = answer
            self.send(call)
        return answer

    # What comes from the process

    def frame_received(self, payload: bytes) -> None:
        message = self._decode(payload)
        if isinstance(message, Step):
            self._stats = message.stats
            if message.failure is not None:
                self._fail(message.failure)
            self._deliver(message.outputs)
        elif isinstance(message, Answer):
            _answer(self._calls.pop(message.number), message)
        else:
            with contextlib.suppress(Exception):  # of filters and handlers here
                record = logging.makeLogRecord(message.attributes)
                logging.getLogger(record.name).handle(record)

    def _fail(self, failure: str) -> None:
        if not self.failed.done():
            self.failure = failure
            self.failed.set_result(failure)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._stopped:
            code = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process and self._process.wait(0.1)
            how = "is gone" if code is None else f"ended with exit code {code}"
            logger.error("the engine's process %s %s", self.pid, how)
            self._fail(f"the engine's process {how}")
        for answer in self._calls.values():
            answer.set_exception(EngineUnavailable(self.failure or ""))
        self._calls.clear()
        lost = self._live.keys() - self._asked  # the others are refused
        self._deliver([Told(id, 0, (), FinishReason.ERROR, self.failure, 0) for id in lost])

    def _deliver(self, outputs: list[Told]) -> None:
        live = self._live
        for told in outputs:
            if told.id not in live:
                continue
            request, sink = live[told.id]
            if told.finish_reason is not None:
                del live[told.id]
                request.num_cached = told.num_cached
            try:
                sink(
                    Output(request, told.position, told.tokens, told.finish_reason, told.error, told.logprobs)
                )
            except Exception:
                logger.exception("the reader of request %s failed", told.id)
                self.abort(told.id, "reader_failed")


def _packed(request: Request) -> Request:
    """With arrays in place of lists, which would be read token by token there, while steps wait."""
    try:
        arrays: dict[str, Any] = {
            name: np.asarray(getattr(request, name)) for name in ("prompt", "generated")
        }
    except (ValueError, OverflowError):  # no token ids, as the engine will say
        return request
    return replace(request, **arrays) if all(each.ndim == 1 for each in arrays.values()) else request


def _encoded(number: int | None, method: str, *args: Any) -> bytes:
    return msgspec.msgpack.encode((number, method, pickle.dumps(args)))


def _answer(answer: asyncio.Future[Any], message: Answer) -> None:
    value, error = None, message.error
    try:
        value = pickle.loads(message.value)
    except Exception as unread:
        error = error or f"an answer of the engine's process cannot be read: {unread!r}"
    if error is None:
        answer.set_result(value)
    elif isinstance(value, Exception) and not isinstance(value, StopIteration):  # no future takes that
        answer.set_exception(value)
    else:
        answer.set_exception(RuntimeError(error))
