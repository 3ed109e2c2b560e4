"""The whole engine, host and device half, on tiny random models on the CPU."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.probe import ModelError
from engine.request import (
    EngineUnavailable,
    FinishReason,
    Output,
    QueueFull,
    Request,
    RequestError,
    SamplingParams,
)
from tests.tiny_models import ARCHITECTURES, reference_texts, tiny_model

LENGTHS = (3, 21, 38)
NEW = 14


def config(architecture: str = "llama", **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": str(tiny_model(architecture)[1]),
        "device": "cpu",
        "block_size": 8,
        "num_blocks": 64,
        "max_running_requests": 8,
        "max_tokens_per_step": 64,
        "context_length": 96,
        "cpu_threads": 1,
    }
    return EngineConfig(**settings | changes)


@asynccontextmanager
async def running(settings: EngineConfig) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def request(name: str, prompt: list[int], n: int | None = NEW, **sampling: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=n, **{"temperature": 0.0} | sampling))


async def tokens_of(engine: AsyncEngine, asked: Request) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate(asked):
        assert output.position == len(tokens)
        tokens += output.tokens
        last = output
    assert last.finish_reason is asked.finish_reason
    return tokens


async def settled(engine: AsyncEngine, good: Callable[[], bool]) -> None:
    """Until the engine's thread has done what was asked of it."""
    for _ in range(2000):
        if good():
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"not settled: {engine.stats()}")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_transformers(architecture: str, overlap: bool) -> None:
    """Alone, then together with prompts in chunks beside decodes and blocks that run out."""
    texts = reference_texts(architecture, LENGTHS, NEW)

    async def test() -> None:
        async with running(config(architecture, overlap=overlap)) as engine:
            for i, (prompt, wanted) in enumerate(texts):
                assert await tokens_of(engine, request(f"alone-{i}", prompt)) == wanted
        small = config(
            architecture, overlap=overlap, max_tokens_per_step=8, num_blocks=12, prefix_caching=False
        )
        async with running(small) as engine:
            asked = [request(f"mixed-{i}", prompt) for i, (prompt, _) in enumerate(texts * 2)]
            outputs = await asyncio.gather(*(tokens_of(engine, each) for each in asked))
            assert outputs == [wanted for _, wanted in texts * 2]
            assert engine.stats().preemptions > 0
            assert engine.stats().blocks_owned == 0

    run(test())


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5},
    {"temperature": 1.3, "seed": 3, "top_p": 0.6},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1},
    {"temperature": 0.0},
    {"temperature": 2.0, "seed": 2**64 - 1, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
]


def test_seeded_output_depends_on_nothing_but_the_request() -> None:
    """vllm#17524, #19940, #11658: neither order, batch, preemption, prefix hits nor overlap."""
    (prompt, _), *_ = reference_texts("llama", LENGTHS, NEW)

    async def outputs(settings: EngineConfig, together: bool) -> list[list[int]]:
        async with running(settings) as engine:
            asked = [request(f"{i}", prompt, 30, **sampling) for i, sampling in enumerate(SAMPLING)]
            if together:
                return await asyncio.gather(*(tokens_of(engine, each) for each in asked))
            return [await tokens_of(engine, each) for each in asked]

    async def test() -> None:
        alone = await outputs(config(overlap=False), together=False)
        assert await outputs(config(), together=True) == alone
        assert await outputs(config(num_blocks=13, max_tokens_per_step=8), together=True) == alone
        assert len({tuple(each) for each in alone}) == len(SAMPLING)

    run(test())


def test_resumed_elsewhere_the_text_goes_on_exactly() -> None:
    (prompt, _), *_ = reference_texts("llama", LENGTHS, NEW)

    async def test() -> None:
        async with running(config()) as engine, running(config()) as other:
            for i, sampling in enumerate(SAMPLING):
                whole = await tokens_of(engine, request(f"{i}", prompt, 20, **sampling))
                again = request(f"{i}", prompt, 20, **sampling)
                again.generated = whole[:7]
                rest: list[int] = []
                async for output in other.generate(again):
                    assert output.position == 7 + len(rest)
                    rest += output.tokens
                assert whole[:7] + rest == whole

    run(test())


