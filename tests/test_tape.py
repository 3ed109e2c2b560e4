"""The tape between a Router and a replica, both ends over a real socket."""

from __future__ import annotations

import asyncio
import datetime
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deployments import tape as tape_module
from deployments.load import Load
from deployments.tape import Address, Frame, Key, Record, Tape, TapeListener, TapeLost
from deployments.tape_meter import TapeMeter
from engine.request import FinishReason, Logprobs

HOST = "127.0.0.1"
LOAD = Load(100, 2, 1, 50, 12.5)
ANEW = Load(90, 1, 1, 51, 12.5)


class Peer:
    """The far end of a tape, spoken by hand: it answers when the test says so."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def receive(self) -> bytes:
        (length,) = struct.unpack("!I", await self.reader.readexactly(4))
        return await self.reader.readexactly(length)

    async def frame(self) -> Frame:
        return msgspec.msgpack.decode(await self.receive(), type=Frame)

    async def records(self) -> list[Record]:
        frame = await self.frame()
        ends = any(record.finish_reason is not None for record in frame.records)
        assert frame.load == (ANEW if ends else LOAD)
        return frame.records

    def send(self, payload: bytes) -> None:
        self.writer.write(struct.pack("!I", len(payload)) + payload)

    def answer(self, *unwanted: Key) -> None:
        self.send(msgspec.msgpack.encode(unwanted))

    async def closed_by_other_end(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


@asynccontextmanager
async def router() -> AsyncIterator[tuple[Tape, Peer, list[Key]]]:
    """A replica's tape, and the Router spoken by hand. The list fills with the aborts."""
    peers: asyncio.Queue[Peer] = asyncio.Queue()
    aborts: list[Key] = []
    server = await asyncio.start_server(lambda r, w: peers.put_nowait(Peer(r, w)), HOST, 0)
    address = Address("r", HOST, server.sockets[0].getsockname()[1], b"secret")
    tape = await Tape.connect(address, "r1", lambda anew: ANEW if anew else LOAD, aborts.append, lambda: None)
    peer = await peers.get()
    assert await peer.receive() == b"secret" + b"r1"
    try:
        yield tape, peer, aborts
    finally:
        tape.close()
        peer.writer.close()
        server.close()


@asynccontextmanager
async def listener(wanted: bool = True) -> AsyncIterator[tuple[TapeListener, Address, asyncio.Queue[Record]]]:
    got: asyncio.Queue[Record] = asyncio.Queue()

    def deliver(record: Record) -> bool:
        got.put_nowait(record)
        return wanted

    def observe(replica: str, load: Load, prefixes: list[list[int]], goes_on: bool | None) -> None:
        assert (replica, load, prefixes) == ("r1", LOAD, [])

    listener = TapeListener(deliver, observe)
    try:
        yield listener, await listener.start(HOST), got
    finally:
        await listener.close()


def follow(tape: Tape, request: int, attempt: int = 0) -> asyncio.Task[None]:
    async def wait() -> None:
        with tape.delivery((request, attempt)) as delivered:
            await delivered

    return asyncio.create_task(wait())


async def dial(address: Address) -> Peer:
    return Peer(*await asyncio.open_connection(address.host, address.port))


async def test_one_frame_holds_a_step_and_one_is_outstanding() -> None:
    async with router() as (tape, peer, _):
        for request in range(3):
            tape.put(Record(request, 0, 0, [request]))
        assert await peer.records() == [Record(request, 0, 0, [request]) for request in range(3)]

        tape.put(Record(0, 0, 1, [10]))
        await asyncio.sleep(0)  # a step of its own
        tape.put(Record(1, 0, 1, [11]))
        await asyncio.sleep(0)
        tape.put(Record(0, 0, 2, [20, 30], FinishReason.LENGTH))
        await asyncio.sleep(0)
        peer.answer()
        assert await peer.records() == [
            Record(0, 0, 1, [10, 20, 30], FinishReason.LENGTH),
            Record(1, 0, 1, [11]),
        ]


async def test_log_probabilities_merge_as_tokens_do() -> None:
    """For a Router that is slow to answer: each stays with its token."""

    def record(tokens: list[int], **more: Any) -> Record:
        asked = [Logprobs(-token / 8, [token, 3], [-token / 8, -inf]) for token in tokens]
        return Record(0, 0, tokens[0], tokens, logprobs=asked, **more)

    async with router() as (tape, peer, _):
        tape.put(record([0]))
        assert await peer.records() == [record([0])]
        tape.put(record([1]))
        tape.put(Record(1, 0, 0, [7]))
        await asyncio.sleep(0)
        tape.put(record([2, 3]))
        tape.put(Record(1, 0, 1, [8]))
        await asyncio.sleep(0)
        tape.put(record([4], finish_reason=FinishReason.LENGTH))
        peer.answer()
        assert await peer.records() == [
            record([1, 2, 3, 4], finish_reason=FinishReason.LENGTH),
            Record(1, 0, 0, [7, 8]),
        ]


