"""Writes one step's keys and values into the paged cache, in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    cache_slots,
    key_token,
    key_head,
    value_token,
    value_head,
    cache_block,
    cache_token,
    cache_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    inside = (head < KV_HEADS) & (dim < HEAD_DIM)
    slot = tl.load(cache_slots + token).to(tl.int64)
    place = slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_token + head * cache_head + dim
    keys = tl.load(key + token * key_token + head * key_head + dim, mask=inside)
    values = tl.load(value + token * value_token + head * value_head + dim, mask=inside)
    tl.store(key_cache + place, keys, mask=inside)
    tl.store(value_cache + place, values, mask=inside)


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_slots: torch.Tensor,
) -> None:
    """key, value [T, kv_heads, head_dim] go to place cache_slots[t] of both caches."""
    tokens, kv_heads, head_dim = key.shape
    _write_kernel[(tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        cache_slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *key_cache.stride()[:3],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        PADDED_HEADS=triton.next_power_of_2(kv_heads),
        PADDED_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
