"""Few rows times a weight matrix: a stream of weights through the multiprocessors, at their bandwidth.

A decode step multiplies a few dozen rows with every weight of the model once, so its time is that of
reading the weights. Each program owns some output columns, for all rows; what comes before the
product (a norm) and after it (gate, residual addition, the next norm) is done to the numbers at
hand. Where the columns are too few for all multiprocessors, the sum over the inputs is split and
the split that finishes last adds up the parts, in their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from engine.projection import DEPTH, PART
from engine.triton_launch import (
    await_previous_kernel,
    dependent_launch,
    launch_options,
    multiprocessors,
)

COLUMNS = PART
"""Columns of a program: the least that Hopper's matrix instruction takes, with the weights as its rows."""
MIN_PROGRAMS = 64
"""Programs that nearly fill the memory's bandwidth."""
MAX_DEPTH = 2048
"""Inputs beyond which a program is worth splitting, as long as there are multiprocessors left."""


@triton.jit
def _gated(first, second):
    """SiLU(first) * second (Shazeer, 2020), rounded where separate calls round."""
    gate = first.to(tl.float32)
    gate = (gate / (1 + tl.exp(-gate))).to(first.dtype).to(tl.float32)
    return (gate * second.to(tl.float32)).to(first.dtype)


@triton.jit(do_not_specialize=["rows"])
def _projection_kernel(
    out,
    total,
    squares,
    x,
    weight,
    residual,
    norm_weight,
    x_squares,
    partial,
    arrivals,
    eps,
    rows,
    columns,
    depth,
    parts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    ADD: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    tile = tl.program_id(0) // SPLIT
    split = tl.program_id(0) % SPLIT
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < rows
    if GATED:  # the first half of a tile are gates, the second what they gate
        HALF: tl.constexpr = COLUMNS // 2
        weight_row = tile * HALF + column % HALF + tl.where(column < HALF, 0, columns)
    else:
        weight_row = tile * COLUMNS + column
    step = tl.arange(0, DEPTH)
    weights = weight + weight_row.to(tl.int64)[:, None] * depth + step[None, :]
    inputs = x + row[:, None] * depth + step[None, :]
    await_previous_kernel(DEPENDENT)

    if NORMED:  # asked for now, needed after the loop
        part = tl.arange(0, PADDED_PARTS)
        x_squared = tl.load(
            x_squares + row[None, :] * parts + part[:, None],
            mask=(part < parts)[:, None] & inside[None, :],
            other=0.0,
        )
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    steps = depth // DEPTH
    per_split = tl.cdiv(steps, SPLIT)
    for k in tl.range(split * per_split, tl.minimum((split + 1) * per_split, steps), num_stages=STAGES):
        w = tl.load(weights + k * DEPTH)
        a = tl.load(inputs + k * DEPTH, mask=inside[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(a), acc)

    last = True
    if SPLIT > 1:
        stored = row[None, :] * COLUMNS + column[:, None]
        mine = partial + tile.to(tl.int64) * (SPLIT * ROWS * COLUMNS)
        tl.store(mine + split * (ROWS * COLUMNS) + stored, acc)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            tl.debug_barrier()
            # .cg: from L2, where the other programs' stores are; L1 may hold an older launch's.
            acc = tl.load(mine + stored, cache_modifier=".cg")
            for other in range(1, SPLIT):
                acc += tl.load(mine + other * (ROWS * COLUMNS) + stored, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)  # as the next launch expects it
    if last:
        if NORMED:
            acc *= tl.rsqrt(tl.sum(x_squared, 0) / depth + eps)[None, :]
        dtype: tl.constexpr = out.dtype.element_ty
        if GATED:
            pair = tl.permute(tl.reshape(acc, (2, COLUMNS // 2, ROWS)), (1, 2, 0))
            first, second = tl.split(pair)
            made = _gated(first.to(dtype), second.to(dtype))
            made_column = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            place = row[:, None] * columns + made_column[None, :]
            tl.store(out + place, tl.trans(made), mask=inside[:, None])
        else:
            made_column = tile * COLUMNS + column
            place = row[:, None] * columns + made_column[None, :]
            made = tl.trans(acc)
            if ADD:
                # Rounded where the separate kernels round.
                added = tl.load(residual + place, mask=inside[:, None], other=0.0)
                summed = (made.to(dtype) + added).to(dtype)
                tl.store(total + place, summed, mask=inside[:, None])
                wide = summed.to(tl.float32)
                tl.store(
                    squares + row * tl.num_programs(0) // SPLIT + tile, tl.sum(wide * wide, 1), mask=inside
                )
                made = wide * tl.load(norm_weight + made_column).to(tl.float32)[None, :]
            tl.store(out + place, made.to(dtype), mask=inside[:, None])


def splits(tiles: int, depth: int, multiprocessors: int) -> int:
    """Into how many parts to split the sum over `depth` inputs, for `tiles` programs' worth of columns."""
    split = 1
    while tiles * split * 2 <= multiprocessors and depth // (split * 2) >= 2 * DEPTH:
        if tiles * split >= MIN_PROGRAMS and depth // split <= MAX_DEPTH:
            break
        split *= 2
    return split


@functools.cache
def _arrivals(device: torch.device, stream: int) -> torch.Tensor:
    """Counters of the splits, all 0 between launches: launches of one stream share them in turn."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, total, squares) of `project` (out alone) and `project_add`, for a few dozen rows.

    The matrix needs a multiple of COLUMNS rows (twice that where it is gated) and of DEPTH columns.
    """
    depth = x.shape[-1]
    rows, columns = x.numel() // depth, weight.shape[0] // (2 if gated else 1)
    x = x.contiguous()
    programs = multiprocessors(x.device)
    wide = 2 * COLUMNS
    enough = residual is None and weight.shape[0] // COLUMNS > 3 * programs
    width = wide if enough and weight.shape[0] % wide == 0 else COLUMNS
    tiles = weight.shape[0] // width
    split = 1 if gated else splits(tiles, depth, programs)
    padded = max(16, triton.next_power_of_2(rows))
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    total, summed = out, x  # not touched where there is nothing to add
    if residual is not None:
        total = torch.empty_like(out)
        summed = torch.empty(*x.shape[:-1], tiles, dtype=torch.float32, device=x.device)
    partial, arrivals = x, x
    if split > 1:
        partial = torch.empty(tiles * split * padded * width, dtype=torch.float32, device=x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        arrivals = _arrivals(x.device, stream)
    parts = squares.shape[-1] if squares is not None else 1
    dependent = dependent_launch(x.device)
    _projection_kernel[(tiles * split,)](
        out,
        total,
        summed,
        x,
        weight,
        x if residual is None else residual.contiguous(),
        x if norm_weight is None else norm_weight,
        x if squares is None else squares,
        partial,
        arrivals,
        eps,
        rows,
        columns,
        depth,
        parts,
        ROWS=padded,
        COLUMNS=width,
        DEPTH=DEPTH,
        SPLIT=split,
        STAGES=4 if width > COLUMNS else 6,
        GATED=gated,
        NORMED=squares is not None,
        ADD=residual is not None,
        PADDED_PARTS=triton.next_power_of_2(parts),
        DEPENDENT=dependent,
        num_warps=4,
        **launch_options(dependent),
    )
    return out, total, summed


@triton.jit
def _gate_kernel(out, x, columns, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    await_previous_kernel(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    first = tl.load(x + row * 2 * columns + column, mask=inside)
    second = tl.load(x + (row * 2 + 1) * columns + column, mask=inside)
    tl.store(out + row * columns + column, _gated(first, second), mask=inside)


def gate(x: torch.Tensor) -> torch.Tensor:
    """[..., 2n] -> [..., n]: SiLU of the first half, times the second."""
    columns = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    width = 2048
    dependent = dependent_launch(x.device)
    _gate_kernel[(x.numel() // (2 * columns), triton.cdiv(columns, width))](
        out, x, columns, WIDTH=width, DEPENDENT=dependent, num_warps=8, **launch_options(dependent)
    )
    return out
