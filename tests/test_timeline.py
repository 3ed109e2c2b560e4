"""The timeline records every phase of the engine's own loop, in order, whatever runs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext

import pytest

from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.request import Request, SamplingParams
from engine.timeline import PHASES, Timeline
from tests.tiny_models import tiny_model

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny_model("llama")[1])


async def generate(engine: AsyncEngine, name: str, tokens: int) -> None:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    async for _ in engine.generate(Request(name, PROMPT, sampling)):
        pass


async def running(model: str, overlap: bool, timeline: Timeline | None = None) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(
        EngineConfig(
            model=model,
            device="cpu",
            dtype="float32",
            overlap=overlap,
            max_running_requests=4,
            max_tokens_per_step=64,
            num_blocks=64,
            cpu_threads=1,
        )
    )
    engine.timeline = timeline or engine.timeline
    await engine.start()
    yield engine
    await engine.stop()


@pytest.mark.parametrize("overlap", [True, False])
async def test_every_phase_of_every_step_is_there(model: str, overlap: bool) -> None:
    async for engine in running(model, overlap):
        await asyncio.gather(generate(engine, "a", 12), generate(engine, "b", 5))
        await generate(engine, "c", 3)
    recording, totals, stats = engine.timeline.recent(), engine.timeline.totals, engine.stats()
    steps = recording.steps
    assert [each.step for each in steps] == list(range(stats.steps))
    assert sum(totals.steps.values()) == stats.steps
    assert totals.steps["prefill"] >= 2
    assert sum(each.after_idle for each in steps) == 2, "the first of all, and the first of c"
    assert sum(each.decodes for each in steps) == totals.decodes == stats.output_tokens - 3
    assert totals.carried == (totals.decodes if overlap else 0), "what is decoded ahead has no known input"
    phases = {span.phase for span in recording.spans}
    assert phases == set(PHASES)
    for earlier, later in itertools.pairwise(recording.spans):
        assert earlier.begin <= earlier.end <= later.begin, "one thread does one thing at a time"
    for phase in ("prepare", "launch", "collect", "commit"):
        assert [s.step for s in recording.spans if s.phase == phase] == [each.step for each in steps]
    for phase in PHASES:
        seconds = sum(s.end - s.begin for s in recording.spans if s.phase == phase)
        assert seconds == pytest.approx(totals.phases[phase])
    assert totals.active == pytest.approx(sum(each.timing.compute for each in steps))
    assert totals.work == pytest.approx(sum(each.work for each in steps))
    assert 0 <= totals.hidden < totals.work
    assert totals.gap == pytest.approx(sum(each.timing.gap for each in steps if not each.after_idle))


async def test_it_keeps_the_last_steps_only(model: str) -> None:
    async for engine in running(model, True, Timeline(size=4)):
        await generate(engine, "a", 10)
        timeline = engine.timeline
        assert [each.step for each in timeline.recent().steps] == [6, 7, 8, 9]
        assert [each.step for each in timeline.recent(2).steps] == [8, 9]
        assert [each.step for each in timeline.recent(after=7).steps] == [8, 9]
        assert {span.step for span in timeline.recent(2).spans} >= {8, 9}
        assert min(span.step for span in timeline.recent(2).spans) == 8
        assert timeline.recent(after=9).steps == []
        assert sum(timeline.totals.steps.values()) == 10, "totals are since the start"


async def test_phases_can_be_ranges_of_a_profiler(model: str) -> None:
    seen: list[str] = []

    def annotate(name: str) -> AbstractContextManager[None]:
        seen.append(name)
        return nullcontext()

    async for engine in running(model, False, Timeline(annotate=annotate)):
        await generate(engine, "a", 3)
    assert set(seen) == {"schedule", "launch", "collect", "commit", "publish"}
    assert seen.count("launch") == seen.count("collect") == 3


async def test_aborts_have_causes_and_waits_are_told_once(model: str) -> None:
    """Every request that was admitted ends in exactly one finish reason; each abort has one cause."""
    async for engine in running(model, True):
        for i, cause in enumerate(("tape_lost", "unwanted")):
            request = Request(f"{i}", PROMPT, SamplingParams(max_tokens=500, ignore_eos=True))
            begun: asyncio.Queue[object] = asyncio.Queue()
            engine.submit(request, begun.put_nowait)
            await begun.get()
            engine.abort(request.id, cause)
            engine.abort(request.id, "too late")
        engine.submit(
            Request("left", PROMPT, SamplingParams(max_tokens=500, ignore_eos=True)), lambda _: None
        )
        await generate(engine, "whole", 3)
    stats = engine.stats()
    assert stats.aborted == {"tape_lost": 1, "unwanted": 1, "stopped": 1}
    assert stats.finished == {"abort": 3, "length": 1}
    assert sum(stats.finished.values()) == stats.admitted == 4
    assert len((await engine.reading(-1, 9)).queue_times) == 4
    assert (await engine.reading(-1, 9)).queue_times == []
