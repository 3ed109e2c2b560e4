"""Decode: one query token per sequence, its context split over as many programs as balance the batch.

The splits are counted on the device, from the lengths: a captured graph stays right, and balanced,
as they grow. The grid depends on shapes alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.attention.rotary import Rotary
from engine.attention.triton_rotary import rotated
from engine.attention.triton_splits import SplitScratch, max_splits
from engine.attention.triton_tiles import TileConfig, fold_tiles, is_decode, score_factors
from engine.triton_launch import admit_next_kernel, await_results, dependent_launch, launch_options

MIN_SPLIT = 256
"""Tokens below which a further split costs more (in merging) than it gains."""


@triton.jit
def _count_tiles(length, window, TILE: tl.constexpr, WINDOW: tl.constexpr):
    tiles = (length + TILE - 1) // TILE
    if WINDOW:
        tiles -= tl.maximum(length - window, 0) // TILE
    return tiles


@triton.jit(do_not_specialize=["num_decodes", "table_row", "window", "target_splits"])
def _decode_kernel(
    out,
    query,
    key_cache,
    value_cache,
    query_start,
    query_len,
    context_len,
    block_tables,
    partial,
    partial_lse,
    arrivals,
    key,
    value,
    cache_slots,
    cos,
    sin,
    query_norm,
    key_norm,
    eps,
    num_decodes,
    window,
    target_splits,
    inner,
    outer,
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
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MERGE: tl.constexpr,
    ALL: tl.constexpr,
    FRESH: tl.constexpr,
    NORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    admit_next_kernel(DEPENDENT)
    head = tl.program_id(0)
    unit = tl.program_id(1)

    # Before results are awaited, lengths are read: copies and ordinary kernels wrote them, and no dependent
    # kernel starts before an ordinary one that came after these has ended, whose start emptied L1.
    # Units of work are numbered sequence by sequence, split by split; find the one that is ours.
    sequences = tl.arange(0, PADDED_SEQUENCES)
    lengths = tl.load(context_len + sequences, mask=sequences < num_decodes, other=0)
    if not ALL:
        starts = tl.load(query_start + sequences, mask=sequences < num_decodes, other=0)
        news = tl.load(query_len + sequences, mask=sequences < num_decodes, other=0)
        lengths = tl.where(is_decode(sequences, starts, news, num_decodes), lengths, 0)
    tiles = _count_tiles(lengths, window, TILE, WINDOW)
    tiles_per_split = tl.maximum(tl.cdiv(tl.sum(tiles, 0), target_splits), MIN_TILES)
    unit_end = tl.cumsum(tl.cdiv(tiles, tiles_per_split), 0)
    sequence = tl.sum((unit_end <= unit).to(tl.int32), 0)
    if sequence >= num_decodes:
        await_results(DEPENDENT)
        return
    split = unit - tl.max(tl.where(unit_end <= unit, unit_end, 0), 0)

    length = tl.load(context_len + sequence)
    num_tiles = _count_tiles(length, window, TILE, WINDOW)
    num_splits = tl.cdiv(num_tiles, tiles_per_split)
    low = 0
    if WINDOW:
        low = tl.maximum(length - window, 0)
    first = low // TILE
    last = first + num_tiles * (split + 1) // num_splits
    first += num_tiles * split // num_splits
    block_table = block_tables + sequence.to(tl.int64) * table_row
    await_results(DEPENDENT)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    inside = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    token = sequence.to(tl.int64)
    heads = query + token * query_token + (head * GROUP + row)[:, None] * query_head
    if FRESH:
        cos += token * cos_token
        sin += token * sin_token
        queries = rotated(heads, dim[None, :], inside, query_norm, cos, sin, eps, HEAD_DIM, NORM)
        if split == num_splits - 1:  # whose tiles include this token
            one = tl.arange(0, 1)[:, None]
            known = (dim < HEAD_DIM)[None, :]
            slot = tl.load(cache_slots + token).to(tl.int64)
            to = slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_token + head * cache_head
            keys = key + token * key_token + head * key_head + one
            keys = rotated(keys, dim[None, :], known, key_norm, cos, sin, eps, HEAD_DIM, NORM)
            tl.store(key_cache + to + one + dim[None, :], keys, mask=known)
            values = value + token * value_token + head * value_head + one + dim[None, :]
            tl.store(value_cache + to + one + dim[None, :], tl.load(values, mask=known), mask=known)
        tl.debug_barrier()  # before any thread of this program reads them
    else:
        queries = tl.load(heads + dim[None, :], mask=inside, other=0.0)

    total, row_sum, row_max = fold_tiles(
        tl.zeros((ROWS, PADDED_DIM), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.full((ROWS,), -1.0e30, tl.float32),
        queries,
        tl.zeros((ROWS,), tl.int32) + (length - 1),
        key_cache + head * cache_head,
        value_cache + head * cache_head,
        block_table,
        first,
        last,
        low,
        length,
        window,
        inner,
        outer,
        cache_block,
        cache_token,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_SIZE,
        ALIGN,
        TILE,
        True,
        WINDOW,
        SOFTCAP,
    )
    total = total / row_sum[:, None]

    out_row = (sequence.to(tl.int64) * KV_HEADS + head) * GROUP
    if num_splits == 1:
        tl.store(
            out + (out_row + row)[:, None] * HEAD_DIM + dim[None, :],
            total.to(out.dtype.element_ty),
            mask=inside,
        )
    else:
        stored = (unit.to(tl.int64) * KV_HEADS + head) * GROUP + row
        tl.store(partial + stored[:, None] * HEAD_DIM + dim[None, :], total, mask=inside)
        tl.store(partial_lse + stored, row_max * outer + tl.log2(row_sum), mask=row < GROUP)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        arrival = arrivals + sequence * KV_HEADS + head
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.debug_barrier()
            _merge_splits(
                out + out_row * HEAD_DIM,
                partial,
                partial_lse,
                unit - split,
                num_splits,
                head,
                KV_HEADS,
                GROUP,
                HEAD_DIM,
                PADDED_GROUP,
                PADDED_DIM,
                MERGE,
            )
            tl.store(arrival, 0)  # as the next launch expects it


@triton.jit
def _merge_splits(
    out,
    partial,
    partial_lse,
    first_unit,
    num_splits,
    head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    row = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, PADDED_DIM)
    row_inside = row < GROUP
    inside = row_inside[:, None] & (dim < HEAD_DIM)[None, :]
    total = tl.zeros((PADDED_GROUP, PADDED_DIM), tl.float32)
    weight_sum = tl.zeros((PADDED_GROUP,), tl.float32)
    highest = tl.full((PADDED_GROUP,), -1.0e30, tl.float32)
    for begin in range(0, num_splits, MERGE):
        split = begin + tl.arange(0, MERGE)
        arrived = (split < num_splits)[:, None]
        stored = ((first_unit + split).to(tl.int64) * KV_HEADS + head)[:, None] * GROUP + row[None, :]
        # .cg: from L2, where the other programs' stores are; L1 may hold an older launch's.
        lse = tl.load(
            partial_lse + stored,
            mask=arrived & row_inside[None, :],
            other=-1.0e30,
            cache_modifier=".cg",
        )
        part = tl.load(
            partial + stored[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=arrived[:, :, None] & inside[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(lse - new_highest[None, :])
        weight_sum = weight_sum * shrink + tl.sum(weight, 0)
        total = total * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        highest = new_highest
    merged = total / weight_sum[:, None]
    tl.store(out + row[:, None] * HEAD_DIM + dim[None, :], merged.to(out.dtype.element_ty), mask=inside)


class Fresh(NamedTuple):
    """Keys and values that a launch writes into the cache itself; queries are as fresh.

    Nothing that one decode of the launch attends to may be another's.
    """

    key: torch.Tensor
    """[T, kv_heads, head_dim]"""
    value: torch.Tensor
    """[T, kv_heads, head_dim]"""
    cache_slots: torch.Tensor
    """int32 [T]"""
    rotary: Rotary
    """To be applied to queries and keys."""


def decode_config(head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Measured on an H200: `python -m benchmarks.attention --sweep`."""
    if dtype == torch.float32:  # without tensor cores: whole operands sit in registers
        return TileConfig(tile=32, num_warps=8, num_stages=2)
    if head_dim > 128:
        return TileConfig(tile=32, num_warps=4, num_stages=3)
    return TileConfig(tile=64, num_warps=4, num_stages=3)


