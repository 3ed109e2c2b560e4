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
    """Logits [S, V] -> int32 token ids [S]. On a GPU the logits' rows are contiguous, and of 16 or 32 bits.

    With noise g of the Gumbel distribution, argmax(logits / temperature + g) is a sample of
    softmax(logits / temperature) (Gumbel-max; Maddison et al., "A* sampling", 2014). `greedy` says
    that every temperature is 0, `filtered` that some top_k, top_p or min_p is set: a step that
    needs less does less.
    """
    if logits.is_cuda:  # greedy, too: its maximum over some rows of a vocabulary is the faster one
        from engine import triton_sampler  # comes with torch's CUDA builds only

        return triton_sampler.sample(logits, params, filtered=filtered)
    if greedy:
        return logits.argmax(-1).int()
    logits = logits.float()
    hot = params.temperature > 0
    inverse = 1 / torch.where(hot, params.temperature, 1)
    scores = logits * inverse[:, None]
    stream = _streams(params)
    if filtered:
        row, token = (hot[:, None] & kept_tokens(logits, inverse, params)).nonzero(as_tuple=True)
        noisy = scores[row, token] + _noise(stream[row], token)
        scores.masked_fill_(hot[:, None], -torch.inf)[row, token] = noisy
    else:
        noise = _noise(stream[:, None], torch.arange(logits.shape[-1], device=logits.device))
        scores = torch.where(hot[:, None], scores + noise, scores)
    return scores.argmax(-1).int()


def kept_tokens(logits: torch.Tensor, inverse: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """bool [S, V]: what top_k, then top_p and min_p of the rest, leave. `inverse` is 1 / temperature.

    top_k keeps a token if fewer than k are likelier, top_p if the likelier ones among those have less
    than the fraction p of their probability, min_p if it is at least that fraction as likely as the
    likeliest. So tokens of equal logits are kept or dropped together.
    """
    vocab = logits.shape[-1]
    peak, scale = logits.amax(-1, keepdim=True), inverse[:, None]
    weight = ((logits - peak) * scale).exp()
    no_limit = (params.top_k <= 0) | (params.top_k >= vocab)
    all_of_p = params.top_p >= 1
    width = min(1024, vocab)
    while True:  # sorting a few of the likeliest is enough, most times
        ranked = (logits.sort(descending=True) if width == vocab else logits.topk(width)).values
        last = (params.top_k.long() - 1).clamp(0, width - 1)[:, None]
        least = ranked.gather(1, last).masked_fill(no_limit[:, None], -torch.inf)
        total = torch.where(logits >= least, weight, 0).sum(-1, keepdim=True)
        share = torch.where(ranked >= least, ((ranked - peak) * scale).exp(), 0)
        within = share.cumsum(-1) - share < params.top_p[:, None] * total
        within[:, 0] = True  # whatever rounding says
        found = (all_of_p | ~within[:, -1]) & (no_limit | (params.top_k <= width))
        found |= (ranked[:, -1] < least[:, 0]) & (params.top_k <= width)
        if width == vocab or bool(found.all()):
            break
        width = min(16 * width, vocab)
    likely = ranked.masked_fill(~within, torch.inf).amin(-1, keepdim=True)
    least = torch.where(all_of_p[:, None], least, least.maximum(likely))
    return (logits >= least) & (weight >= params.min_p[:, None])


def gumbel_noise(params: SamplingTensors, vocab_size: int) -> torch.Tensor:
    """float32 [S, V]: noise of every token, a function of (seed, position, token id) alone."""
    tokens = torch.arange(vocab_size, device=params.position.device)
    return _noise(_streams(params)[:, None], tokens)


def _streams(params: SamplingTensors) -> torch.Tensor:
    """int64 [S]: where each sequence's noise of this position begins."""
    seed = (params.seed_high.long() << 32) | (params.seed_low.long() & 0xFFFFFFFF)
    return _mix(seed + (params.position.long() + 1) * _GAMMA)


def _noise(stream: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """-log(-log(1 - u)) in float32, for u of 53 random bits: the lesser of u and 1 - u is what is
    rounded, so both tails are right and neither is infinite."""
    bits = (_mix(stream + (token + 1) * _GAMMA) >> 11) & (2**53 - 1)
    near = bits < 2**52
    lesser = (torch.where(near, bits, 2**53 - 1 - bits).float() + 0.5) * 2.0**-53
    return -torch.log(torch.where(near, -torch.log1p(-lesser), -torch.log(lesser)))


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on int64. Masks make the arithmetic shifts logical."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX2
    return z ^ ((z >> 31) & (2**33 - 1))
