"""The tape: one connection per (Router, EngineReplica) pair, and the tokens of every step on it.

The Router listens; a replica dials in when a Router's first request reaches it. The replica puts
one frame per engine step on its tape: the new tokens of every request of that Router. At most one
frame is outstanding: the Router answers each frame, and steps that finish meanwhile merge into
the next one. The answer names the requests that nobody waits for any more, so a cancellation that
was lost elsewhere still takes effect at the next token. Unasked, it may say nil: what runs there for
this Router goes on elsewhere, and the tape ends when all has been handed back. Order is TCP's; a
lost peer is a closed connection.

Every frame of a replica tells its load, too.

A frame (engine/frames.py) is MessagePack; the first one is the Router's secret and the name of the
replica, and no MessagePack.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import ssl
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import msgspec

from deployments.load import Load
from deployments.tape_meter import TapeMeter
from engine.frames import LENGTH, Frames
from engine.request import FinishReason, Logprobs

logger = logging.getLogger(__name__)

Key: TypeAlias = tuple[int, int]
"""(request, attempt): the Router counts both."""

_MAX_HELLO = 256  # bytes that a peer may send before it has shown that it belongs here
_CONNECT_TIMEOUT = 10.0  # seconds


Observe: TypeAlias = Callable[[str, Load, list[list[int]], bool | None], None]
"""(name of a replica, its load, what other Routers have sent there, and see `Decoding.after`)"""

HAND_BACK = 2.0
"""Seconds in which an engine ends what it was told to: one that hangs would keep it for ever."""

MAX_PREFIXES = 256
"""Prompts of others that wait to be told to a Router, the newest."""


class TapeLost(ConnectionError):
    """The other end of the tape is gone."""


class Address(msgspec.Struct, frozen=True):
    """Where a Router listens, and the secret that opens its tape."""

    router: str
    """Names the Router, never another one."""
    host: str
    port: int
    secret: bytes


class Record(msgspec.Struct, array_like=True, gc=False):
    """What came for one request since the frame before."""

    request: int
    attempt: int
    position: int
    """Index of `tokens[0]` among the generated tokens of the request."""
    tokens: list[int]
    finish_reason: FinishReason | None = None
    """Set in the last record of a request, and only there."""
    error: str | None = None
    num_cached: int = 0
    """Prompt tokens that were found in the prefix cache; known in the last record."""
    logprobs: list[Logprobs] = []
    """One for each of `tokens`, if the request asks for them."""

    @property
    def key(self) -> Key:
        return self.request, self.attempt


class Frame(msgspec.Struct, array_like=True):
    """What a replica sends: one step, or several that have merged."""

    load: Load
    records: list[Record]
    prefixes: list[list[int]] = []
    """What other Routers have sent there since the frame before, see `deployments/prefix_index.py`."""


class Decoding(set[Key]):
    """The requests on a tape that each step brings a token for."""

    def after(self, records: Iterable[Record]) -> bool | None:
        """Whether the next step brings more; None where no step says so, though one is still to come."""
        stepped = False
        for record in records:
            if record.finish_reason is not None:
                self.discard(record.key)
            elif record.tokens:
                self.add(record.key)
                stepped = True
        return stepped or (None if self else False)


def _tls(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """Both ends show a certificate where Ray is told to use TLS: the same ones, by the same variables."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.check_hostname = False  # Routers are known by their secret; nodes have all kinds of names
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Connection(Frames):
    """Frames over TCP, with death of the peer's host noticed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (  # silence for 10 + 4 × 5 s, or 30 s without an acknowledgement
            ("TCP_KEEPIDLE", 10),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 30_000),
        ):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Tape(_Connection):
    """A replica's end. All methods are called on the loop that made it.

    `moving` is set from when the Router has asked for its requests back: it wants no more from here.
    """

    def __init__(
        self,
        load: Callable[[bool], Load],
        abort: Callable[[Key], None],
        closed: Callable[[], None],
        meter: TapeMeter,
    ) -> None:
        super().__init__()
        self.moving = False
        self._meter = meter
        self._load = load
        self._abort = abort
        self._closed = closed
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[Key] | None).decode
        self._loop = asyncio.get_running_loop()
        self._delivered: dict[Key, asyncio.Future[None]] = {}
        self._pending: dict[Key, Record] = {}
        self._prefixes: deque[list[int]] = deque(maxlen=MAX_PREFIXES)
        self._outstanding: list[Key] | None = None  # what ends with the frame on its way
        self._flush_scheduled = False
        self._decoding = Decoding()

    @classmethod
    async def connect(
        cls,
        address: Address,
        replica: str,
        load: Callable[[bool], Load],
        abort: Callable[[Key], None],
        closed: Callable[[], None],
        meter: TapeMeter | None = None,
    ) -> Tape:
        """Open the tape to a Router.

        `replica` is how Ray Serve names this replica, `load` is asked for every frame, with True for
        one that holds a request's end.
        `abort` is called with each request that the Router does not want any more, `closed` once
        when the tape is lost. `meter` is told what goes over it.
        Raises `TapeLost` where there is no Router at `address`.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                _, tape = await loop.create_connection(
                    lambda: cls(load, abort, closed, meter or TapeMeter()),
                    address.host,
                    address.port,
                    ssl=_tls(ssl.Purpose.SERVER_AUTH),
                )
        except OSError as error:  # TimeoutError is one
            raise TapeLost(f"no Router at {address.host}:{address.port}") from error
        tape.send(address.secret + replica.encode())
        return tape

    @contextmanager
    def delivery(self, key: Key) -> Iterator[asyncio.Future[None]]:
        """Within it, what it gives is done when the Router has the last record of `key`.

        Raises `TapeLost`, as the future does, if it never will.
        """
        if self._transport is None:
            raise TapeLost("the Router is gone")
        future = self._delivered[key] = self._loop.create_future()
        try:
            yield future
        finally:
            if future.done() and not future.cancelled():
                future.exception()  # nobody may have waited for it
            del self._delivered[key]
            self._close_if_left()

    def put(self, record: Record) -> None:
        """Send `record` with the next frame. The tape owns it from here on."""
        if self._transport is None:
            return
        earlier = self._pending.setdefault((record.request, record.attempt), record)
        if earlier is not record:
            earlier.tokens += record.tokens
            earlier.logprobs += record.logprobs
            earlier.finish_reason = record.finish_reason
            earlier.error = record.error
            earlier.num_cached = record.num_cached
        if self._outstanding is None and not self._flush_scheduled:
            self._flush_soon()

    def tell(self, prefix: list[int]) -> None:
        """Send the hashes of a prompt that another Router has sent here, with the frame of the next step if
        there will be one. A slow Router misses the oldest.
        """
        if self._transport is not None:
            self._prefixes.append(prefix)
            if not self._decoding and self._outstanding is None and not self._flush_scheduled:
                self._flush_soon()

    def _flush_soon(self) -> None:
        # Not at once: the other records of this step come within the same callback.
        self._flush_scheduled = True
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._outstanding is not None or self._transport is None:
            return
        if not (self._pending or (self._prefixes and not self._decoding)):
            return
        records = list(self._pending.values())
        self._pending.clear()
        self._outstanding = [record.key for record in records if record.finish_reason is not None]
        load = self._load(bool(self._outstanding))  # the last frame for a while, maybe
        self._decoding.after(records)
        payload = self._encode(Frame(load, records, list(self._prefixes)))
        self.send(payload)
        self._meter.sent(self, LENGTH.size + len(payload), len(records))
        self._prefixes.clear()

    def frame_received(self, payload: bytes) -> None:
        unwanted = self._decode(payload)
        if unwanted is None:
            self.moving = True
            for key in self._delivered:
                self._abort(key)
            self._loop.call_later(HAND_BACK, self._give_back)
            return self._close_if_left()
        for key in self._outstanding or ():
            future = self._delivered.get(key)
            if future is not None and not future.done():
                future.set_result(None)
        self._outstanding = None
        self._meter.answered(self)
        for key in unwanted:
            self._abort(key)
        self._flush()

    def _give_back(self) -> None:
        """What has not ended goes on elsewhere, whether the engine answers or not."""
        ending = {key for key, record in self._pending.items() if record.finish_reason is not None}
        for key, future in self._delivered.items():
            if key not in ending.union(self._outstanding or ()) and not future.done():
                future.set_result(None)

    def _close_if_left(self) -> None:
        if self.moving and not self._delivered:
            self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._meter.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._meter.closed(self)
        self._pending.clear()
        for future in self._delivered.values():
            if not future.done():
                future.set_exception(TapeLost("the Router is gone"))
        self._closed()


