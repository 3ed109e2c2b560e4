"""Where traffic goes, an engine in this process or a server over HTTP, and what came back, with its times."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol, Self
from urllib.parse import urlsplit

from benchmarks.arrivals import Arrival

if TYPE_CHECKING:
    from engine.engine import AsyncEngine  # imports torch, which a client of HTTP does without

now = time.perf_counter
"""Seconds on the clock that all processes of a machine share."""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it. Filled while it runs."""

    group: str
    prompt: int
    """Tokens."""
    output: int
    """Tokens asked for."""
    due: float
    """When it had to be sent; all times are those of `now`."""
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    """When tokens came; several that came at once count once."""
    tokens: int = 0
    """Tokens that came, as far as the target knows."""
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    ended: float = 0.0
    error: str | None = None
    """`refused`: the server was full. Else what went wrong."""

    @property
    def complete(self) -> bool:
        return self.error is None and self.ended > 0 and self.tokens == self.output


class Target(Protocol):
    async def send(self, arrival: Arrival, seen: Seen) -> None:
        """Run one request to its end, which `seen` tells. Cancelled, it aborts the request."""


class EngineTarget:
    """An engine in this process, without Ray, HTTP or text."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._ids = count()

    async def send(self, arrival: Arrival, seen: Seen) -> None:
        from engine.request import Output, QueueFull, Request, SamplingParams

        sampling = SamplingParams(max_tokens=arrival.output, temperature=0, ignore_eos=True)
        request = Request(f"traffic-{next(self._ids)}", arrival.prompt, sampling)
        done = asyncio.get_running_loop().create_future()

        def sink(output: Output) -> None:
            if output.tokens:
                seen.times.append(now())
                seen.tokens += len(output.tokens)
            if output.finish_reason is not None and not done.done():
                seen.error = output.error
                done.set_result(None)

        try:
            self.engine.submit(request, sink)
            await done
        except QueueFull:
            seen.error = "refused"
        except asyncio.CancelledError:
            self.engine.abort(request.id)
            seen.error = "stopped"
            raise
        finally:
            seen.cached = request.num_cached
            seen.ended = now()


class HttpTarget:
    """An OpenAI completions server, asked with token ids; one connection for each request."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        """`url`: http://host:port, without the /v1."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._model = model
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\n"
        ) + (f"Authorization: Bearer {api_key}\r\n" if api_key else "")

    async def send(self, arrival: Arrival, seen: Seen) -> None:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": arrival.prompt,
                "max_tokens": arrival.output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            separators=(",", ":"),
        )
        loop = asyncio.get_running_loop()
        transport = None
        try:
            transport, stream = await loop.create_connection(lambda: _Stream(seen), self._host, self._port)
            transport.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            await stream.done
        except OSError as error:
            seen.error = f"no connection: {error}"
        except asyncio.CancelledError:
            seen.error = "stopped"
            raise
        finally:
            seen.ended = now()
            if transport is not None:
                transport.abort()


class _Stream(asyncio.Protocol):
    """Reads one answer: HTTP/1.1, chunked, server-sent events."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._raw = bytearray()  # of the connection, not yet taken apart
        self._text = bytearray()  # of the body: the event that has begun
        self._in_body = False
        self._left = 0  # bytes of the chunk that has begun, its line end included
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._raw += data
        if not self._in_body and not self._read_head():
            return
        self._read_chunks()
        *events, rest = self._text.split(b"\n\n")
        self._text = rest
        brought = [self._read_event(event) for event in events]
        if any(brought):
            self._seen.times.append(now())

    def _read_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._raw[:end])
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            self._end("refused" if status == 429 else f"status {status}")
            return False
        if b"transfer-encoding: chunked" not in head.lower():
            self._end("the answer is not a stream")
            return False
        del self._raw[: end + 4]
        self._in_body = True
        return True

    def _read_chunks(self) -> None:
        raw, at = self._raw, 0
        while at < len(raw):
            if not self._left:
                end = raw.find(b"\r\n", at)
                if end < 0:
                    break
                self._left = int(raw[at:end].split(b";")[0], 16) + 2
                at = end + 2
            piece = raw[at : at + self._left]
            wanted = max(0, min(len(piece), self._left - 2))  # its last two are the line end
            self._text += piece[:wanted]
            self._left -= len(piece)
            at += len(piece)
        del raw[:at]

    def _read_event(self, event: bytearray) -> bool:
        """Whether it brought a token."""
        if b'"finish_reason":null' in event:
            return True
        if event == b"data: [DONE]":
            self._end(None)
        elif b'"usage":{' in event:
            usage = json.loads(event.removeprefix(b"data: "))["usage"]
            self._seen.tokens = usage["completion_tokens"]
            self._seen.cached = usage["prompt_tokens_details"]["cached_tokens"]
        elif b'"error":' in event:
            self._end(event.decode(errors="replace")[:200])
        return False

    def _end(self, error: str | None) -> None:
        if not self.done.done():
            self._seen.error = error
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"cut off: {exc or 'the server closed the connection'}")


@contextmanager
def undisturbed() -> Iterator[None]:
    """No long garbage collections within: they would stop the reader of the clock for 0.2 s each."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def play(target: Target, arrivals: Sequence[Arrival], begin: float | None = None) -> list[Seen]:
    """Send every request when it is due, whatever became of the others; return when all have ended.

    `begin`: the time that arrivals count from; now by default.
    """
    begin = now() if begin is None else begin
    seen: list[Seen] = []
    tasks: list[asyncio.Task[None]] = []
    for arrival in sorted(arrivals, key=lambda a: a.at):
        due = begin + arrival.at
        if (wait := due - now()) > 0:
            await asyncio.sleep(wait)
        one = Seen(arrival.group, len(arrival.prompt), arrival.output, due, sent=now())
        seen.append(one)
        tasks.append(asyncio.create_task(target.send(arrival, one)))
    await asyncio.gather(*tasks)
    return seen


class Clients:
    """Processes that play traffic over HTTP, since one would be the bottleneck. Leave it to end them."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    async def play(self, url: str, model: str, arrivals: Sequence[Arrival], lead: float = 1.0) -> list[Seen]:
        """As `play`, from `lead` seconds on: by then every process has to have its share."""
        ordered, loop = sorted(arrivals, key=lambda a: a.at), asyncio.get_running_loop()
        shares = [ordered[i :: self._processes] for i in range(self._processes)]
        # A first round, so that all have started when the time begins to count.
        await asyncio.gather(*(loop.run_in_executor(self._pool, _ready) for _ in shares))
        begin = now() + lead
        parts = await asyncio.gather(
            *(loop.run_in_executor(self._pool, _play, url, model, share, begin) for share in shares)
        )
        return [one for part in parts for one in part]


def _ready() -> None:
    time.sleep(0.05)  # long enough that no process takes two of these


def _play(url: str, model: str, arrivals: list[Arrival], begin: float) -> list[Seen]:
    with undisturbed():
        return asyncio.run(play(HttpTarget(url, model), arrivals, begin))
