"""Where traffic goes, an engine in this process or a server over HTTP, and what came back, with its times."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING, Any, Protocol, Self
from urllib.parse import urlsplit

import numpy as np

from benchmarks.arrivals import Arrival
from engine.collector import spare_collector

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


@dataclass(frozen=True)
class Chats:
    """Streams that ask for one answer after the other: as many are open all the time."""

    streams: int
    prompt: int
    """Tokens of each prompt, random."""
    output: int
    """Tokens of an answer in the mean; evenly from half of it up, so that they do not all end at once."""
    vocab: int
    seed: int = 0

    def share(self, i: int, n: int) -> Chats:
        """The part of the i-th of n processes."""
        return replace(self, streams=len(range(i, self.streams, n)), seed=self.seed * 1000 + i + 1)

    def next(self, rng: np.random.Generator) -> Arrival:
        prompt = rng.integers(1, self.vocab, self.prompt).tolist()
        return Arrival(0.0, prompt, int(rng.integers(self.output // 2, self.output * 3 // 2 + 1)), "chat")


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

    def __init__(self, urls: str | Sequence[str], model: str, api_key: str | None = None) -> None:
        """`urls`: http://host:port, without the /v1; several are asked in turn."""
        parts = [urlsplit(url) for url in ([urls] if isinstance(urls, str) else urls)]
        random.shuffle(parts)  # so that clients do not all begin with the same
        self._addresses = cycle([(part.hostname or "127.0.0.1", part.port or 80) for part in parts])
        self._model = model
        self._head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            "Content-Type: application/json\r\n"
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
            transport, stream = await loop.create_connection(lambda: _Stream(seen), *next(self._addresses))
            transport.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            seen.error = await stream.done
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
        self.done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """What went wrong, if anything. Whoever waits for it decides what that means: when he leaves while
        the connection is being made, it is closed after that, and not by the server."""

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
            self.done.set_result(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"cut off: {exc or 'the server closed the connection'}")


@contextmanager
def undisturbed() -> Iterator[None]:
    """No long garbage collections within: they would stop the reader of the clock for 0.2 s each."""
    spare_collector()
    try:
        yield
    finally:
        gc.unfreeze()


async def play(
    target: Target, arrivals: Sequence[Arrival], begin: float | None = None, grace: float | None = None
) -> list[Seen]:
    """Send every request when it is due, whatever became of the others; return when all have ended.

    `begin`: the time that arrivals count from; now by default. What has not ended `grace` seconds after
    the last one was sent is cut off.
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
    await _cut_off(tasks, grace)
    return seen


async def keep(target: Target, chats: Chats, begin: float, until: float) -> list[Seen]:
    """Keep every stream busy between two times; what still runs at the end is cut off.

    Each stream begins somewhere in an answer, as if all had run for long: else they would end together.
    """
    rng = np.random.default_rng(chats.seed)
    seen: list[Seen] = []

    async def stream() -> None:
        part = 1.0 - rng.random()  # never 0
        while now() < until:
            arrival = chats.next(rng)
            arrival, part = replace(arrival, output=math.ceil(arrival.output * part)), 1.0
            one = Seen(arrival.group, len(arrival.prompt), arrival.output, now(), now())
            seen.append(one)
            await target.send(arrival, one)
            if one.error is not None:
                await asyncio.sleep(0.05)  # a server that refuses everything is not to be flooded

    await asyncio.sleep(begin - now())
    await _cut_off([asyncio.create_task(stream()) for _ in range(chats.streams)], until - now())
    return seen


async def _cut_off(tasks: Sequence[asyncio.Task[None]], seconds: float | None) -> None:
    """Cancel what has not ended after `seconds`. Raises what one of the tasks raised."""
    if not tasks:
        return
    ended, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    for found in await asyncio.gather(*late, return_exceptions=True):
        if isinstance(found, Exception):
            raise found
    for task in ended:
        task.result()


class Clients:
    """Processes that send over HTTP, since one would be the bottleneck. Leave it to end them."""

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = processes
        self._pool = ProcessPoolExecutor(processes, context, _meet_at, (context.Barrier(processes),))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    async def start(self) -> None:
        """Return when all run: from then on a task begins at once."""
        await self._all([(_meet,)] * self._processes)

    async def play(
        self,
        urls: str | Sequence[str],
        model: str,
        arrivals: Sequence[Arrival],
        lead: float = 1.0,
        grace: float | None = None,
    ) -> list[Seen]:
        """As `play`, from `lead` seconds on: by then every process has to have its share."""
        await self.start()
        n, begin = self._processes, now() + lead
        ordered = sorted(arrivals, key=lambda a: a.at)
        return await self._all([(_play, urls, model, ordered[i::n], begin, grace) for i in range(n)])

    async def keep(
        self, urls: str | Sequence[str], model: str, chats: Chats, begin: float, until: float
    ) -> list[Seen]:
        """As `keep`; `start` before."""
        n = self._processes
        return await self._all([(_keep, urls, model, chats.share(i, n), begin, until) for i in range(n)])

    async def _all(self, calls: list[Any]) -> list[Seen]:
        loop = asyncio.get_running_loop()
        parts = await asyncio.gather(*(loop.run_in_executor(self._pool, *call) for call in calls))
        return [one for part in parts for one in part]


_meeting: list[Barrier] = []


def _meet_at(barrier: Barrier) -> None:
    _meeting.append(barrier)


def _meet() -> list[Seen]:
    _meeting[0].wait(60)  # else one process that hangs would hold up the others for ever
    return []


def _play(
    urls: str | Sequence[str], model: str, arrivals: list[Arrival], begin: float, grace: float | None
) -> list[Seen]:
    with undisturbed():
        return asyncio.run(play(HttpTarget(urls, model), arrivals, begin, grace))


def _keep(urls: str | Sequence[str], model: str, chats: Chats, begin: float, until: float) -> list[Seen]:
    with undisturbed():
        return asyncio.run(keep(HttpTarget(urls, model), chats, begin, until))
