"""Sampling in Triton: the choice that `engine.sampler` makes in plain torch, without sorting the vocabulary.

A filter keeps the tokens that at most so much weight is ahead of: top_k counts tokens, top_p adds up
probabilities. So both are one search, for the least logit whose strictly greater ones weigh less than the
target. A round of it weighs the logits above `PIVOTS` candidates at once and leaves a range `PIVOTS` times
smaller; candidates are numbered as floats of the logits' own precision are ordered, so a fixed number of
rounds ends at one, whatever the logits, and a captured graph has a fixed shape.

Each round is a launch over (row, chunk of the vocabulary). A program first reduces what the chunks of its row
found in the round before, which costs it a few hundred reads, and needs no atomics.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from engine.sampler import SamplingTensors

KEY_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}
"""Bits that number the floats of a dtype in their order: those of a float32 that the dtype can set."""


@dataclass(frozen=True, slots=True)
class SamplerConfig:
    """How the work is cut. Estimates in docs/decisions.md, figures by `python -m benchmarks.sampling`."""

    chunk: int = 8192
    """Logits of one program."""
    block: int = 1024
    """Logits that it holds at a time."""
    pivots: int = 8
    num_warps: int = 8


@triton.jit
def _number(x, UNUSED: tl.constexpr):
    """The place of float32s in their order, int32; `UNUSED` low bits of them are 0."""
    bits = x.to(tl.int32, bitcast=True) >> UNUSED
    return bits ^ ((bits >> 31) & (0x7FFFFFFF >> UNUSED))


@triton.jit
def _numbered(number, UNUSED: tl.constexpr):
    """The float32 of that number."""
    bits = (number ^ ((number >> 31) & (0x7FFFFFFF >> UNUSED))) << UNUSED
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _pivots(low, high, PIVOTS: tl.constexpr):
    """int32 [PIVOTS] in low - 1 .. high - 1, the first of them low - 1."""
    wide = (high.to(tl.int64) - low.to(tl.int64) + 1) * tl.arange(0, PIVOTS) // PIVOTS
    return (low.to(tl.int64) - 1 + wide).to(tl.int32)


@triton.jit
def _row_peak(peaks, row, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr):
    """The greatest logit of a row."""
    split = tl.arange(0, PADDED_SPLITS)
    found = tl.load(peaks + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    return tl.max(found, 0)


@triton.jit
def _bracket(
    ranges,
    targets,
    weights,
    row,
    top_p,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """What a round has left of a row's range: low, high, and the target of the search."""
    low = tl.load(ranges + 2 * row)
    high = tl.load(ranges + 2 * row + 1)
    target = tl.load(targets + row)
    if low < high:
        split = tl.arange(0, PADDED_SPLITS)
        pivot = tl.arange(0, PIVOTS)
        parts = tl.load(
            weights + (row * SPLITS + split)[:, None] * PIVOTS + pivot[None, :],
            mask=(split < SPLITS)[:, None],
            other=0.0,
        )
        ahead = tl.sum(parts, 0)
        if target < 0:  # top_p is of all that top_k has left, which is what the first pivot has ahead of it
            target = top_p * tl.sum(tl.where(pivot == 0, ahead, 0.0), 0)
        number = _pivots(low, high, PIVOTS)
        light = ahead < target
        high = tl.minimum(high, tl.min(tl.where(light, tl.maximum(number, low), high), 0))
        low = tl.maximum(low, tl.max(tl.where(light, low, number + 1), 0))
    return low, high, target


@triton.jit
def _peak_kernel(
    logits,
    peaks,
    row_stride,
    vocab,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The greatest logit of each chunk."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    at = split * CHUNK + tl.arange(0, BLOCK)
    logits += row.to(tl.int64) * row_stride
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, CHUNK, BLOCK):
        token = at + begin
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(peak, x)
    tl.store(peaks + row * SPLITS + split, tl.max(peak, 0))


