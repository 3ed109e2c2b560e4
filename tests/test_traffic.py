"""The load generator: arrivals, what clients read off the wire, figures, scenarios on a tiny model."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import report, traffic
from benchmarks.arrivals import PROCESSES, Arrival, Lengths, gamma, on_off, random_prompts, with_prefixes
from benchmarks.latency import summary
from benchmarks.scenarios import SCENARIOS, SIZES, Traffic
from benchmarks.targets import HttpTarget, Seen, now, play
from benchmarks.workloads import save_config
from deployments.responses import DONE, StreamedAnswer, Usage


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.mark.parametrize("name", PROCESSES)
def test_arrivals_come_in_order_and_at_their_rate(name: str) -> None:
    times = PROCESSES[name](rng(), 20.0, 2000.0)
    assert (np.diff(times) >= 0).all() and times[0] >= 0 and times[-1] < 2000
    assert len(times) == pytest.approx(40_000, rel=0.05)


def test_bursts_are_bursts() -> None:
    between = np.diff(gamma(rng(), 20.0, 2000.0, cv=3.0))
    assert between.std() / between.mean() == pytest.approx(3.0, rel=0.1)
    times = on_off(rng(), 20.0, 400.0, on=1.0, off=3.0)
    assert (times % 4 <= 1).all()


def test_lengths_are_those_of_the_trace() -> None:
    prompts, outputs = Lengths("azure-2023-conversation").draw(rng(), 20_000)
    # Of the trace itself: medians 1,020 and 129, means 1,155 and 211.
    assert np.median(prompts) == pytest.approx(1020, rel=0.05)
    assert np.median(outputs) == pytest.approx(129, rel=0.05)
    assert prompts.mean() == pytest.approx(1155, rel=0.05)
    assert outputs.mean() == pytest.approx(211, rel=0.05)
    assert prompts.min() >= 1 and outputs.min() >= 1
    assert Lengths("azure-2023-code").draw(rng(), 1000, longest=100)[0].max() == 100


def test_prefixes_are_shared_by_as_many_as_wanted() -> None:
    prompts = random_prompts(rng(), [5] * 1000, 100)
    prefixes = random_prompts(rng(), [7] * 4, 100)
    found = with_prefixes(rng(), prompts, prefixes, 0.5)
    shared = [prompt for prompt in found if len(prompt) == 12]
    assert len(shared) == pytest.approx(500, abs=60)
    assert all(prompt[:7] in prefixes for prompt in shared)
    assert [p[-5:] for p in found] == prompts


@asynccontextmanager
async def server(
    answer: bytes | Callable[[int], bytes], piece: int
) -> AsyncIterator[tuple[str, asyncio.Queue[bytes]]]:
    """Answers every request with these bytes, or those for its max_tokens, so many at a time, and closes."""
    bodies: asyncio.Queue[bytes] = asyncio.Queue()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        bodies.put_nowait(body)
        data = answer if isinstance(answer, bytes) else answer(json.loads(body)["max_tokens"])
        for at in range(0, len(data), piece):
            writer.write(data[at : at + piece])
            await asyncio.sleep(0)
        writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", bodies
    finally:
        listening.close()


def stream(tokens: int = 3) -> bytes:
    """What a Router writes for an answer of so many tokens, in chunks that cut events anywhere."""
    answer = StreamedAnswer("m", chat=False, include_usage=True, choices=1)
    body = b"".join(answer.delta(0, (" a", "\n\n", "ü")[i % 3]) for i in range(tokens))
    body += answer.finish(0, "length") + answer.usage(Usage(5, tokens, 4)) + DONE
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    sizes = [1, 2, 50, 400, len(body)]
    chunks, at = b"", 0
    for size in sizes:
        chunk = body[at : at + size]
        chunks += f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
        at += len(chunk)
    return head + chunks + b"0\r\n\r\n"


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 100, 10_000])
async def test_a_stream_is_read_however_it_is_cut(piece: int) -> None:
    async with server(stream(), piece) as (url, bodies):
        (seen,) = await play(HttpTarget(url, "m"), [Arrival(0.0, [1, 2, 3, 4, 5], 3, "x")])
    assert seen.error is None and seen.complete
    assert (seen.tokens, seen.cached) == (3, 4)
    assert len(seen.times) == 3 if piece == 1 else 1 <= len(seen.times) <= 3
    assert seen.due <= seen.sent <= seen.times[0] <= seen.ended
    body = json.loads(await bodies.get())
    assert body["prompt"] == [1, 2, 3, 4, 5] and body["max_tokens"] == 3 and body["ignore_eos"] is True


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", "refused"),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "status 503"),
        (stream()[:300], "cut off"),
        (b"", "cut off"),
    ],
)
async def test_what_goes_wrong_is_told(answer: bytes, error: str) -> None:
    async with server(answer, 1000) as (url, _):
        (seen,) = await play(HttpTarget(url, "m"), [Arrival(0.0, [1], 3)])
    assert seen.error is not None and seen.error.startswith(error)
    assert not seen.complete


async def test_nobody_listens() -> None:
    async with server(b"", 1) as (url, _):
        pass
    (seen,) = await play(HttpTarget(url, "m"), [Arrival(0.0, [1], 3)])
    assert seen.error is not None and seen.error.startswith("no connection")


def test_figures() -> None:
    def one(due: float, times: list[float], error: str | None = None, cached: int = 0) -> Seen:
        return Seen("", 10, 3, due, due, times, len(times), cached, times[-1] if times else due, error)

    seen = [
        one(0.0, [0.1, 0.2, 0.3], cached=5),  # good
        one(1.0, [1.6, 1.7, 1.8]),  # late
        one(2.0, [2.1, 2.2, 3.0]),  # stalls
        one(3.0, [], "refused"),
        one(3.0, [3.1, 4.0], "cut off"),
    ]
    found = summary(seen, ttft_target=0.5, gap_target=0.2)
    assert (found["requests"], found["complete"], found["refused"], found["failed"]) == (5, 3, 1, 1)
    assert found["seconds"] == 4.0
    assert found["output_tokens_per_s"] == 11 / 4
    assert found["ttft_ms_p50"] == pytest.approx(100)
    assert found["itl_ms_p50"] == pytest.approx(100)
    assert found["good_share"] == 0.2
    assert found["goodput_per_s"] == 0.25
    assert found["cache_hit_rate"] == 5 / 30


async def test_the_loop_is_open() -> None:
    """A request that never ends does not keep the next one from being sent."""
    sent: list[str] = []

    class Stuck:
        async def send(self, arrival: Arrival, seen: Seen) -> None:
            sent.append(arrival.group)
            if arrival.group == "last":
                for task in asyncio.all_tasks() - {asyncio.current_task(), playing}:
                    task.cancel()
            else:
                await asyncio.get_running_loop().create_future()

    arrivals = [Arrival(0.02, [1], 1, "last"), Arrival(0.0, [1], 1, "a"), Arrival(0.01, [1], 1, "b")]
    playing = asyncio.current_task()
    begin = now()
    with pytest.raises(asyncio.CancelledError):
        await play(Stuck(), arrivals, begin)
    assert sent == ["a", "b", "last"]


async def test_what_hangs_is_cut_off() -> None:
    class Stuck:
        async def send(self, arrival: Arrival, seen: Seen) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                seen.error = "stopped"
                raise

    seen = await play(Stuck(), [Arrival(0.0, [1], 1, "a"), Arrival(0.0, [1], 1, "b")], grace=0.01)
    assert [one.error for one in seen] == ["stopped"] * 2


async def test_a_request_is_stopped_wherever_it_is() -> None:
    """Also while its connection is being made, which then closes: the server had no part in that."""
    seen = [Seen("", 1, 3, now()) for _ in range(12)]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = HttpTarget(f"http://127.0.0.1:{silent.getsockname()[1]}", "m")
        for turns, one in enumerate(seen, 1):
            task = asyncio.create_task(target.send(Arrival(0.0, [1], 3), one))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0)  # connections that have closed are told of
        silent.setblocking(False)
        asked = []
        with suppress(BlockingIOError):
            while True:
                with silent.accept()[0] as connection:
                    asked.append(connection.recv(1 << 16) != b"")
    assert set(asked) == {False, True}  # some were stopped as soon as they were connected, others later
    assert [one.error for one in seen] == ["stopped"] * len(seen)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_config("tiny", tmp_path_factory.mktemp("tiny"), SIZES["tiny"].context)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_scenarios_on_a_tiny_model(name: str, model: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    sizes = replace(
        SIZES["tiny"],
        seconds=0.5,
        pause=0.1,
        long_repeats=1,
        shared_requests=6,
        cold_requests=3,
        cold_rate=20,
    )
    args = argparse.Namespace(
        process="poisson",
        rate=None,
        seed=0,
        no_compile=False,
        max_running_requests=8,
        inter_token_target_ms=None,
    )
    config = traffic.engine_config(model, scenario, sizes, True, scenario.max_tokens_per_step, args)
    lines = await traffic.on_engine(scenario, sizes, config, args)
    lines = [{"scenario": name, "shape": "tiny", "version": "", "date": ""} | line for line in lines]
    for line in lines:
        assert line["ttft_ms_p50"] > 0 and line["itl_ms_p99"] > 0
        assert line["requests"] == line.get("complete", line["requests"]) + line.get("refused", 0)
    if name == "shared-prefix":
        cold, shared = lines
        assert cold["cache_hit_rate"] == 0
        assert shared["cache_hit_rate"] == pytest.approx(1024 / 1040, abs=0.01)
    if name == "overload":
        assert lines[0]["num_blocks"] == sizes.small_cache // 16
    if name == "long-beside-chats":
        assert lines[0]["gaps_alone"] > 0 and lines[0]["gaps_beside"] >= 4 * (1024 // 128)
    page = report.make(lines)
    assert page.count(f"| {name} |") == len(lines)


async def test_scenarios_over_http_from_several_processes() -> None:
    sizes = replace(SIZES["tiny"], seconds=0.3)
    args = argparse.Namespace(process="poisson", rate=None, seed=0, model="m", clients=2)
    async with server(stream, 100) as (args.url, _):
        (line,) = await traffic.on_server(SCENARIOS["mixed"], sizes, args)
    assert line["complete"] == line["requests"] > 4
    assert line["target"] == "http" and line["output_tokens_per_s"] > 0


def test_the_same_seed_makes_the_same_traffic() -> None:
    async def nobody(arrivals: list[Arrival]) -> list[Seen]:
        raise AssertionError("not sent")

    def one(seed: int) -> list[Arrival]:
        given = Traffic(HttpTarget("http://x", "m"), nobody, SIZES["tiny"], seed=seed)
        return given.recorded("azure-2023-conversation", 1.0, share=0.5)

    assert one(1) == one(1)
    assert one(1) != one(2)
