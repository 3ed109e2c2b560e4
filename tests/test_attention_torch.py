"""The torch backend against dense attention in float64, with poison around every page."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from engine.attention import LayerCache, PagedAttention, PreparesBatch
from engine.attention.torch_backend import GROUP_TOKENS, QUERY_TILE, TorchAttention
from tests.attention_reference import Step, random_step, split_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MIXED = [(1, 1), (16, 1), (33, 1), (100, 1), (40, 40), (70, 30), (17, 17), (5, 2)]


def run(step: Step) -> torch.Tensor:
    backend: PagedAttention = TorchAttention()
    assert isinstance(backend, PreparesBatch)
    return backend(
        step.query,
        step.key,
        step.value,
        step.cache,
        backend.prepare(step.batch),
        scale=step.scale,
        window=step.window,
        softcap=step.softcap,
    )


def check(sequences: list[tuple[int, int]], num_decodes: int, **settings: Any) -> None:
    step = random_step(sequences, num_decodes=num_decodes, **settings)
    step.check(run(step), atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 50])
def test_windows_and_soft_caps(device: str, window: int | None, softcap: float | None) -> None:
    check(MIXED, 4, device=device, window=window, softcap=softcap)


@pytest.mark.parametrize("at", [16, 40, 69])
def test_a_prefix_is_shared_in_the_step_that_computes_it(at: int) -> None:
    """All keys and values of a step are written before any are read, whatever sequence they belong to."""
    step = split_step(random_step([(80, 70)], num_decodes=0), at)
    step.check(run(step), atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("head_dim", [16, 24, 64, 96, 128, 256])
def test_head_dimensions(head_dim: int, softcap: float | None) -> None:
    check(MIXED, 4, head_dim=head_dim, softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (14, 2), (32, 4)])
def test_query_heads_that_share_keys(heads: int, kv_heads: int, softcap: float | None) -> None:
    check(MIXED, 4, heads=heads, kv_heads=kv_heads, softcap=softcap)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_block_sizes(block_size: int, window: int | None) -> None:
    check(MIXED, 4, block_size=block_size, window=window, table_width=20)


@pytest.mark.parametrize("window", [None, 20])
def test_a_cache_that_lies_head_by_head(window: int | None) -> None:
    step = random_step(MIXED, num_decodes=4, window=window)
    by_head = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (step.cache.key, step.cache.value)]
    step = dataclasses.replace(step, cache=LayerCache(*by_head))
    step.check(run(step), atol=1e-5)


def test_decodes_alone() -> None:
    check(MIXED[:4], 4)


def test_prompts_alone() -> None:
    check(MIXED[4:], 0)


def test_many_decodes_of_all_lengths() -> None:
    sequences = [(1 + 37 * i % 500, 1) for i in range(40)]
    assert sum(context for context, _ in sequences) > 2 * GROUP_TOKENS
    check(sequences, len(sequences))


@pytest.mark.parametrize("window", [None, 300])
def test_prompts_of_several_tiles(window: int | None) -> None:
    check([(9, 1), (2 * QUERY_TILE + 100, 2 * QUERY_TILE + 7)], 1, window=window)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 7])
def test_padded_entries_are_finite(window: int | None, softcap: float | None) -> None:
    """Scratch is read by them, and holds whatever was written there."""
    check(MIXED, 4, padded=3, window=window, softcap=softcap)


def test_a_context_of_nothing_is_finite() -> None:
    step = random_step(MIXED, num_decodes=4, padded=3)
    step.batch.context_len[4:7] = 0
    step.check(run(step), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    step = random_step(MIXED, num_decodes=4, dtype=dtype)
    step.check(run(step), atol=2e-2)


def test_layers_of_a_step_share_a_prepared_batch() -> None:
    """Windows and softcaps differ between layers of one model."""
    steps = [random_step(MIXED, num_decodes=4, window=window) for window in (None, 7, None)]
    backend = TorchAttention()
    shared = backend.prepare(steps[0].batch)
    for step in steps:
        assert torch.equal(step.batch.block_tables, steps[0].batch.block_tables)
        out = backend(
            step.query, step.key, step.value, step.cache, shared, scale=step.scale, window=step.window
        )
        step.check(out, atol=1e-5)


def test_a_wrong_block_table_is_noticed() -> None:
    step = random_step(MIXED, num_decodes=4)
    step.batch.block_tables[3] = step.batch.block_tables[3].flip(0)
    out = run(step)
    assert not torch.allclose(out[3].double(), step.expected[3], atol=1e-2)
    assert torch.allclose(out[2].double(), step.expected[2], atol=1e-5)
