"""Prefill: chunks of many query tokens against the paged cache, in which the chunk itself already is.

A program takes some tokens of one sequence. Where these are few, behind a long context, each would have
a long way to go; then the context is split over several programs, and the one that finishes last
merges what they found. Programs find their work on the device, from the lengths: a captured graph
stays right, and balanced, whatever the step. The grid depends on shapes alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from engine.attention.triton_splits import SplitScratch
from engine.attention.triton_tiles import TileConfig, fold_tiles, is_decode, score_factors

MIN_SPLIT = 1024
"""Tokens of context below which a further split costs more (in merging) than it gains."""


@triton.jit(
    do_not_specialize=[
        "num_decodes",
        "first_sequence",
        "num_prefills",
        "table_row",
        "window",
        "target_splits",
    ]
)
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
    num_decodes,
    first_sequence,
    num_prefills,
    target_splits,
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
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    # A row is one (token, query head of the group): a group's heads share every tile that is read.
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0)
    unit = tl.program_id(1)

    # Units of work are numbered sequence by sequence, chunk by chunk, split by split; find ours.
    index = tl.arange(0, PADDED_SEQUENCES)
    sequences = first_sequence + index
    lengths = tl.load(context_len + sequences, mask=index < num_prefills, other=0)
    news = tl.load(query_len + sequences, mask=index < num_prefills, other=0)
    starts = tl.load(query_start + sequences, mask=index < num_prefills, other=0)
    news = tl.where(is_decode(sequences, starts, news, num_decodes), 0, news)
    chunks = tl.cdiv(news, TOKENS)
    tiles = tl.cdiv(lengths, TILE)
    if WINDOW:  # as far back as the earliest of the last chunk's tokens sees
        tiles -= tl.maximum(lengths - TOKENS - window + 1, 0) // TILE
    tiles_per_split = tl.maximum(tl.cdiv(tl.sum(chunks * tiles, 0), target_splits), MIN_TILES)
    splits = tl.cdiv(tiles, tiles_per_split)
    unit_end = tl.cumsum(chunks * splits, 0)
    at = tl.sum((unit_end <= unit).to(tl.int32), 0)
    if at >= num_prefills:
        return
    within = unit - tl.max(tl.where(unit_end <= unit, unit_end, 0), 0)
    sequence = first_sequence + at
    length = tl.load(context_len + sequence)
    new = tl.load(query_len + sequence)
    start = tl.load(query_start + sequence).to(tl.int64)
    num_splits = tl.sum(tl.where(index == at, splits, 0), 0)
    split = within % num_splits
    # Last tokens first: they see most, and would else be the tail that everyone waits for.
    first_token = (tl.cdiv(new, TOKENS) - 1 - within // num_splits) * TOKENS

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
    num_tiles = last - first
    last = first + num_tiles * (split + 1) // num_splits
    first += num_tiles * split // num_splits
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
    through = num_splits > 0
    if num_splits > 1:
        # Numbered among what is split, which has a bound: these units, and the chunks that they make up.
        before = (index < at) & (splits > 1)
        chunk = tl.sum(tl.where(before, chunks, 0), 0) + within // num_splits
        mine = tl.sum(tl.where(before, chunks * splits, 0), 0) + within - split
        mine = (mine * KV_HEADS + head * num_splits).to(tl.int64)
        arrival = arrivals + chunk * KV_HEADS + head
        stored = partial + row[:, None] * PADDED_DIM + dim[None, :]
        sums = partial_sums + row
        tl.store(stored + (mine + split) * (ROWS * PADDED_DIM), total)
        tl.store(sums + (mine + split) * (2 * ROWS), row_max)
        tl.store(sums + (mine + split) * (2 * ROWS) + ROWS, row_sum)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        through = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == num_splits - 1
        if through:
            tl.debug_barrier()
            total, row_sum = _merge_splits(stored, sums, mine, num_splits, outer, ROWS, PADDED_DIM)
            tl.store(arrival, 0)  # as the next launch expects it
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
    scratch: SplitScratch,
    *,
    num_decodes: int,
    num_prefills: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    config: TileConfig | None = None,
) -> None:
    """Fill out (contiguous) at the tokens of the last `num_prefills` sequences, but those of decodes.

    Decodes are the sequences that `is_decode` finds among the first `num_decodes`.
    """
    heads, head_dim = query.shape[1:]
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    config = config or prefill_config(head_dim, query.dtype)
    rows = max(config.rows, triton.next_power_of_2(group))
    inner, outer = score_factors(scale, softcap)
    sequences = query_len.shape[0]
    target_splits = triton.cdiv(scratch.programs, kv_heads)
    if scratch.arrivals.numel() < target_splits * kv_heads:
        raise ValueError(f"prefill scratch is too small for {kv_heads} heads of keys and values")
    padded_dim = triton.next_power_of_2(head_dim)
    partial, partial_sums = query, query  # not touched where nothing can be split
    if block_tables.shape[1] * key_cache.shape[1] > MIN_SPLIT:
        size = 2 * target_splits * kv_heads * rows
        partial = torch.empty(size * padded_dim, dtype=torch.float32, device=query.device)
        partial_sums = torch.empty(2 * size, dtype=torch.float32, device=query.device)
    # Every sequence may end with a chunk that is not full, and all splits add at most these.
    units = query.shape[0] // (rows // group) + num_prefills + target_splits
    _prefill_kernel[(kv_heads, units)](
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
        scratch.arrivals,
        num_decodes,
        sequences - num_prefills,
        num_prefills,
        target_splits,
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
        MIN_TILES=triton.cdiv(MIN_SPLIT, config.tile),
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        # One kernel for every batch, where the scratch is for more.
        PADDED_SEQUENCES=triton.next_power_of_2(max(num_prefills, scratch.arrivals.numel() // kv_heads)),
        ROWS=rows,
        PADDED_DIM=padded_dim,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
