"""From projections to attention in one launch: norms, rotary embedding, keys and values into the cache.

Of a step that only decodes, the decode kernel does this itself.
"""

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
def rotated(
    heads,
    dim,
    inside,
    norm,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """`Rotary.apply` of the heads that `heads` [n, 1] points at, in dimensions `dim` [1, d]: [n, d]."""
    HALF: tl.constexpr = HEAD_DIM // 2
    # Loaded twice, so that no thread needs what another has.
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    mine = tl.load(heads + dim, mask=inside, other=0.0)
    other = tl.load(heads + partner, mask=inside, other=0.0)
    a, b = mine.to(tl.float32), other.to(tl.float32)
    known = dim < HEAD_DIM
    if NORM:
        factor = tl.rsqrt(tl.sum(a * a, 1) / HEAD_DIM + eps)[:, None]
        scaled = (a * factor).to(mine.dtype) * tl.load(norm + dim, mask=known, other=0.0)
        a = scaled.to(tl.float32)
        scaled = (b * factor).to(mine.dtype) * tl.load(norm + partner, mask=known, other=0.0)
        b = scaled.to(tl.float32)
    b = tl.where(dim < HALF, -b, b)
    cosines = tl.load(cos + dim, mask=known, other=0.0).to(tl.float32)
    sines = tl.load(sin + dim, mask=known, other=0.0).to(tl.float32)
    return (a * cosines + b * sines).to(mine.dtype)


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
    PADDED_DIM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous_kernel(DEPENDENT)
    # A program takes HEADS heads of one token: of its queries, its keys or its values.
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    head = (first_head + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    inside = tl.broadcast_to(dim < HEAD_DIM, (HEADS, PADDED_DIM))
    cos += token * cos_token
    sin += token * sin_token
    if first_head < QUERY_HEADS:
        heads = query + token * query_token + head * query_head
        to = out + (token * QUERY_HEADS + head) * HEAD_DIM
        states = rotated(heads, dim, inside, query_norm, cos, sin, eps, HEAD_DIM, NORM)
        tl.store(to + dim, states, mask=inside)
    else:
        slot = tl.load(cache_slots + token).to(tl.int64)
        place = slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_token
        if first_head < QUERY_HEADS + KV_HEADS:
            head -= QUERY_HEADS
            heads = key + token * key_token + head * key_head
            states = rotated(heads, dim, inside, key_norm, cos, sin, eps, HEAD_DIM, NORM)
            tl.store(key_cache + place + head * cache_head + dim, states, mask=inside)
        else:
            head -= QUERY_HEADS + KV_HEADS
            states = tl.load(value + token * value_token + head * value_head + dim, mask=inside)
            tl.store(value_cache + place + head * cache_head + dim, states, mask=inside)


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
    padded_dim = triton.next_power_of_2(head_dim)
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
        PADDED_DIM=padded_dim,
        DEPENDENT=dependent,
        # Threads that move 16 bytes at a time, in half precision.
        num_warps=max(1, min(8, per_program * padded_dim // 256)),
        **launch_options(dependent),
    )
    return out
