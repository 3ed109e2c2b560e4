"""The next token from the logits.

Every token's noise is a function of (seed, position, token id) alone. So output does not depend on
the batch, on overlap or on preemption, and a request moved elsewhere goes on exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Parameters of the sequences of a step, each [S] on the device."""

    temperature: torch.Tensor
    """float32; 0 is greedy"""
    top_k: torch.Tensor
    """int32; 0 keeps all"""
    top_p: torch.Tensor
    """float32"""
    min_p: torch.Tensor
    """float32"""
    seed_low: torch.Tensor
    """int32: the lower half of the 64-bit seed"""
    seed_high: torch.Tensor
    """int32: the upper half"""
    position: torch.Tensor
    """int32: position of the token to sample in its sequence"""


def sample(
    logits: torch.Tensor, params: SamplingTensors, *, greedy: bool = False, filtered: bool = True
) -> torch.Tensor:
    """Logits [S, V] of any float dtype -> int32 token ids [S].

    With noise g of the Gumbel distribution, argmax(logits / temperature + g) is a sample of
    softmax(logits / temperature) (Gumbel-max; Maddison et al., "A* sampling", 2014). `greedy` says
    that every temperature is 0, `filtered` that some top_k, top_p or min_p is set: a step that
    needs less does less.
    """
    if greedy:
        return logits.argmax(-1).int()
    logits = logits.float()
    hot = params.temperature[:, None] > 0
    scores = logits / torch.where(hot, params.temperature[:, None], 1.0)
    if filtered:
        scores = _filter(scores, params)
    scores = torch.where(hot, scores + gumbel_noise(params, logits.shape[-1]), logits)
    return scores.argmax(-1).int()


def _filter(scores: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Scores [S, V] with -inf where top_k, then top_p and min_p of what is left, drop a token.

    Tokens as likely as the least likely one kept are kept too.
    """
    ranked = scores.sort(-1, descending=True).values
    rank = torch.arange(scores.shape[-1], device=scores.device)
    top_k, top_p, min_p = params.top_k[:, None], params.top_p[:, None], params.min_p[:, None]
    keep = (top_k <= 0) | (rank < top_k)
    probs = ranked.masked_fill(~keep, -torch.inf).softmax(-1)
    likelier = probs.cumsum(-1) - probs
    keep &= (top_p >= 1) | (likelier < top_p)
    keep &= probs >= min_p * probs[:, :1]
    keep |= rank == 0  # the likeliest, whatever rounding says
    least = ranked.masked_fill(~keep, torch.inf).amin(-1, keepdim=True)
    return scores.masked_fill(scores < least, -torch.inf)


def gumbel_noise(params: SamplingTensors, vocab_size: int) -> torch.Tensor:
    """float32 [S, V]: noise of every token, a function of (seed, position, token id) alone."""
    seed = (params.seed_high.long() << 32) | (params.seed_low.long() & 0xFFFFFFFF)
    stream = _mix(seed + (params.position.long() + 1) * _GAMMA)
    token = torch.arange(1, vocab_size + 1, device=stream.device)
    bits = _mix(stream[:, None] + token * _GAMMA)
    uniform = (((bits >> 11) & (2**53 - 1)).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log1p(-uniform)).float()


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on int64. Masks make the arithmetic shifts logical."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX2
    return z ^ ((z >> 31) & (2**33 - 1))
