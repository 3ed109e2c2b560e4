"""An engine in a process of its own is the same engine, and neither process outlives what it is for."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.probe import ModelError
from engine.process import EngineProcess
from engine.request import (
    EngineUnavailable,
    FinishReason,
    Logprobs,
    Output,
    QueueFull,
    Request,
    RequestError,
    SamplingParams,
)
from tests.tiny_models import tiny_model

PROMPTS = [[3, 1, 4, 1, 5], list(range(1, 80)), [9, 2, 6], [7] * 30]
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def config(**changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": str(tiny_model("llama")[1]),
        "device": "cpu",
        "dtype": "float32",
        "max_running_requests": 4,
        "max_tokens_per_step": 64,
        "num_blocks": 200,
        "cpu_threads": 1,
    }
    return EngineConfig(**settings | changes)


class Breaking(AsyncEngine):
    """Its loop can be broken from outside, and so can its process."""

    def break_loop(self) -> None:
        def broken() -> None:
            raise OSError("it broke on \udcff")

        self._inbox.put(broken)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def complain(self, what: str) -> None:
        log = logging.getLogger("engine.tests")
        log.warning("%d is no number", "this")
        log.warning("not good: %s", what, extra={"why": "a test", "lock": threading.Lock()})
        odd: Any = {1: {frozenset([2]): 3}, None: b"4"}
        log.warning("odd", extra=odd)

    def raise_odd(self) -> None:
        class Odd(Exception):
            """Of a class that nobody else can import."""

        raise Odd("local")

    def raise_one(self, kind: type[BaseException]) -> None:
        raise kind("one")

    def fork(self, seconds: float) -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(seconds)
            os._exit(0)
        return pid


class Fragile(Breaking):
    """It breaks before anybody hears that it has started."""

    async def start(self) -> None:
        await super().start()
        self.break_loop()
        await self.failed


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(config(**changes), Breaking)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        assert engine._process is not None and engine._process.poll() is not None
        assert not engine.healthy and not engine._live


class Reader:
    """Takes the outputs of one request."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.began = asyncio.Event()
        self.ended = asyncio.Event()

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        self.began.set()
        if output.finish_reason is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.tokens]


async def asked(engine: EngineProcess, request: Request) -> Reader:
    reader = Reader()
    await engine.submit(request, reader)
    return reader


async def test_the_same_tokens_as_in_this_process() -> None:
    sampled = SamplingParams(
        max_tokens=12, seed=5, top_k=20, presence_penalty=0.5, logit_bias=((7, 3.0),), logprobs=3
    )
    here = AsyncEngine(config())
    await here.start()
    wanted: list[list[int]] = []
    logprobs: list[list[Logprobs]] = []
    for i, prompt in enumerate(PROMPTS):
        outputs = [output async for output in here.generate(Request(f"{i}", prompt, sampled))]
        wanted.append([token for output in outputs for token in output.tokens])
        logprobs.append([each for output in outputs for each in output.logprobs])
    await here.stop()
    async with running() as engine:
        assert (engine.context_length, engine.vocab_size) == (here.context_length, here.vocab_size)
        assert (engine.eos_token_ids, engine.device) == (here.eos_token_ids, "cpu")
        requests = [Request(f"{i}", prompt, sampled) for i, prompt in enumerate(PROMPTS)]
        readers = await asyncio.gather(*(asked(engine, request) for request in requests))
        await asyncio.gather(*(reader.ended.wait() for reader in readers))
        assert [reader.tokens for reader in readers] == wanted
        for reader, there in zip(readers, logprobs, strict=True):
            found = [each for output in reader.outputs for each in output.logprobs]
            assert len(found) == len(there) == 12
            for one, other in zip(found, there, strict=True):  # other batches round otherwise
                assert one.likeliest == other.likeliest
                assert [one.token, *one.values] == pytest.approx([other.token, *other.values], abs=1e-4)
        assert [output.position for output in readers[0].outputs] == list(range(12))
        resumed = await asked(engine, Request("again", PROMPTS[1], sampled, generated=wanted[1][:5]))
        await resumed.ended.wait()
        assert resumed.tokens == wanted[1][5:]
        assert resumed.outputs[0].position == 5
        assert resumed.outputs[-1].request.num_cached == 79  # the whole prompt, in blocks with what followed
        stats = await engine.ask_stats()
        assert stats == engine.stats()
        assert stats.output_tokens == 12 * 4 + 7 and stats.finished == {"length": 5}
        reading = await engine.reading(stats.steps - 4, 2)
        assert len(reading.steps) == 2 and len(reading.queue_times) == 2  # drawn from 3 and 5
        assert reading.last == stats.steps - 1
        assert reading.totals.decodes == stats.output_tokens - 5
        assert len((await engine.recent(4)).steps) == 4


