"""Decode: one query token per sequence, all contexts together cut into one even share for each program.

As many programs as the GPU holds at once do the work. It is cut on the device, from the lengths, so a
captured graph stays right, and balanced, as they grow, and a long context among short ones keeps nobody
waiting (Osama et al., "Stream-K", 2023; Sanovar et al., "Lean Attention", 2024). The grid depends on shapes
alone.
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
from engine.attention.triton_splits import SplitScratch
from engine.attention.triton_tiles import TileConfig, fold_tiles, is_decode, score_factors
from engine.triton_launch import admit_next_kernel, await_results, dependent_launch, launch_options

MIN_SHARE = 256
"""Tokens below which a further program costs more (in merging) than it gains."""
CUT_TILES = 4
"""Tiles that may be read in the time that merging the parts of a sequence takes."""
MANY = 8
"""Heads of all sequences for each multiprocessor from which on who gets which place matters no longer."""


@triton.jit(do_not_specialize=["num_decodes", "table_row", "window"])
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
    CUT_TILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
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
    program = tl.program_id(1)

    # Before results are awaited, lengths are read: copies and ordinary kernels wrote them, and no dependent
    # kernel starts before an ordinary one that came after these has ended, whose start emptied L1.
    sequences = tl.arange(0, PADDED_SEQUENCES)
    lengths = tl.load(context_len + sequences, mask=sequences < num_decodes, other=0)
    if not ALL:
        starts = tl.load(query_start + sequences, mask=sequences < num_decodes, other=0)
        news = tl.load(query_len + sequences, mask=sequences < num_decodes, other=0)
        lengths = tl.where(is_decode(sequences, starts, news, num_decodes), lengths, 0)  # decodes come first
    tiles = tl.cdiv(lengths, TILE)
    if WINDOW:
        tiles -= tl.maximum(lengths - window, 0) // TILE
    # All tiles stand in one row, sequence after sequence, and each program takes its share of the row.
    ends = tl.cumsum(tiles, 0)
    begins = ends - tiles
    num_tiles = tl.sum(tiles, 0)
    programs = tl.maximum(tl.minimum(num_tiles // MIN_TILES, PROGRAMS), 1)
    begin = num_tiles * tl.minimum(program, programs) // programs  # nothing for those beyond, and no overflow
    end = num_tiles * tl.minimum(program + 1, programs) // programs
    # But sequences stay whole, a program for each, where that takes no longer, counted in tiles. A free place
    # takes the next one: at most the longest in each round, or the longest after all places were busy for a
    # share. A cut costs its merging, and a sixteenth (measured) since each part waits for its first tiles.
    share, longest = num_tiles // programs, tl.max(tiles, 0)
    decodes = tl.sum((tiles > 0).to(tl.int32), 0)
    time_whole = tl.minimum(tl.cdiv(decodes, PROGRAMS) * longest, share + longest)
    whole = time_whole <= share + share // 16 + CUT_TILES
    if whole:
        begin = tl.sum(tl.where(sequences == program, begins, 0), 0)
        end = tl.sum(tl.where(sequences == program, ends, 0), 0)
    first_sequence = tl.sum((ends <= begin).to(tl.int32), 0)
    stop = tl.where(begin < end, tl.sum((ends < end).to(tl.int32), 0) + 1, first_sequence)
    await_results(DEPENDENT)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    inside = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    for sequence in range(first_sequence, stop):
        length = tl.sum(tl.where(sequences == sequence, lengths, 0), 0)
        sequence_begin = tl.sum(tl.where(sequences == sequence, begins, 0), 0)
        sequence_end = tl.sum(tl.where(sequences == sequence, ends, 0), 0)
        # Program i begins at tile num_tiles * i // programs, so these have the sequence's first and last.
        first_program = ((sequence_begin + 1) * programs - 1) // num_tiles
        last_program = (sequence_end * programs - 1) // num_tiles
        num_parts = tl.where(whole, 1, last_program - first_program + 1)
        low = 0
        if WINDOW:
            low = tl.maximum(length - window, 0)
        first = low // TILE + tl.maximum(begin - sequence_begin, 0)
        last = low // TILE + tl.minimum(end, sequence_end) - sequence_begin
        token = tl.cast(sequence, tl.int64)
        heads = query + token * query_token + (head * GROUP + row)[:, None] * query_head
        if FRESH:
            cosines, sines = cos + token * cos_token, sin + token * sin_token
            queries = rotated(heads, dim[None, :], inside, query_norm, cosines, sines, eps, HEAD_DIM, NORM)
            if end >= sequence_end:  # these tiles include this token
                one = tl.arange(0, 1)[:, None]
                known = (dim < HEAD_DIM)[None, :]
                slot = tl.load(cache_slots + token).to(tl.int64)
                to = slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_token + head * cache_head
                keys = key + token * key_token + head * key_head + one
                keys = rotated(keys, dim[None, :], known, key_norm, cosines, sines, eps, HEAD_DIM, NORM)
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
            block_tables + token * table_row,
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

        out_row = (token * KV_HEADS + head) * GROUP
        if num_parts == 1:
            made = total.to(out.dtype.element_ty)
            tl.store(out + (out_row + row)[:, None] * HEAD_DIM + dim[None, :], made, mask=inside)
        else:
            # One place for each cut of the row: the next sequence or the next program makes the next.
            stored = ((token + program) * KV_HEADS + head) * GROUP + row
            tl.store(partial + stored[:, None] * HEAD_DIM + dim[None, :], total, mask=inside)
            tl.store(partial_lse + stored, row_max * outer + tl.log2(row_sum), mask=row < GROUP)
            # The barrier puts every thread's stores before the one thread's release.
            tl.debug_barrier()
            arrival = arrivals + sequence * KV_HEADS + head
            if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
                tl.debug_barrier()
                _merge_parts(
                    out + out_row * HEAD_DIM,
                    partial,
                    partial_lse,
                    sequence + first_program,
                    num_parts,
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
def _merge_parts(
    out,
    partial,
    partial_lse,
    first_part,
    num_parts,
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
    for begin in range(0, num_parts, MERGE):
        split = begin + tl.arange(0, MERGE)
        arrived = (split < num_parts)[:, None]
        stored = ((first_part + split).to(tl.int64) * KV_HEADS + head)[:, None] * GROUP + row[None, :]
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


def decode_config(head_dim: int, dtype: torch.dtype, many: bool) -> TileConfig:
    """Measured on an H200: `python -m benchmarks.attention --sweep`.

    In 16 bits a tile of keys and values takes 32 KiB and a program 96, so that a multiprocessor holds
    two and not one more: programs take their places as those of the kernel before leave, and the
    multiprocessors that are free first would get more than their share. Where `many` follow, that evens
    out, and a third keeps the memory busy while others begin and end.
    """
    if dtype == torch.float32:  # without tensor cores: whole operands sit in registers
        return TileConfig(tile=32, num_warps=8, num_stages=2)
    tile = 8192 // max(64, triton.next_power_of_2(head_dim))
    if many and head_dim in (64, 128):  # others, and larger groups, need more registers than a third leaves
        return TileConfig(tile, num_warps=4, num_stages=3, resident=3, registers=168)
    return TileConfig(tile, num_warps=4, num_stages=4)


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
    many = num_decodes * kv_heads > MANY * scratch.programs and fresh is None and group <= 16
    config = config or decode_config(head_dim, query.dtype, many)
    programs = max(1, config.resident * scratch.programs // kv_heads)
    parts = num_decodes + programs
    if (
        scratch.arrivals.numel() < num_decodes * kv_heads
        or scratch.partial_lse.numel() < parts * heads
        or scratch.partial.numel() < parts * heads * head_dim
    ):
        raise ValueError(f"decode scratch is too small for {num_decodes} x {heads} heads of {head_dim}")
    padded_group, padded_dim = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    inner, outer = score_factors(scale, softcap)
    dependent = dependent_launch(query.device)
    key, value, cache_slots, rotary = fresh or (query, query, query, Rotary(query, query, None, None, 0.0))
    normed = rotary.query_norm is not None
    _decode_kernel[(kv_heads, max(num_decodes, programs))](
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
        MIN_TILES=triton.cdiv(MIN_SHARE, config.tile),
        CUT_TILES=CUT_TILES,
        PROGRAMS=programs,
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
        **launch_options(dependent, config.registers),
    )
