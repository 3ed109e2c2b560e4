"""The size of a step that a target allows."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.calibration import LEAST_PROMPT, largest_within, mixed_plan
from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.request import Request, SamplingParams
from tests.tiny_models import tiny_model


@example(low=5, more=2, fixed=0.0, each=1.0, target=6.0)  # no nearer: the root of 5 * 7 is 5
@given(st.integers(1, 500), st.integers(0, 9000), st.floats(0, 10), st.floats(0.001, 0.1), st.floats(0, 1000))
def test_the_largest_that_is_within_the_target(
    low: int, more: int, fixed: float, each: float, target: float
) -> None:
    high = low + more
    found = largest_within(target, low, high, lambda n: fixed + each * n)
    assert low <= found <= high
    right = int((target - fixed) / each)
    if right <= low:
        assert found == low
    elif right >= high:
        assert found == high
    else:
        assert right * 7 / 8 - 1 <= found <= right


def test_few_are_measured() -> None:
    measured: list[int] = []
    largest_within(300.0, 64, 8192, lambda n: measured.append(n) or float(n))  # type: ignore[func-returns-value]
    assert len(measured) <= 7


def test_a_mixed_step_reads_half_the_cache_and_writes_to_scratch() -> None:
    plan = mixed_plan(200, 8, num_blocks=65, max_blocks=6, block_size=16)
    assert len(plan.tokens) == 200
    assert plan.num_decodes == 5  # three of the eight hold the rest, at most a context each
    assert (plan.tokens["cache_slot"] == 0).all() and (plan.sequences["row"] == 0).all()
    assert (plan.sequences["context_len"][:5] == 3 * 16).all()
    read = plan.block_tables[:5, :3]
    assert read.min() > 0 and read.max() < 65
    assert len(np.unique(read)) == read.size


@pytest.mark.parametrize(("target", "small"), [(1e-6, True), (1e6, False), (None, False)])
def test_an_engine_keeps_to_what_it_measured(target: float | None, small: bool) -> None:
    async def test() -> None:
        engine = AsyncEngine(
            EngineConfig(
                model=str(tiny_model("llama")[1]),
                device="cpu",
                block_size=8,
                num_blocks=64,
                context_length=96,
                max_running_requests=4,
                max_tokens_per_step=80,
                inter_token_target_ms=target,
                cpu_threads=1,
            )
        )
        await engine.start()
        try:
            request = Request("r", [1] * 90, SamplingParams(max_tokens=2))
            tokens = [token async for output in engine.generate(request) for token in output.tokens]
            assert len(tokens) == 2
            assert engine._scheduler.max_tokens_per_step == (4 + LEAST_PROMPT if small else 80)
            assert engine.max_tokens_per_step == engine._scheduler.max_tokens_per_step
        finally:
            await engine.stop()

    asyncio.run(test())
