"""From projections to attention in one launch: norms, rotary embedding, keys and values into the cache."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from engine.attention.rotary import Rotary
from engine.triton_launch import await_previous_kernel, dependent_launch, launch_options

MAX_HEADS = 8
"""Of one program: more would make too few programs of a small batch."""


@triton.jit
def _rotate(
    to,
    heads,
    norm,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """From the heads that `heads` [n, 1] points at to those that `to` points at."""
    HALF: tl.constexpr = HEAD_DIM // 2
    # A row for every head, so that each thread loads what it needs and none exchanges with another.
    dim = tl.broadcast_to(tl.arange(0, PADDED_HALF)[None, :], (heads.shape[0], PADDED_HALF))
    inside = dim < HALF
    first = tl.load(heads + dim, mask=inside, other=0.0)
    second = tl.load(heads + HALF + dim, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(a * a + b * b, 1) / HEAD_DIM + eps)[:, None]
        scaled = (a * factor).to(first.dtype) * tl.load(norm + dim, mask=inside, other=0.0)
        a = scaled.to(tl.float32)
        scaled = (b * factor).to(first.dtype) * tl.load(norm + HALF + dim, mask=inside, other=0.0)
        b = scaled.to(tl.float32)
    first_cos = tl.load(cos + dim, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + HALF + dim, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + dim, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + HALF + dim, mask=inside, other=0.0).to(tl.float32)
    tl.store(to + dim, (a * first_cos - b * first_sin).to(first.dtype), mask=inside)
    tl.store(to + HALF + dim, (b * second_cos + a * second_sin).to(first.dtype), mask=inside)


@triton.jit
def _copy(to, heads, HEAD_DIM: tl.constexpr, PADDED_HALF: tl.constexpr):
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, PADDED_HALF)[None, :]
    inside = dim < HALF
    first = tl.load(heads + dim, mask=inside)
    second = tl.load(heads + HALF + dim, mask=inside)
    tl.store(to + dim, first, mask=inside)
    tl.store(to + HALF + dim, second, mask=inside)


@triton.jit
def _rotary_kernel(
    out,
    query,
    key,
    value,
    key_cache,
    value_cache,
    cache_slots,
    cos,
    sin,
    query_norm,
    key_norm,
    eps,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    cos_token,
    sin_token,
    cache_block,
    cache_token,
    cache_head,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous_kernel(DEPENDENT)
    # A program takes HEADS heads of one token: of its queries, its keys or its values.
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    head = (first_head + tl.arange(0, HEADS))[:, None]
    cos += token * cos_token
    sin += token * sin_token
    if first_head < QUERY_HEADS:
        to = out + (token * QUERY_HEADS + head) * HEAD_DIM
        heads = query + token * query_token + head * query_head
        _rotate(to, heads, query_norm, cos, sin, eps, HEAD_DIM, NORM, PADDED_HALF)
    else:
        slot = tl.load(cache_slots + token).to(tl.int64)
        place = slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_token
        if first_head < QUERY_HEADS + KV_HEADS:
            head -= QUERY_HEADS
            to = key_cache + place + head * cache_head
            heads = key + token * key_token + head * key_head
            _rotate(to, heads, key_norm, cos, sin, eps, HEAD_DIM, NORM, PADDED_HALF)
        else:
            head -= QUERY_HEADS + KV_HEADS
            to = value_cache + place + head * cache_head
            heads = value + token * value_token + head * value_head
            _copy(to, heads, HEAD_DIM, PADDED_HALF)


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotary: Rotary,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_slots: torch.Tensor,
) -> torch.Tensor:
    """What `rotary` makes of query [T, heads, head_dim], contiguous.

    What it makes of key [T, kv_heads, head_dim], and value [T, kv_heads, head_dim], go to place
    cache_slots[t] of the caches.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    per_program = math.gcd(heads, kv_heads, MAX_HEADS)  # a power of 2
    padded_half = triton.next_power_of_2(head_dim // 2)
    normed = rotary.query_norm is not None
    dependent = dependent_launch(query.device)
    _rotary_kernel[(tokens, (heads + 2 * kv_heads) // per_program)](
        out,
        query,
        key,
        value,
        key_cache,
        value_cache,
        cache_slots,
        rotary.cos,
        rotary.sin,
        rotary.query_norm if normed else query,
        rotary.key_norm if normed else key,
        rotary.eps,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        rotary.cos.stride(1),
        rotary.sin.stride(1),
        *key_cache.stride()[:3],
        QUERY_HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        NORM=normed,
        HEADS=per_program,
        PADDED_HALF=padded_half,
        DEPENDENT=dependent,
        # Threads that move 16 bytes of half a head at a time, in half precision.
        num_warps=max(1, min(8, per_program * padded_half // 256)),
        **launch_options(dependent),
    )
    return out
