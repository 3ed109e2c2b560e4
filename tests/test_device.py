"""The step that sizes the cache is one that could be planned, and the largest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import device
from engine.attention import LayerCache
from engine.config import EngineConfig
from engine.device import choose_device, choose_dtype, choose_num_blocks
from engine.graphs import mixed_buckets
from engine.model import PagedModel
from engine.plan import StepPlan, scratch_plan
from engine.slots import AT_ONCE
from tests.tiny_models import tiny_model


@given(st.integers(1, 40), st.integers(0, 500), st.integers(1, 90))
def test_the_scratch_step_is_as_large_as_a_step_can_be(sequences: int, more: int, context: int) -> None:
    plan = scratch_plan(sequences + more, sequences, context, 4)
    lengths = plan.sequences["query_len"]
    assert len(plan.tokens) == min(sequences + more, sequences * context)
    assert lengths.max() <= context
    assert plan.tokens["position"].max() == lengths.max() - 1
    assert (lengths[: plan.num_decodes] == 1).all()
    assert (np.diff(plan.sequences["query_start"]) == lengths[:-1]).all()
    assert not plan.tokens["cache_slot"].any() and not plan.sequences["row"].any()


def test_the_cache_of_a_cpu_takes_what_the_setting_says() -> None:
    path = str(tiny_model("llama")[1])
    cpu = torch.device("cpu")
    config = EngineConfig(model=path, device="cpu", cpu_cache_gib=0.01)
    model = PagedModel.load(config, cpu, torch.float32)
    blocks = choose_num_blocks(config, model, 32, cpu)
    caches = model.allocate_cache(blocks, config.block_size)
    used = sum(c.key.nbytes + c.value.nbytes for c in caches)
    assert used <= 0.01 * 2**30 < used + 2 * model.cache_bytes_per_block(config.block_size)
    for gib in (1e-6, 1e6):
        with pytest.raises(ValueError, match="cpu_cache_gib"):
            choose_num_blocks(config.model_copy(update={"cpu_cache_gib": gib}), model, 32, cpu)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_cache_of_a_gpu_leaves_room_for_the_largest_step_and_for_graphs(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TGI#1374. With a GPU that only says how much memory it has."""

    def peak(runner: object, plan: StepPlan) -> int:
        assert plan.block_tables.shape == (8, 4)
        return (5_000_000 if plan.penalised else 0) + 1000 * len(plan.tokens)

    gpu: Any = SimpleNamespace(type="cuda")
    caches = [LayerCache(*torch.zeros(2, 1, 1, 1, 1, dtype=torch.bfloat16))]
    model: Any = SimpleNamespace(
        vocab_size=1000, cache_bytes_per_block=lambda size: 100 * size, allocate_cache=lambda *_: caches
    )
    for name, does in (("Runner", lambda *_, **__: SimpleNamespace(caches=caches)), ("_peak_bytes", peak)):
        monkeypatch.setattr(device, name, does)
    for name in ("make_lanes", "warm_up"):
        monkeypatch.setattr(device, name, lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80_000_000, 100_000_000))
    config = EngineConfig(
        max_running_requests=8,
        max_tokens_per_step=64,
        block_size=16,
        memory_fraction=0.9,
        cuda_graphs=graphs,
        compile=graphs,
    )
    room = 70_000_000 - 5_064_000  # of 90, 20 are taken by weights; the largest step has 64 tokens
    if graphs:
        largest = max(mixed_buckets(64, 8)[-1][0], 8)
        room -= 1000 * largest + 8 * 1000 * 2  # and its logits
    room -= 1000 * (8 * 4 + AT_ONCE * 20)  # what grammars do with the logits
    assert choose_num_blocks(config, model, 4, gpu) == room // 1600


def test_dtype_and_device_follow_the_settings() -> None:
    path = str(tiny_model("llama")[1])
    cpu = torch.device("cpu")
    assert choose_dtype(EngineConfig(model=path), cpu) is torch.float32
    assert choose_dtype(EngineConfig(model=path, dtype="bfloat16"), cpu) is torch.bfloat16
    assert choose_dtype(EngineConfig(model=path), torch.device("cuda")) is torch.float32  # as saved
    assert choose_device(EngineConfig(device="cpu")) == cpu
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device"):
            choose_device(EngineConfig(device="cuda"))


def test_attention_that_asks_the_device_for_lengths_is_refused_in_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    plain = EngineConfig(attention="torch", compile=False, cuda_graphs=False)
    assert choose_device(plain).type == "cuda"
    for update in ({"compile": True}, {"cuda_graphs": True}):
        with pytest.raises(ValueError, match="attention"):
            choose_device(plain.model_copy(update=update))