def test_stop_tokens_end_and_ignore_eos_goes_on() -> None:
    (prompt, wanted), *_ = reference_texts("llama", LENGTHS, NEW)
    stop = wanted[5]
    n = wanted.index(stop) + 1

    async def test() -> None:
        for overlap in (True, False):
            async with running(config(overlap=overlap)) as engine:
                asked = request("a", prompt, stop_token_ids=(stop,))
                assert await tokens_of(engine, asked) == wanted[:n]
                assert asked.finish_reason is FinishReason.STOP
                asked = request("b", prompt, stop_token_ids=(stop,), ignore_eos=True)
                assert await tokens_of(engine, asked) == wanted
                assert asked.finish_reason is FinishReason.LENGTH
                assert engine.stats().wasted_tokens == (1 if overlap else 0)

    run(test())


def test_exactly_the_context_and_not_one_more() -> None:
    """vllm#28172, #25120, #27922."""

    async def test() -> None:
        async with running(config(context_length=40)) as engine:
            assert len(await tokens_of(engine, request("a", [5] * 10, 30))) == 30
            assert len(await tokens_of(engine, request("b", [5] * 10, None))) == 30
            assert len(await tokens_of(engine, request("c", [5] * 39, None))) == 1
            with pytest.raises(RequestError) as refused:
                engine.submit(request("d", [5] * 10, 31), lambda _: None)
            assert refused.value.field == "max_tokens"

    run(test())


@pytest.mark.parametrize("prompt", [[], [160], [-1], [3] * 96])
def test_bad_prompts_are_refused_and_the_others_go_on(prompt: list[int]) -> None:
    texts = reference_texts("llama", LENGTHS, NEW)

    async def test() -> None:
        async with running(config()) as engine:
            others = [
                asyncio.create_task(tokens_of(engine, request(f"{i}", p))) for i, (p, _) in enumerate(texts)
            ]
            await asyncio.sleep(0)
            with pytest.raises(RequestError) as refused:
                engine.submit(request("bad", prompt, None), lambda _: None)
            assert refused.value.field == "prompt"
            assert await asyncio.gather(*others) == [wanted for _, wanted in texts]

    run(test())


def test_leaving_aborts_and_frees_everything() -> None:
    """vllm#54947, #31503, ROCm/ATOM#1562: every request ends exactly once, the pool is as before."""

    async def leave(engine: AsyncEngine, i: int) -> None:
        seen = 0
        async for output in engine.generate(request(f"{i}", [i % 150 + 1] * (i % 30 + 1), 60)):
            seen += len(output.tokens)
            if seen >= i % 5:
                break

    async def test() -> None:
        async with running(config(prefix_caching=False)) as engine:
            await asyncio.gather(*(leave(engine, i) for i in range(40)))
            await settled(engine, lambda: not engine.stats().running and not engine.stats().waiting)
            stats = engine.stats()
            assert stats.blocks_free == 63
            assert stats.rows_free == 8
            assert sum(stats.finished.values()) == stats.admitted == 40

    run(test())


def test_leaving_early_computes_no_further() -> None:
    async def test() -> None:
        async with running(config()) as engine:
            async for _ in engine.generate(request("long", [1, 2, 3], 90)):
                break
            await settled(engine, lambda: not engine.stats().running)
            assert engine.stats().finished == {"abort": 1}

    run(test())


