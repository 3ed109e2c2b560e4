"""What decode and prefill share: whose a sequence is, and the inner loop, in which rows of queries fold in
tiles of the paged cache.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one kernel cuts its work."""

    tile: int
    """Tokens of the cache that one iteration folds in."""
    num_warps: int
    num_stages: int
    rows: int = 16
    """Query rows of one program (prefill)."""
    resident: int = 2
    """Programs that a multiprocessor with 228 KiB of shared memory holds at once (decode)."""
    registers: int | None = None
    """The most that a thread may have, where more would leave room for fewer programs."""


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(inner, outer) so that `outer * q.k`, or `outer * tanh(inner * q.k)`, is the score in base 2."""
    if softcap is None:
        return 1.0, scale * LOG2_E
    return scale / softcap, softcap * LOG2_E


@triton.jit
def is_decode(sequence, query_start, query_len, num_decodes):
    """Which of the first `num_decodes` sequences have one token, token i being that of sequence i."""
    return (sequence < num_decodes) & (query_len == 1) & (query_start == sequence)


@triton.jit
def load_pages(block_table, tile, high, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The page of a tile, or the pages that make one up; page 0 for those from token `high` on."""
    if BLOCK_SIZE >= TILE:
        index = tile * TILE // BLOCK_SIZE
    else:
        index = tile * (TILE // BLOCK_SIZE) + tl.arange(0, TILE // BLOCK_SIZE)
    return tl.load(block_table + index, mask=index * BLOCK_SIZE < high, other=0)


@triton.jit
def fold_tiles(
    total,
    row_sum,
    row_max,
    query,
    row_position,
    key_cache,
    value_cache,
    block_table,
    first_tile,
    last_tile,
    low,
    high,
    window,
    inner,
    outer,
    stride_block,
    stride_token,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Online softmax over tiles [first_tile, last_tile); returns (total, row_sum, row_max).

    ALIGN divides both strides.
    `key_cache` and `value_cache` point at their head. MASKED: tokens outside [low, high) are never
    read, and a row sees none after `row_position` (nor before its window). Otherwise every row sees
    every token of these tiles. `row_max` is in the units before `outer`, which is positive.
    """
    dims = tl.arange(0, PADDED_DIM)
    pages = load_pages(block_table, first_tile, high, BLOCK_SIZE, TILE)
    for tile in range(first_tile, last_tile):
        token = tile * TILE + tl.arange(0, TILE)
        # Offsets need 64 bits: a layer's cache may pass 2^31 elements.
        if BLOCK_SIZE >= TILE:
            offset = pages.to(tl.int64) * stride_block + token % BLOCK_SIZE * stride_token
        else:
            within = tl.arange(0, BLOCK_SIZE) * stride_token
            offset = tl.reshape(pages.to(tl.int64)[:, None] * stride_block + within[None, :], (TILE,))
            offset = tl.multiple_of(offset, ALIGN)  # which the reshape forgets
        place = offset[:, None] + dims[None, :]
        # One iteration ahead, so that the loads of keys and values wait for no other load.
        pages = load_pages(block_table, tile + 1, high, BLOCK_SIZE, TILE)

        if MASKED:
            readable = ((token >= low) & (token < high))[:, None]
            if HEAD_DIM != PADDED_DIM:
                readable = readable & (dims < HEAD_DIM)[None, :]
            key = tl.load(key_cache + place, mask=readable, other=0.0)
            value = tl.load(value_cache + place, mask=readable, other=0.0)
        elif HEAD_DIM != PADDED_DIM:
            key = tl.load(key_cache + place, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(value_cache + place, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            key = tl.load(key_cache + place)
            value = tl.load(value_cache + place)

        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if SOFTCAP:
            score = 1.0 - 2.0 / (tl.exp(2.0 * inner * score) + 1.0)  # tanh
        if MASKED:
            visible = token[None, :] <= row_position[:, None]
            if WINDOW:
                visible = visible & (token[None, :] > row_position[:, None] - window)
            # Finite, so that a row that sees nothing of its first tiles stays free of inf - inf;
            # what it gathers there is scaled to zero by its first visible token.
            score = tl.where(visible, score, -1.0e30)
        new_max = tl.maximum(row_max, tl.max(score, 1))
        if MASKED:
            # Exactly 0 for a row that has seen nothing: a fused multiply-add of -1e30 would leave
            # its rounding error, which is a huge exponent.
            weight = tl.exp2((score - new_max[:, None]) * outer)
        else:
            weight = tl.exp2(score * outer - (new_max * outer)[:, None])
        shrink = tl.exp2((row_max - new_max) * outer)
        row_sum = row_sum * shrink + tl.sum(weight, 1)
        row_max = new_max
        total = tl.dot(weight.to(value.dtype), value, total * shrink[:, None], input_precision="ieee")
    return total, row_sum, row_max
