"""The process of one engine: what `engine.process.EngineProcess` starts, and talks to."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from engine.collector import spare_collector
from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.frames import Frames
from engine.process import Answer, Facts, LogRecord, Step, Told
from engine.request import Output, Request

logger = logging.getLogger(__name__)


class Worker(Frames):
    """The process's end of the socket. When that is gone, so is whoever wants something: the process ends."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._encode = msgspec.msgpack.Encoder().encode
        self._outputs: list[Told] = []
        self._flushing = False
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_lost(self, exc: Exception | None) -> None:
        os._exit(0)  # the engine's thread may be in the middle of anything

    # Calls

    def frame_received(self, payload: bytes) -> None:
        task = self._loop.create_task(self._answer(*pickle.loads(payload)))
        self._tasks.add(task)  # or it could be collected while it runs
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int | None, method: str, args: tuple[Any, ...]) -> None:
        failed = False
        try:
            value = getattr(self if hasattr(self, method) else self._engine, method)(*args)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            value, failed = error, True
        if number is not None:
            self.send(self._encode(Answer(number, failed, _pickled(value))))
        elif failed:
            logger.error("%s failed", method, exc_info=value)

    async def start(
        self, config: EngineConfig, make: Callable[[EngineConfig], AsyncEngine] | None, level: int
    ) -> Facts:
        """Start the engine, and log what loggers of `level` do."""
        logging.getLogger().addHandler(_Forward(self._log))
        logging.getLogger("engine").setLevel(level)
        engine = self._engine = (make or AsyncEngine)(config)
        await engine.start()
        spare_collector()
        return Facts(
            engine.context_length,
            engine.vocab_size,
            engine.eos_token_ids,
            engine.device,
            engine.gpu_uuid,
            engine.startup_s,
            engine.stats(),
        )

    def submit(self, request: Request, promised: bool) -> None:
        self._engine.submit(request, self._put, promised=promised)
        self._flush_soon()  # so that the load is known that it brings

    # What the engine says

    def _put(self, output: Output) -> None:
        self._flush_soon()
        request = output.request
        self._outputs.append(
            Told(
                request.id,
                output.position,
                output.tokens,
                output.finish_reason,
                output.error,
                request.num_cached,
            )
        )

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)  # the other outputs of this step come within this callback

    def _flush(self) -> None:
        self._flushing = False
        outputs, self._outputs = self._outputs, []
        self.send(self._encode(Step(self._engine.stats(), self._engine.failure, outputs)))

    def _log(self, attributes: dict[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self.send, self._encode(LogRecord(_pickled(attributes))))


class _Forward(logging.Handler):
    """Has records logged on the other side."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        plain = copy.copy(record)  # as `logging.handlers.QueueHandler` does
        plain.msg, plain.args = record.getMessage(), None
        if record.exc_info:
            plain.exc_text = logging.Formatter().formatException(record.exc_info)
            plain.exc_info = None
        self._send(vars(plain))


def _pickled(value: Any) -> bytes:
    """Errors that cannot be taken apart and put together again are told by what they say."""
    try:
        pickled = pickle.dumps(value)
        if isinstance(value, Exception):
            pickle.loads(pickled)
        return pickled
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(value).__name__}: {value}"))


async def work(connection: socket.socket) -> None:
    await asyncio.get_running_loop().create_connection(Worker, sock=connection)
    await asyncio.Event().wait()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever started this one decides
    asyncio.run(work(socket.socket(fileno=int(sys.argv[1]))))