def test_a_reader_that_has_all_ends_no_later_request_of_its_id() -> None:
    async def test() -> None:
        async with running(config()) as engine:
            first = engine.generate(request("same", [1, 2, 3], 2))
            while (await anext(first)).finish_reason is None:
                pass
            second = asyncio.create_task(tokens_of(engine, request("same", [1, 2, 3], 60)))
            await settled(engine, lambda: engine.stats().admitted == 2)
            await first.aclose()  # type: ignore[attr-defined]
            assert len(await second) == 60

    run(test())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"generated": [2**40]}, "generated"),
        ({"generated": [160]}, "generated"),
        ({"generated": [1.5]}, "generated"),
        ({"prompt": [1, float("nan")]}, "prompt"),
        ({"prompt": [True, False]}, "prompt"),
        ({"priority": "high"}, "priority"),
        ({"client": ["a"]}, "client"),
        ({"cache_salt": "salt"}, "cache_salt"),
    ],
)
def test_what_would_break_a_step_is_refused(changes: dict[str, Any], field: str) -> None:
    async def test() -> None:
        async with running(config()) as engine:
            asked = request("bad", changes.get("prompt", [1, 2]))
            for name, value in changes.items():
                setattr(asked, name, value)
            with pytest.raises(RequestError) as refused:
                engine.submit(asked, lambda _: None)
            assert refused.value.field == field
            assert engine.healthy

    run(test())


def test_a_request_that_cannot_be_added_harms_nobody_else() -> None:
    """vllm#30142."""
    (prompt, wanted), *_ = reference_texts("llama", LENGTHS, NEW)

    async def test() -> None:
        async with running(config()) as engine:
            add = engine._scheduler.add

            def failing(each: Request) -> None:
                if each.id == "bad":
                    raise AssertionError("a bug")
                add(each)

            engine._scheduler.add = failing  # type: ignore[method-assign, assignment]
            good = asyncio.create_task(tokens_of(engine, request("good", prompt)))
            outputs = [output async for output in engine.generate(request("bad", [1, 2]))]
            assert [each.finish_reason for each in outputs] == [FinishReason.ERROR]
            assert await good == wanted
            assert engine.healthy

    run(test())


def test_a_request_is_used_once() -> None:
    async def test() -> None:
        async with running(config()) as engine:
            asked = request("a", [1, 2], 3)
            await tokens_of(engine, asked)
            with pytest.raises(RequestError, match="before"):
                engine.submit(asked, lambda _: None)
            assert len(await tokens_of(engine, request("a", [1, 2], 3))) == 3  # the id is free again

    run(test())


def test_an_engine_starts_once_and_a_stop_meanwhile_counts() -> None:
    async def test() -> None:
        engine = AsyncEngine(config())
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        await engine.stop()
        await starting
        with pytest.raises(EngineUnavailable):
            engine.submit(request("a", [1], 1), lambda _: None)
        with pytest.raises(RuntimeError, match="once"):
            await engine.start()
        assert not engine.healthy

    run(test())


def test_a_cancelled_start_leaves_nothing_behind() -> None:
    async def test() -> None:
        engine = AsyncEngine(config())
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await engine.stop()
        assert not engine.healthy
        assert not [t.name for t in threading.enumerate() if t.name.startswith(("lane-", "engine"))]

    run(test())


def test_a_loop_that_hangs_does_not_turn() -> None:
    async def test() -> None:
        goes_on = threading.Event()
        async with running(config()) as engine:
            await engine.turn()
            names: list[str] = []
            await engine.turn(lambda: names.append(threading.current_thread().name))
            assert names == ["engine"]
            engine._inbox.put(goes_on.wait)
            turning = asyncio.create_task(engine.turn())
            assert engine.stats().running == 0  # it still says what it knows
            await asyncio.wait([turning], timeout=0.2)
            assert not turning.done()
            goes_on.set()
            await turning
        with pytest.raises(EngineUnavailable):
            await engine.turn()

    run(test())


def test_whoever_waits_for_a_turn_of_a_loop_that_ends_is_told() -> None:
    async def test() -> None:
        over, goes_on = threading.Event(), threading.Event()
        engine = AsyncEngine(config())
        await engine.start()
        close = engine._runner.close

        def late() -> None:
            over.set()
            goes_on.wait()
            close()

        engine._runner.close = late  # type: ignore[method-assign]
        stopping = asyncio.create_task(engine.stop())
        await asyncio.to_thread(over.wait)
        turning = asyncio.create_task(engine.turn())
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(EngineUnavailable, match="stopped"):
            await turning
        await stopping
        wrong = AsyncEngine(config(model="/nowhere/at-all"))
        starting = asyncio.create_task(wrong.start())
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable):
            await wrong.turn()
        with pytest.raises(ModelError):
            await starting

    run(test())