def decode(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    context_len: torch.Tensor,
    block_tables: torch.Tensor,
    scratch: SplitScratch,
    *,
    num_decodes: int,
    every: bool = True,
    fresh: Fresh | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    config: TileConfig | None = None,
) -> None:
    """Fill out[:num_decodes] (contiguous): token i attends over sequence i, up to context_len[i].

    Unless `every` of them is a decode: of those which are, by `is_decode`. The keys and values of these
    tokens are in the cache, unless they are `fresh`.
    """
    heads, head_dim = query.shape[1:]
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    config = config or decode_config(head_dim, query.dtype)
    target_splits = max_splits(scratch.programs, kv_heads)
    units = num_decodes + target_splits
    if (
        scratch.arrivals.numel() < num_decodes * kv_heads
        or scratch.partial_lse.numel() < units * heads
        or scratch.partial.numel() < units * heads * head_dim
    ):
        raise ValueError(f"decode scratch is too small for {num_decodes} x {heads} heads of {head_dim}")
    padded_group, padded_dim = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    inner, outer = score_factors(scale, softcap)
    dependent = dependent_launch(query.device)
    key, value, cache_slots, rotary = fresh or (query, query, query, Rotary(query, query, None, None, 0.0))
    normed = rotary.query_norm is not None
    _decode_kernel[(kv_heads, units)](
        out,
        query,
        key_cache,
        value_cache,
        query_start,
        query_len,
        context_len,
        block_tables,
        scratch.partial,
        scratch.partial_lse,
        scratch.arrivals,
        key,
        value,
        cache_slots,
        rotary.cos,
        rotary.sin,
        rotary.query_norm if normed else query,
        rotary.key_norm if normed else query,
        rotary.eps,
        num_decodes,
        window or 0,
        target_splits,
        inner,
        outer,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        rotary.cos.stride(1),
        rotary.sin.stride(1),
        *key_cache.stride()[:3],
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        ALIGN=math.gcd(key_cache.stride(0), key_cache.stride(1), 16),
        TILE=config.tile,
        MIN_TILES=triton.cdiv(MIN_SPLIT, config.tile),
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        PADDED_SEQUENCES=max(32, triton.next_power_of_2(num_decodes)),
        ROWS=max(16, padded_group),
        PADDED_GROUP=padded_group,
        PADDED_DIM=padded_dim,
        MERGE=max(1, min(16, 8192 // (padded_group * padded_dim))),
        ALL=every,
        FRESH=fresh is not None,
        NORM=normed,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(dependent),
    )