async def test_refusals_are_those_of_the_engine() -> None:
    async with running(max_running_requests=1, max_waiting_requests=1) as engine:
        with pytest.raises(RequestError) as refused:
            await asked(engine, Request("bad", [engine.vocab_size]))
        assert refused.value.field == "prompt"
        reader = await asked(engine, Request("one", PROMPTS[0], LONG))
        with pytest.raises(RequestError, match="is running") as refused:
            await asked(engine, Request("one", PROMPTS[0], LONG))
        assert refused.value.field == "id"
        await asked(engine, Request("two", PROMPTS[0], LONG))
        with pytest.raises(QueueFull):
            await asked(engine, Request("three", PROMPTS[0], LONG))
        left = asyncio.create_task(asked(engine, Request("left", PROMPTS[0], LONG)))
        await asyncio.sleep(0)  # it is on its way
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await engine.ask_stats()
        assert engine._live.keys() == {"one", "two"} and not engine._asked and not engine._calls
        engine.abort("one", "unwanted")
        await reader.ended.wait()
        assert reader.outputs[-1].finish_reason is FinishReason.ABORT
        assert (await engine.ask_stats()).aborted == {"unwanted": 1}


async def test_its_load_is_known_with_the_answer() -> None:
    """Nothing else may come for long: here, until the prompt is through."""
    async with running(num_blocks=600, context_length=512, max_tokens_per_step=4) as engine:
        for i in range(5):
            reader = await asked(engine, Request(f"{i}", [7] * 400, SamplingParams(max_tokens=1)))
            stats = engine.stats()
            assert stats.running + stats.waiting == 1 and 0 < stats.prefill_tokens <= 400
            engine.abort(f"{i}")
            await reader.ended.wait()


async def test_whoever_leaves_while_submitting_is_aborted() -> None:
    async with running() as engine:
        left = asyncio.create_task(asked(engine, Request("left", PROMPTS[0], LONG)))
        await asyncio.sleep(0)  # it is on its way
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        reader = await asked(engine, Request("next", PROMPTS[0], SamplingParams(max_tokens=3)))
        await reader.ended.wait()
        while (await engine.ask_stats()).running:
            await asyncio.sleep(0.01)
        assert (await engine.ask_stats()).aborted == {"cancelled": 1}
        assert not engine._live


async def test_a_reader_that_fails_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    def failing(output: Output) -> None:
        raise ZeroDivisionError("mine")

    async with running() as engine:
        await engine.submit(Request("failing", PROMPTS[0], LONG), failing)
        reader = await asked(engine, Request("good", PROMPTS[0], SamplingParams(max_tokens=20)))
        await reader.ended.wait()
        while (await engine.ask_stats()).running:
            await asyncio.sleep(0.01)
        assert (await engine.ask_stats()).aborted == {"reader_failed": 1}
    assert "the reader of request failing failed" in caplog.text