def test_a_loop_that_fails_turns_no_more() -> None:
    async def test() -> None:
        engine = AsyncEngine(config())
        await engine.start()

        def fail() -> None:
            raise RuntimeError("out of order")

        with pytest.raises(EngineUnavailable, match="out of order"):
            await engine.turn(fail)
        await engine.stop()

    run(test())


def test_an_abort_acts_within_three_steps() -> None:
    async def test() -> None:
        async with running(config()) as engine:
            outputs: asyncio.Queue[Output] = asyncio.Queue()
            engine.submit(request("long", [1, 2, 3], 90), outputs.put_nowait)
            await outputs.get()
            before = engine.stats().steps
            engine.abort("long")
            while (await outputs.get()).finish_reason is None:
                pass
            assert engine.stats().steps - before <= 3
            assert engine.stats().blocks_owned == 0

    run(test())


def test_a_reader_that_fails_harms_nobody_else() -> None:
    texts = reference_texts("llama", LENGTHS, NEW)

    def fail(_: Output) -> None:
        raise RuntimeError("reader")

    async def test() -> None:
        async with running(config()) as engine:
            engine.submit(request("bad", [1, 2], 50), fail)
            for i, (prompt, wanted) in enumerate(texts):
                assert await tokens_of(engine, request(f"{i}", prompt)) == wanted
            assert engine.healthy

    run(test())


def test_queue_is_bounded_and_ids_are_unique() -> None:
    async def test() -> None:
        async with running(config(max_running_requests=2, max_waiting_requests=3)) as engine:
            for i in range(5):
                engine.submit(request(f"{i}", [1, 2], 80), lambda _: None)
            with pytest.raises(QueueFull):
                engine.submit(request("one more", [1], 1), lambda _: None)
            with pytest.raises(RequestError, match="id"):
                engine.submit(request("3", [1], 1), lambda _: None)
            await engine.drain()
            with pytest.raises(EngineUnavailable):
                engine.submit(request("late", [1], 1), lambda _: None)
            assert engine.stats().finished == {"length": 5}

    run(test())


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mixtral"])
def test_answers_to_one_prompt_share_it_in_the_step_that_computes_it(architecture: str) -> None:
    """Equal ones, and two that part after the first block."""
    texts = reference_texts(architecture, LENGTHS, NEW)
    prompt, wanted = texts[2]

    async def test() -> None:
        async with running(config(architecture)) as engine:
            other = [*prompt[:10], *texts[1][0]]
            alone = await tokens_of(engine, request("alone", other))
        async with running(config(architecture, max_tokens_per_step=128)) as engine:
            asked = [request(f"{i}", prompt) for i in range(5)]
            outputs = await asyncio.gather(
                *(tokens_of(engine, each) for each in asked), tokens_of(engine, request("other", other))
            )
            assert outputs == [wanted] * 5 + [alone]
            stats = engine.stats()
            assert stats.cached_tokens == 4 * ((len(prompt) - 1) // 8 * 8) + 8
            assert stats.prompt_tokens + stats.cached_tokens == 5 * len(prompt) + len(other)

    run(test())


def test_prompt_tokens_that_wait_are_bounded() -> None:
    async def test() -> None:
        async with running(config(max_waiting_tokens=60)) as engine:
            ended: list[str] = []

            def sink(output: Output) -> None:
                if output.finish_reason is not None:
                    ended.append(output.request.id)

            engine.submit(request("0", [1] * 50, 2), sink)  # nothing is known of the rate yet
            with pytest.raises(QueueFull, match="50 prompt tokens wait") as refused:
                engine.submit(request("1", [1] * 20, 2), sink)
            assert refused.value.retry_after == 1
            engine.submit(request("2", [1] * 20, 2), sink, promised=True)
            await settled(engine, lambda: len(ended) == 2)
            engine.submit(request("3", [1] * 80, 2), sink)  # alone, it may have more
            await settled(engine, lambda: len(ended) == 3)

    run(test())


def test_time_ends_requests_that_wait_and_that_run() -> None:
    async def test() -> None:
        async with running(config(max_running_requests=1, context_length=None, num_blocks=2000)) as engine:
            running_one = request("running", [1, 2], None)
            running_one.timeout = 1.0
            waiting = request("waiting", [1, 2], 1)
            waiting.queue_timeout = 0.1
            found: dict[str, Output] = {}

            async def last(asked: Request) -> None:
                async for output in engine.generate(asked):
                    found[asked.id] = output

            await asyncio.gather(last(running_one), last(waiting))
            for each, field in ((running_one, "timeout"), (waiting, "queue_timeout")):
                assert each.finish_reason is FinishReason.TIMEOUT
                assert field in (found[each.id].error or "")
            assert (running_one.num_output > 0, waiting.num_output) == (True, 0)
            assert engine.stats().blocks_owned == 0

    run(test())


def naps(threads: list[threading.Thread]) -> int:
    """How often they have gone to sleep since they began, as Linux counts it."""
    texts = [Path(f"/proc/self/task/{each.native_id}/status").read_text() for each in threads]
    return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in texts)


