"""Prefill: chunks of many query tokens against the paged cache, in which the chunk itself already is.

A short chunk behind a long context makes few programs, each with a long way to go. Then the context is
split over several of them, and the one that finishes last merges what they found.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from engine.attention.triton_tiles import TileConfig, fold_tiles, score_factors

MAX_SPLITS = 16
MIN_SPLIT = 1024
"""Tokens of context below which a further split costs more (in merging) than it gains."""


@triton.jit(do_not_specialize=["first_sequence", "table_row", "window", "splits"])
def _prefill_kernel(
    out,
    query,
    key_cache,
    value_cache,
    query_start,
    query_len,
    context_len,
    block_tables,
    partial,
    partial_sums,
    arrivals,
    first_sequence,
    splits,
    window,
    inner,
    outer,
    query_token,
    query_head,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    # A row is one (token, query head of the group): a group's heads share every tile that is read.
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(1)
    sequence = first_sequence + tl.program_id(2) // splits
    split = tl.program_id(2) % splits
    # Last tokens first: they see most, and would else be the tail that everyone waits for.
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    new = tl.load(query_len + sequence)
    if first_token >= new:
        return
    length = tl.load(context_len + sequence)
    start = tl.load(query_start + sequence).to(tl.int64)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    token = first_token + row // GROUP
    inside = ((row < TOKENS * GROUP) & (token < new))[:, None] & (dim < HEAD_DIM)[None, :]
    row_head = head * GROUP + row % GROUP
    place = (start + token)[:, None] * query_token + row_head[:, None] * query_head + dim[None, :]
    queries = tl.load(query + place, mask=inside, other=0.0)

    # Positions of the first and one past the last row; tokens that some row sees are low..high-1.
    first_position = length - new + first_token
    high = tl.minimum(first_position + TOKENS, length)
    row_position = tl.minimum(length - new + token, high - 1)
    diagonal = (first_position + 1) // TILE  # tiles before it end at or before the first row
    low = 0
    first = 0
    if WINDOW:
        low = tl.maximum(first_position - window + 1, 0)
        first = low // TILE
    last = tl.cdiv(high, TILE)
    tiles = last - first
    last = first + tiles * (split + 1) // splits
    first += tiles * split // splits
    diagonal = tl.minimum(tl.maximum(diagonal, first), last)
    total = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_max = tl.full((ROWS,), -1.0e30, tl.float32)
    keys = key_cache + head * cache_head
    values = value_cache + head * cache_head
    table = block_tables + sequence.to(tl.int64) * table_row
    if WINDOW:
        # Tiles that the window's edge cuts for some row.
        edge = tl.cdiv(tl.maximum(high - window, 0), TILE)
        edge = tl.minimum(tl.maximum(edge, first), diagonal)
        total, row_sum, row_max = fold_tiles(
            total,
            row_sum,
            row_max,
            queries,
            row_position,
            keys,
            values,
            table,
            first,
            edge,
            low,
            high,
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
        first = edge
    total, row_sum, row_max = fold_tiles(
        total,
        row_sum,
        row_max,
        queries,
        row_position,
        keys,
        values,
        table,
        first,
        diagonal,
        low,
        high,
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
        False,
        WINDOW,
        SOFTCAP,
    )
    total, row_sum, row_max = fold_tiles(
        total,
        row_sum,
        row_max,
        queries,
        row_position,
        keys,
        values,
        table,
        diagonal,
        last,
        low,
        high,
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
    through = splits > 0
    if splits > 1:
        unit = (tl.program_id(2) // splits * KV_HEADS + head) * tl.num_programs(0) + tl.program_id(0)
        mine = unit.to(tl.int64) * splits
        stored = partial + row[:, None] * PADDED_DIM + dim[None, :]
        sums = partial_sums + row
        tl.store(stored + (mine + split) * (ROWS * PADDED_DIM), total)
        tl.store(sums + (mine + split) * (2 * ROWS), row_max)
        tl.store(sums + (mine + split) * (2 * ROWS) + ROWS, row_sum)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        through = tl.atomic_add(arrivals + unit, 1, sem="acq_rel", scope="gpu") == splits - 1
        if through:
            tl.debug_barrier()
            total, row_sum = _merge_splits(stored, sums, mine, splits, outer, ROWS, PADDED_DIM)
            tl.store(arrivals + unit, 0)  # as the next launch expects it
    if through:
        total = total / row_sum[:, None]
        place = (start + token)[:, None] * (KV_HEADS * GROUP) + row_head[:, None]
        place = place * HEAD_DIM + dim[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge_splits(stored, sums, first, splits, outer, ROWS: tl.constexpr, PADDED_DIM: tl.constexpr):
    total = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_max = tl.full((ROWS,), -1.0e30, tl.float32)
    for split in range(first, first + splits):
        # .cg: from L2, where the other programs' stores are; L1 may hold an older launch's.
        part_max = tl.load(sums + split * (2 * ROWS), cache_modifier=".cg")
        part_sum = tl.load(sums + split * (2 * ROWS) + ROWS, cache_modifier=".cg")
        part = tl.load(stored + split * (ROWS * PADDED_DIM), cache_modifier=".cg")
        new_max = tl.maximum(row_max, part_max)
        # What a row gathered in a split of which it sees nothing has weight 0 here.
        shrink = tl.exp2((row_max - new_max) * outer)
        weight = tl.exp2((part_max - new_max) * outer)
        row_sum = row_sum * shrink + part_sum * weight
        total = total * shrink[:, None] + part * weight[:, None]
        row_max = new_max
    return total, row_sum


def prefill_config(head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Measured on an H200: `python -m benchmarks.attention --sweep`."""
    if dtype == torch.float32:  # without tensor cores: whole operands sit in registers
        return TileConfig(tile=32, num_warps=8, num_stages=2, rows=16)
    if head_dim > 128:
        return TileConfig(tile=32, num_warps=8, num_stages=3, rows=128)
    return TileConfig(tile=64, num_warps=8, num_stages=3, rows=128)


def prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    context_len: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    num_decodes: int,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    arrivals: torch.Tensor | None = None,
    programs: int = 1,
    config: TileConfig | None = None,
) -> None:
    """Fill out (contiguous) at the tokens of the sequences after the first `num_decodes`.

    `arrivals`: int32, 0 between launches; as many programs as it has elements may be split, towards
    `programs` in all.
    """
    heads, head_dim = query.shape[1:]
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    config = config or prefill_config(head_dim, query.dtype)
    rows = max(config.rows, triton.next_power_of_2(group))
    inner, outer = score_factors(scale, softcap)
    chunks = triton.cdiv(max_query_len, rows // group)
    sequences = query_len.shape[0] - num_decodes
    units = chunks * kv_heads * sequences
    splits = 1
    if arrivals is not None and units <= arrivals.numel():
        context = block_tables.shape[1] * key_cache.shape[1]
        splits = max(1, min(programs // units, context // MIN_SPLIT, MAX_SPLITS))
    padded_dim = triton.next_power_of_2(head_dim)
    partial, partial_sums = query, query  # not touched where nothing is split
    if splits > 1:
        size = units * splits * rows
        partial = torch.empty(size * padded_dim, dtype=torch.float32, device=query.device)
        partial_sums = torch.empty(2 * size, dtype=torch.float32, device=query.device)
    _prefill_kernel[(chunks, kv_heads, sequences * splits)](
        out,
        query,
        key_cache,
        value_cache,
        query_start,
        query_len,
        context_len,
        block_tables,
        partial,
        partial_sums,
        query if arrivals is None else arrivals,
        num_decodes,
        splits,
        window or 0,
        inner,
        outer,
        query.stride(0),
        query.stride(1),
        *key_cache.stride()[:3],
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        ALIGN=math.gcd(key_cache.stride(0), key_cache.stride(1), 16),
        TILE=config.tile,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        ROWS=rows,
        PADDED_DIM=padded_dim,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
