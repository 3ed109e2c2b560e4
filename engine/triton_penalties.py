"""Penalties in Triton: one pass over logits and counts, as `engine.penalties` has them in plain torch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from engine.penalties import PenaltyTensors

BLOCK = 2048


@triton.jit
def _penalise_kernel(
    out,
    logits,
    counts,
    rows,
    presences,
    frequencies,
    repetitions,
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits + sequence.to(tl.int64) * row_stride + token, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(rows + sequence).to(tl.int64)
    seen = tl.load(counts + row * vocab + token, mask=inside, other=0)
    times = seen >> 1
    divisor = tl.where(seen > 0, tl.load(repetitions + sequence), 1.0)
    x = tl.where(x > 0, tl.math.div_rn(x, divisor), x * divisor)
    x -= tl.load(frequencies + sequence) * times.to(tl.float32)
    x -= tl.where(times > 0, tl.load(presences + sequence), 0.0)
    tl.store(out + sequence.to(tl.int64) * vocab + token, x, mask=inside)


def penalise(
    logits: torch.Tensor, counts: torch.Tensor, params: PenaltyTensors, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits [S, V] with rows contiguous, counts int32 [rows, V] -> float32 [S, V], in `out` if given.

    `out` is contiguous, and may be `logits`.
    """
    s, v = logits.shape
    if out is None:
        out = torch.empty(s, v, dtype=torch.float32, device=logits.device)
    _penalise_kernel[s, triton.cdiv(v, BLOCK)](
        out,
        logits,
        counts,
        params.row,
        params.presence,
        params.frequency,
        params.repetition,
        logits.stride(0),
        v,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out