class TapeListener:
    """A Router's end of all its tapes.

    `deliver` is called with each record, in order; False means that nobody waits for it, and the
    replica is told to stop that request. `observe` is called with the name and the load of a
    replica, the prefixes of others, and what `Decoding` says, before the records of the same frame
    are delivered.
    """

    def __init__(self, deliver: Callable[[Record], bool], observe: Observe) -> None:
        self._deliver = deliver
        self._observe = observe
        self._connections: set[_Reader] = set()
        self._replicas: Collection[str] | None = None
        self._server: asyncio.Server | None = None
        self._secret = secrets.token_bytes(32)

    async def start(self, host: str) -> Address:
        """Listen on a free port of `host`. Returns what a replica needs to dial in."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Reader(self), host, 0, ssl=_tls(ssl.Purpose.CLIENT_AUTH)
        )
        return Address(secrets.token_hex(8), host, self._server.sockets[0].getsockname()[1], self._secret)

    def keep(self, replicas: Collection[str]) -> None:
        """Ask all others for the requests that they have: now, and whenever one dials in later."""
        self._replicas = replicas
        for connection in self._connections:
            connection.ask_back()

    def welcome(self, replicas: Collection[str]) -> None:
        """Ask none of these: they take requests, whichever were the last to `keep`."""
        if self._replicas is not None:
            self._replicas = {*self._replicas, *replicas}

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()


class _Reader(_Connection):
    """A Router's end of one tape."""

    def __init__(self, listener: TapeListener) -> None:
        super().__init__()
        self._listener = listener
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Frame).decode
        self._replica: str | None = None  # until it has shown the secret
        self._decoding = Decoding()
        self._asked_back = False
        self.max_frame = _MAX_HELLO

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener._connections.discard(self)

    def ask_back(self) -> None:
        kept = self._listener._replicas
        if kept is None or self._replica is None or self._replica in kept or self._asked_back:
            return
        self._asked_back = True
        self.send(self._encode(None))

    def frame_received(self, payload: bytes) -> None:
        if self._replica is None:
            secret = self._listener._secret
            if not hmac.compare_digest(payload[: len(secret)], secret):
                logger.warning("closed a tape: its secret is not ours")
                return self.close()
            self._replica = payload[len(secret) :].decode(errors="replace")
            self.max_frame = 2**32 - 1
            return self.ask_back()
        frame = self._decode(payload)
        self._listener._observe(
            self._replica, frame.load, frame.prefixes, self._decoding.after(frame.records)
        )
        deliver = self._listener._deliver
        unwanted = [
            record.key for record in frame.records if not deliver(record) and record.finish_reason is None
        ]
        self.send(self._encode(unwanted))