async def test_delivery_is_known_from_the_answer() -> None:
    async with router() as (tape, peer, _):
        first, second = follow(tape, 0), follow(tape, 1)
        await asyncio.sleep(0)
        tape.put(Record(0, 0, 0, [1], FinishReason.STOP))
        await peer.records()
        tape.put(Record(1, 0, 0, [], FinishReason.ERROR, "broken"))
        assert not first.done()
        peer.answer()
        await first
        assert not second.done()
        assert await peer.records() == [Record(1, 0, 0, [], FinishReason.ERROR, "broken")]
        peer.answer()
        await second


async def test_what_has_ended_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last record is on the way, or waits for a slow Router's answer to the one before."""
    monkeypatch.setattr(tape_module, "HAND_BACK", 0.05)
    async with router() as (tape, peer, aborts):
        sent, waiting, hanging = (follow(tape, n) for n in range(3))
        await asyncio.sleep(0)
        tape.put(Record(0, 0, 0, [1], FinishReason.STOP))
        await peer.records()
        tape.put(Record(1, 0, 0, [2], FinishReason.STOP))
        peer.send(msgspec.msgpack.encode(None))
        await hanging
        assert aborts == [(n, 0) for n in range(3)]
        assert not sent.done() and not waiting.done()
        for ended, last in ((sent, [Record(1, 0, 0, [2], FinishReason.STOP)]), (waiting, None)):
            peer.answer()
            await ended
            assert last is None or await peer.records() == last
        assert await peer.closed_by_other_end()


async def test_the_answer_aborts() -> None:
    async with router() as (tape, peer, aborts):
        tape.put(Record(4, 0, 0, [1]))
        await peer.records()
        peer.answer((4, 0), (5, 2))
        tape.put(Record(6, 0, 0, [1]))
        await peer.records()  # so the answer has been read
        assert aborts == [(4, 0), (5, 2)]


async def test_prefixes_of_others_wait_for_the_next_step_where_there_is_one() -> None:
    async with router() as (tape, peer, aborts):
        tape.tell([1])
        assert await peer.frame() == Frame(LOAD, [], [[1]])
        peer.answer()
        tape.put(Record(0, 0, 0, [1]))
        assert await peer.records() == [Record(0, 0, 0, [1])]
        tape.tell([2])
        peer.answer((9, 9))
        while not aborts:  # until the answer has been read
            await asyncio.sleep(0)
        tape.put(Record(1, 0, 0, []))
        assert await peer.frame() == Frame(LOAD, [Record(1, 0, 0, [])], [[2]])
        peer.answer((8, 8))
        while len(aborts) < 2:
            await asyncio.sleep(0)
        tape.tell([3])
        for _ in range(3):
            await asyncio.sleep(0)
        last = Record(0, 0, 1, [2], FinishReason.STOP)
        tape.put(last)
        assert await peer.frame() == Frame(ANEW, [last], [[3]])
        peer.answer()
        tape.tell([4])
        assert await peer.frame() == Frame(LOAD, [], [[4]])


async def test_frames_survive_any_fragmentation() -> None:
    async with router() as (tape, peer, aborts):
        answers = [((n, n),) for n in range(5)]
        raw = b"".join(
            struct.pack("!I", len(payload)) + payload for payload in map(msgspec.msgpack.encode, answers)
        )
        for byte in raw:
            peer.writer.write(bytes([byte]))
            await peer.writer.drain()
        tape.put(Record(0, 0, 0, [1]))
        await peer.records()
        peer.writer.write(raw)  # and all in one piece
        peer.writer.close()
        with pytest.raises(TapeLost):
            await follow(tape, 9, 9)
        assert aborts == [(n, n) for n in range(5)] * 2


async def test_a_lost_router_is_told_to_all_who_wait() -> None:
    async with router() as (tape, peer, _):
        waiting = [follow(tape, n) for n in range(2)]
        await asyncio.sleep(0)
        peer.writer.close()
        for future in waiting:
            with pytest.raises(TapeLost):
                await future
        with pytest.raises(TapeLost):
            await follow(tape, 2)
        tape.put(Record(2, 0, 0, [1]))  # goes nowhere, harms nothing


async def test_what_is_told_as_it_is_lost_is_not_counted_as_sent() -> None:
    meter = TapeMeter()
    peers: asyncio.Queue[Peer] = asyncio.Queue()
    server = await asyncio.start_server(lambda r, w: peers.put_nowait(Peer(r, w)), HOST, 0)
    address = Address("r", HOST, server.sockets[0].getsockname()[1], b"secret")
    tape = await Tape.connect(address, "r1", lambda _: LOAD, lambda _: None, lambda: None, meter)
    peer = await peers.get()
    transport: Any = tape._transport
    transport.abort()
    tape.tell([1, 2])
    while meter.open and not meter.frames:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert meter.open == 0 and meter.lag() == 0
    peer.writer.close()
    server.close()