def test_an_idle_engine_uses_no_cpu() -> None:
    """transformers#45063, lmdeploy: no polling. In what other processes don't change: CPU time, and naps."""

    async def test() -> None:
        async with running(config()) as engine:
            await tokens_of(engine, request("a", [1, 2, 3]))
            own = [each for each in threading.enumerate() if each.name.startswith(("engine", "lane-"))]
            assert len(own) == 4
            before, steps, cpu = naps(own), engine.stats().steps, time.process_time()
            await asyncio.sleep(0.5)
            assert engine.stats().steps == steps
            assert time.process_time() - cpu < 0.1
            assert naps(own) - before < 10

    run(test())


def test_nothing_in_an_engine_sleeps() -> None:
    """Whoever waits, waits for what he waits for: on the way of a token there is no interval."""
    for path in Path(engine.__path__[0]).rglob("*.py"):
        assert ".sleep(" not in path.read_text(), path


def test_a_device_failure_ends_every_request_with_an_error() -> None:
    async def test() -> None:
        engine = AsyncEngine(config())
        await engine.start()

        def broken(*_: object) -> None:
            raise RuntimeError("the device is gone")

        engine._runner._sample = broken  # type: ignore[method-assign, assignment]
        asked = [request(f"{i}", [1, 2, 3]) for i in range(3)]

        async def last(each: Request) -> Output:
            return [output async for output in engine.generate(each)][-1]

        for output in await asyncio.gather(*(last(each) for each in asked)):
            assert output.finish_reason is FinishReason.ERROR
            assert "the device is gone" in (output.error or "")
        assert not engine.healthy
        assert "the device is gone" in (engine.failure or "")
        assert engine.stats().finished == {"error": 3}
        with pytest.raises(EngineUnavailable, match="the device is gone"):
            engine.submit(request("late", [1], 1), lambda _: None)
        await engine.stop()
        assert not [t.name for t in threading.enumerate() if t.name.startswith(("lane-", "engine"))]

    run(test())


def test_a_start_that_fails_says_why() -> None:
    async def test() -> None:
        engine = AsyncEngine(config(model="/nowhere/at-all"))
        with pytest.raises(ValueError, match="model"):
            await engine.start()
        assert not engine.healthy
        await engine.stop()

    run(test())


def test_start_tells_what_it_does_and_how_long_each_part_took(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine.engine")

    async def test() -> None:
        settings = config()
        async with running(settings) as engine:
            assert list(engine.startup_s) == ["weights", "compile"]  # on a CPU nothing is captured
            assert engine.startup_s["weights"] > 0
            said = [each.getMessage() for each in caplog.records]
            assert said[:1] == [f"loading {settings.model}"]
            assert said[1].startswith(f"loading {settings.model} took ")
            assert said[2] == "sizing the cache"

    run(test())