@triton.jit
def _narrow_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    peaks,
    old_ranges,
    old_targets,
    old_weights,
    ranges,
    targets,
    weights,
    row_stride,
    vocab,
    COUNT: tl.constexpr,
    FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    PIVOTS: tl.constexpr,
    UNUSED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One round: of the search for top_k's threshold (`COUNT`), else for top_p's among what that left."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    peak = _row_peak(peaks, row, SPLITS, PADDED_SPLITS)
    if COUNT and FIRST:
        low = tl.full((), -(0x7F800000 >> UNUSED), tl.int32)  # the next after -inf, which nothing keeps
        high = low
        target = top_k.to(tl.float32)
        if (temperature > 0) & (top_k > 0):
            high = _number(peak, UNUSED)
    else:
        low, high, target = _bracket(
            old_ranges, old_targets, old_weights, row, top_p, SPLITS, PADDED_SPLITS, PIVOTS
        )
        if FIRST:
            target = -1.0
            if (temperature > 0) & (top_p < 1):
                high = _number(peak, UNUSED)
    if split == 0:
        tl.store(ranges + 2 * row, low)
        tl.store(ranges + 2 * row + 1, high)
        tl.store(targets + row, target)
    if low >= high:
        return

    inverse = tl.math.div_rn(1.0, temperature)
    pivots = _numbered(_pivots(low, high, PIVOTS), UNUSED)
    at = split * CHUNK + tl.arange(0, BLOCK)
    logits += row.to(tl.int64) * row_stride
    ahead = tl.zeros((PIVOTS, BLOCK), tl.float32)
    for begin in range(0, CHUNK, BLOCK):
        token = at + begin
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        weight = 1.0
        if not COUNT:
            weight = tl.exp((x - peak) * inverse)[None, :]
        ahead += tl.where(x[None, :] > pivots[:, None], weight, 0.0)
    place = (row * SPLITS + split) * PIVOTS + tl.arange(0, PIVOTS)
    tl.store(weights + place, tl.sum(ahead, 1))