async def test_a_router_knows_whether_the_next_step_brings_more() -> None:
    said: asyncio.Queue[bool | None] = asyncio.Queue()
    listener = TapeListener(lambda _: True, lambda *heard: said.put_nowait(heard[-1]))
    address = await listener.start(HOST)
    tape = await Tape.connect(address, "r1", lambda _: LOAD, lambda _: None, lambda: None)
    for records, goes_on in (
        ([Record(1, 0, 0, [])], False),  # it waits, maybe for long
        ([Record(1, 0, 0, [5]), Record(2, 0, 7, [], FinishReason.ABORT)], True),
        ([Record(3, 0, 0, [])], None),  # its engine's loop turns, which says nothing of its device
        ([Record(3, 0, 0, [], FinishReason.ABORT)], None),
        ([Record(1, 0, 1, [6]), Record(4, 0, 0, [7], FinishReason.LENGTH)], True),
        ([Record(1, 0, 2, [6], FinishReason.LENGTH), Record(5, 0, 0, [8])], True),
        ([Record(5, 0, 1, [], FinishReason.ABORT)], False),
        ([Record(6, 0, 0, [6], FinishReason.LENGTH)], False),
    ):
        for record in records:
            tape.put(record)
        assert await said.get() is goes_on
    tape.close()
    await listener.close()


@pytest.fixture
def ray_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's variables, with a certificate that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (tmp_path / "certificate").write_bytes(certificate.public_bytes(pem))
    (tmp_path / "key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(tmp_path / "certificate"))
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(tmp_path / "certificate"))
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / "key"))


async def test_it_is_encrypted_where_ray_is(ray_tls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with listener() as (_, address, got):
        tape = await Tape.connect(address, "r1", lambda anew: LOAD, lambda key: None, lambda: None)
        done = follow(tape, 0)
        tape.put(Record(0, 0, 0, list(range(1_000_000)), FinishReason.STOP))
        await done
        assert got.get_nowait().tokens == list(range(1_000_000))
        tape.close()
        monkeypatch.delenv("RAY_USE_TLS")
        plain = await dial(address)
        plain.send(address.secret)
        plain.send(msgspec.msgpack.encode(Frame(LOAD, [Record(0, 0, 0, [1])])))
        assert await plain.reader.read(1) in (b"", b"\x15")  # no answer, but for TLS's alert
        plain.writer.close()
        assert got.empty()


async def test_no_router() -> None:
    async with listener() as (_, address, _):
        pass
    with pytest.raises(TapeLost, match=str(address.port)):
        await Tape.connect(address, "r1", lambda anew: LOAD, lambda key: None, lambda: None)


async def test_records_arrive_in_order_and_are_answered() -> None:
    async with listener() as (_, address, got):
        tape = await Tape.connect(address, "r1", lambda anew: LOAD, lambda key: None, lambda: None)
        done = follow(tape, 0)
        for position in range(100):
            last = FinishReason.LENGTH if position == 99 else None
            tape.put(Record(0, 0, position, [position], last))
            await asyncio.sleep(0)
        await done
        records = [got.get_nowait() for _ in range(got.qsize())]
        assert [token for record in records for token in record.tokens] == list(range(100))
        assert [record.position for record in records] == [record.tokens[0] for record in records]
        tape.close()


async def test_records_that_nobody_wants_are_answered_by_an_abort_once() -> None:
    async with listener(wanted=False) as (_, address, got):
        aborts: asyncio.Queue[Key] = asyncio.Queue()
        tape = await Tape.connect(address, "r1", lambda anew: LOAD, aborts.put_nowait, lambda: None)
        tape.put(Record(7, 1, 0, [1]))
        assert await aborts.get() == (7, 1)
        done = follow(tape, 7, 1)
        await asyncio.sleep(0)
        tape.put(Record(7, 1, 1, [], FinishReason.ABORT))
        await done
        assert aborts.empty()
        assert got.qsize() == 2
        tape.close()


@pytest.mark.parametrize(
    "hello", [b"wrong", b"", b"x" * 65, msgspec.msgpack.encode(Frame(LOAD, [Record(0, 0, 0, [1])]))]
)
async def test_a_stranger_is_shown_the_door(hello: bytes) -> None:
    async with listener() as (_, address, got):
        peer = await dial(address)
        peer.send(hello)
        peer.send(msgspec.msgpack.encode(Frame(LOAD, [Record(0, 0, 0, [1])])))
        assert await peer.closed_by_other_end()
        assert got.empty()
        peer.writer.close()


async def test_garbage_closes_a_tape_and_no_other() -> None:
    async with listener() as (_, address, got):
        tape = await Tape.connect(address, "r1", lambda anew: LOAD, lambda key: None, lambda: None)
        peer = await dial(address)
        peer.send(address.secret)
        peer.send(b"\xc1")
        assert await peer.closed_by_other_end()
        done = follow(tape, 0)
        tape.put(Record(0, 0, 0, [1], FinishReason.STOP))
        await done
        assert got.qsize() == 1
        tape.close()
        peer.writer.close()


async def test_closing_the_listener_ends_its_tapes() -> None:
    async with listener() as (end, address, _):
        closed = asyncio.Event()
        tape = await Tape.connect(address, "r1", lambda anew: LOAD, lambda key: None, closed.set)
        done = follow(tape, 0)
        await end.close()
        with pytest.raises(TapeLost):
            await done
        await closed.wait()