@pytest.mark.parametrize(("how", "why"), [("break_loop", "it broke"), ("die", "exit code -9")])
async def test_an_engine_that_breaks_fails_its_requests(how: str, why: str) -> None:
    async with running() as engine:
        reader = await asked(engine, Request("a", PROMPTS[0], LONG))
        await reader.began.wait()
        healthy: list[bool] = []
        await engine.submit(Request("b", PROMPTS[2], LONG), lambda _: healthy.append(engine.healthy))
        if how == "die":
            with pytest.raises(EngineUnavailable, match=why):
                await engine.call("die")
        else:
            await engine.call("break_loop")
        await reader.ended.wait()
        assert reader.outputs[-1].finish_reason is FinishReason.ERROR
        assert why in (reader.outputs[-1].error or "") and why in (engine.failure or "")
        assert not engine.healthy and healthy[-1] is False
        with pytest.raises(EngineUnavailable, match=why):
            await asked(engine, Request("late", PROMPTS[0]))


async def test_an_idle_engine_that_breaks_says_so() -> None:
    async with running() as engine:
        await engine.call("break_loop")
        assert "it broke" in await engine.failed
        assert not engine.healthy and "it broke" in (engine.failure or "")


async def test_an_engine_that_breaks_at_once_has_not_started() -> None:
    engine = EngineProcess(config(), Fragile)
    with pytest.raises(EngineUnavailable, match="it broke"):
        await engine.start()
    assert not engine.healthy and "it broke" in (engine.failure or "")


async def test_every_call_ends() -> None:
    async with running() as engine:
        for kind in (KeyError, StopIteration, asyncio.CancelledError, KeyboardInterrupt):
            with pytest.raises((KeyError, RuntimeError), match="one"):
                await engine.call("raise_one", kind)
        with pytest.raises(TypeError, match="pickle"):
            await engine.call("raise_one", threading.Lock())
        with pytest.raises(TypeError, match="pickle"):
            await asked(engine, Request("unpicklable", [threading.Lock()]))  # type: ignore[list-item]
        assert engine.healthy and not engine._calls and not engine._live and not engine._asked


async def test_a_fork_of_its_process_does_not_hide_its_death() -> None:
    async with running() as engine:
        pid = await engine.call("fork", 600)
        with pytest.raises(EngineUnavailable):
            await engine.call("die")
        assert "exit code -9" in engine.failed.result()
        os.kill(pid, signal.SIGKILL)


async def test_what_goes_wrong_at_the_start_is_raised() -> None:
    engine = EngineProcess(config(model="/nowhere/at-all"))
    with pytest.raises(ModelError, match="nowhere"):
        await engine.start()
    assert not engine.healthy and engine._process is not None and engine._process.poll() is not None
    with pytest.raises(EngineUnavailable, match="nowhere"):
        await asked(engine, Request("a", PROMPTS[0]))
    with pytest.raises(RuntimeError, match="starts once"):
        await engine.start()


async def test_it_logs_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine")
    async with running() as engine:
        assert "sizing the cache took" in caplog.text  # the start's progress
        await engine.call("complain", "this")
        with pytest.raises(RuntimeError, match="Odd: local"):
            await engine.call("raise_odd")
        assert "in raise_odd" in caplog.text  # where it came from
        assert engine.healthy
    record: Any = next(each for each in caplog.records if each.name == "engine.tests")
    assert (record.getMessage(), record.why, record.levelno) == ("not good: this", "a test", logging.WARNING)
    assert record.process != os.getpid()


@pytest.mark.parametrize("stuck", [False, True])
def test_it_ends_with_whoever_started_it(stuck: bool) -> None:
    program = textwrap.dedent(f"""
        import asyncio, os, signal
        from engine.process import EngineProcess
        from engine.request import Request
        from tests.test_process import LONG, config

        async def main():
            engine = EngineProcess(config(max_running_requests=1))
            await engine.start()
            await engine.submit(Request("a", [1], LONG), print)
            if {stuck}:
                os.kill(engine.pid, signal.SIGSTOP)
            print("pid", engine.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout.split("pid ")[1].split()[0])
    try:
        orphan = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    psutil.wait_procs([orphan], timeout=60)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