@triton.jit
def _mix(z):
    """SplitMix64's output function on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _gumbel(stream, token):
    """Noise of tokens as `engine.sampler.gumbel_noise` has it, with arithmetic that a GPU has fast.

    Its logarithm is exact to an absolute error only, so near 1, where the likeliest noise is, a series
    takes its place: -log(1 - w) = 2 artanh(z) with z = w / (2 - w) <= 1/3.
    """
    bits = _mix(stream + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 11
    near = bits < (1 << 52)
    w = (tl.where(near, bits, (1 << 53) - 1 - bits).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    z = w / (2.0 - w)
    y = z * z
    series = 1.0 / 15
    series = series * y + 1.0 / 13
    series = series * y + 1.0 / 11
    series = series * y + 1.0 / 9
    series = series * y + 1.0 / 7
    series = series * y + 1.0 / 5
    series = series * y + 1.0 / 3
    series = series * y + 1.0
    exponential = tl.where(near, 2.0 * z * series, -tl.log(w))
    return -tl.log(exponential)


@triton.jit
def _draw_kernel(
    logits,
    temperatures,
    top_ps,
    min_ps,
    seed_lows,
    seed_highs,
    positions,
    peaks,
    ranges,
    targets,
    weights,
    best_scores,
    best_tokens,
    row_stride,
    vocab,
    FILTERED: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    PIVOTS: tl.constexpr,
    UNUSED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of each chunk's kept tokens, noise added."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    hot = temperature > 0
    inverse = 1.0
    if hot:
        inverse = tl.math.div_rn(1.0, temperature)
    peak = 0.0
    least = float("-inf")
    min_p = 0.0
    if FILTERED:
        peak = _row_peak(peaks, row, SPLITS, PADDED_SPLITS)
        low, _, _ = _bracket(
            ranges, targets, weights, row, tl.load(top_ps + row), SPLITS, PADDED_SPLITS, PIVOTS
        )
        least = _numbered(low, UNUSED)
        min_p = tl.load(min_ps + row)

    lane = tl.arange(0, BLOCK)
    # One block wide, since that is how its user reads it, and the interpreter's scalars must not overflow.
    seed = tl.load(seed_lows + row + lane * 0).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed |= tl.load(seed_highs + row + lane * 0).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    position = tl.load(positions + row + lane * 0).to(tl.uint64)
    stream = _mix(seed + (position + 1) * 0x9E3779B97F4A7C15)

    logits += row.to(tl.int64) * row_stride
    best_score = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = tl.zeros((BLOCK,), tl.int32) + split * CHUNK
    for begin in range(0, CHUNK, BLOCK):
        token = split * CHUNK + begin + lane
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        kept = token < vocab
        if FILTERED and hot:
            kept &= (x >= least) & (tl.exp((x - peak) * inverse) >= min_p)
        score = tl.where(kept, x * inverse, float("-inf"))
        if hot and tl.max(kept.to(tl.int32), 0) > 0:
            score += _gumbel(stream, token)
        better = score > best_score
        best_score = tl.where(better, score, best_score)
        best_token = tl.where(better, token, best_token)
    score = tl.max(best_score, 0)
    # Equals go to the lowest token.
    tl.store(best_tokens + row * SPLITS + split, tl.min(tl.where(best_score == score, best_token, vocab), 0))
    tl.store(best_scores + row * SPLITS + split, score)


@triton.jit
def _choose_kernel(
    best_scores, best_tokens, chosen, vocab, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr
):
    """The best of the chunks' best."""
    row = tl.program_id(0)
    split = tl.arange(0, PADDED_SPLITS)
    score = tl.load(best_scores + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    token = tl.load(best_tokens + row * SPLITS + split, mask=split < SPLITS, other=0)
    first = tl.min(tl.where((score == tl.max(score, 0)) & (split < SPLITS), token, vocab), 0)
    tl.store(chosen + row, tl.minimum(first, vocab - 1))  # a token all the same where every logit is NaN


def rounds(dtype: torch.dtype, pivots: int) -> int:
    """Rounds after which one candidate of `KEY_BITS` is left."""
    found, left = 0, 1 << KEY_BITS[dtype]
    while left > 1:
        found, left = found + 1, -(-left // pivots)
    return found


def sample(
    logits: torch.Tensor,
    params: SamplingTensors,
    *,
    filtered: bool,
    config: SamplerConfig = SamplerConfig(),
) -> torch.Tensor:
    """Logits [S, V] -> int32 token ids [S], as `engine.sampler.sample` where some temperature is above 0.

    Needs rows of contiguous logits in bfloat16, float16 or float32. Nothing waits for the device.
    """
    s, v = logits.shape
    splits = triton.cdiv(v, config.chunk)
    grid = (s, splits)
    cut = {"SPLITS": splits, "PADDED_SPLITS": triton.next_power_of_2(splits)}
    blocks = {"CHUNK": config.chunk, "BLOCK": config.block, "num_warps": config.num_warps}
    search = {"PIVOTS": config.pivots, "UNUSED": 32 - KEY_BITS[logits.dtype]}

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    peaks = floats(s, splits)
    # A round reads what the one before it wrote.
    old, new = ((ints(s, 2), floats(s), floats(s, splits, config.pivots)) for _ in range(2))
    if filtered:
        _peak_kernel[grid](logits, peaks, logits.stride(0), v, SPLITS=splits, **blocks)
        for count in (True, False):
            for i in range(rounds(logits.dtype, config.pivots)):
                _narrow_kernel[grid](
                    logits,
                    params.temperature,
                    params.top_k,
                    params.top_p,
                    peaks,
                    *old,
                    *new,
                    logits.stride(0),
                    v,
                    COUNT=count,
                    FIRST=i == 0,
                    **cut,
                    **search,
                    **blocks,
                )
                old, new = new, old
    best_scores, best_tokens, chosen = floats(s, splits), ints(s, splits), ints(s)
    _draw_kernel[grid](
        logits,
        params.temperature,
        params.top_p,
        params.min_p,
        params.seed_low,
        params.seed_high,
        params.position,
        peaks,
        *old,
        best_scores,
        best_tokens,
        logits.stride(0),
        v,
        FILTERED=filtered,
        **cut,
        **search,
        **blocks,
    )
    _choose_kernel[(s,)](best_scores, best_tokens, chosen, v, **cut, num_warps=1)
    return chosen
