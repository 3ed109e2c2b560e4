"""The process of one engine: what `engine.process.EngineProcess` starts, and talks to."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from engine.collector import spare_collector
from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.frames import Frames
from engine.process import Answer, Facts, LogRecord, Step, Told
from engine.request import EngineUnavailable, Output, QueueFull, Request, RequestError

logger = logging.getLogger("engine.worker")  # which is `__main__` here

EXPECTED = (RequestError, QueueFull, EngineUnavailable)
"""Errors that are answers; any other is logged with where it came from."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Worker(Frames):
    """The process's end of the socket. When that is gone, so is whoever wants something: the process ends."""

    def __init__(self) -> None:
        super().__init__()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._encode = msgspec.msgpack.Encoder().encode
        self._outputs: list[Told] = []
        self._flushing = False
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_lost(self, exc: Exception | None) -> None:
        os._exit(0)  # the engine's thread may be in the middle of anything

    # Calls

    def frame_received(self, payload: bytes) -> None:
        task = self._loop.create_task(self._answer(*msgspec.msgpack.decode(payload)))
        self._tasks.add(task)  # or it could be collected while it runs
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int | None, method: str, args: bytes) -> None:
        told = None
        try:
            value = getattr(self if hasattr(self, method) else self._engine, method)(*pickle.loads(args))
            if inspect.isawaitable(value):
                value = await value
            pickled = pickle.dumps(value)
        except BaseException as error:  # whatever it is, somebody waits for it
            told, pickled = type(error).__name__, b""
            with contextlib.suppress(Exception):
                told = _plain(f"{told}: {error}")
            if not isinstance(error, EXPECTED):
                logger.exception("%s failed", method)
            with contextlib.suppress(Exception):  # else it is told in words
                pickled = pickle.dumps(error)
        if number is not None:
            self.send(self._encode(Answer(number, pickled, told)))

    async def start(
        self, config: EngineConfig, make: Callable[[EngineConfig], AsyncEngine] | None, level: int
    ) -> Facts:
        """Start the engine, and log what loggers of `level` do."""
        logging.getLogger().addHandler(_Forward(self._log))
        logging.getLogger("engine").setLevel(level)
        engine = self._engine = (make or AsyncEngine)(config)
        await engine.start()
        await engine.turn()  # one that breaks at once has not started
        engine.failed.add_done_callback(lambda _: self._flush())
        spare_collector()
        return Facts(
            engine.context_length,
            engine.vocab_size,
            engine.eos_token_ids,
            engine.max_tokens_per_step,
            engine.device,
            engine.gpu_uuid,
            engine.startup_s,
            engine.stats(),
        )

    def submit(self, request: Request, promised: bool) -> None:
        self._engine.submit(request, self._put, promised=promised)
        self._flush()  # before the answer, so that the load that it brings is known

    # What the engine says

    def _put(self, output: Output) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)  # the other outputs of this step come within this callback
        request, error = output.request, output.error
        self._outputs.append(
            Told(
                request.id,
                output.position,
                output.tokens,
                output.finish_reason,
                error and _plain(error),
                request.num_cached,
                output.logprobs,
            )
        )

    def _flush(self) -> None:
        self._flushing = False
        outputs, self._outputs = self._outputs, []
        failure = self._engine.failure
        self.send(self._encode(Step(self._engine.stats(), failure and _plain(failure), outputs)))

    def _log(self, record: bytes) -> None:
        if threading.get_ident() == self._thread:
            self.send(record)  # before the answer whose error it explains
        else:
            self._loop.call_soon_threadsafe(self.send, record)


class _Forward(logging.Handler):
    """Has records logged on the other side."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send
        self._encode = msgspec.msgpack.Encoder().encode

    def emit(self, record: logging.LogRecord) -> None:
        try:
            plain = vars(record) | {"msg": record.getMessage(), "args": None, "exc_info": None}
            if record.exc_info:
                plain["exc_text"] = logging.Formatter().formatException(record.exc_info)
            self._send(self._encode(LogRecord({str(key): _told(value) for key, value in plain.items()})))
        except Exception:
            self.handleError(record)


def _told(value: object) -> str | int | float | None:
    """An attribute of a log record: what is more than a plain value, as its `repr`."""
    if isinstance(value, int | float | None):
        return value
    return _plain(value if isinstance(value, str) else repr(value))


def _plain(text: str) -> str:
    """What UTF-8 can say of it."""
    return text.encode(errors="backslashreplace").decode()


async def work(connection: socket.socket) -> None:
    # Children of this process must not hold it open.
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)
    await asyncio.get_running_loop().create_connection(Worker, sock=connection)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.platform == "linux":  # in case the end of the socket is not heard
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever started this one decides
    asyncio.run(work(socket.socket(fileno=int(sys.argv[1]))))
