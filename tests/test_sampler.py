"""Sampling against transformers' own filters, and noise that depends on (seed, position) alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampler import SamplingTensors, gumbel_noise, kept_tokens, sample


def params(n: int, seed: int = 0, position: int = 0, **changes: Any) -> SamplingTensors:
    values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    tensors = {
        name: torch.tensor(value, dtype=torch.int32 if name == "top_k" else torch.float32).expand(n)
        for name, value in values.items()
    }
    halves = torch.tensor([seed % 2**64], dtype=torch.uint64).view(torch.int32)
    return SamplingTensors(
        **tensors,
        seed_low=halves[0].expand(n),
        seed_high=halves[1].expand(n),
        position=torch.arange(position, position + n, dtype=torch.int32),
    )


def test_greedy_is_the_argmax_even_in_a_mixed_batch() -> None:
    logits = torch.randn(6, 50)
    mixed = params(6, temperature=[0.0, 1.0] * 3, top_k=7)
    assert sample(logits, params(6, temperature=0.0), greedy=True).tolist() == logits.argmax(-1).tolist()
    assert sample(logits, mixed)[::2].tolist() == logits[::2].argmax(-1).tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_keep_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(seed)) * 3
    # transformers applies min_p to what top_k and top_p left, renormalised: the same ratio to the best.
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    wanted = LogitsProcessorList(warpers)(torch.zeros(4, 1).long(), logits.clone())  # type: ignore[arg-type]
    chosen = params(4, top_k=top_k, top_p=top_p, min_p=min_p)
    got = kept_tokens(logits, torch.full((4,), 1 / temperature), chosen)
    assert torch.equal(got, ~wanted.isinf())


def plainly_kept(logits: list[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """The documented rule, token by token."""
    peak = max(logits)
    weight = [math.exp(x - peak) for x in logits]
    left = [i for i, x in enumerate(logits) if not top_k or sum(y > x for y in logits) < top_k]
    total = math.fsum(weight[i] for i in left)

    def within(i: int) -> bool:
        ahead = math.fsum(weight[j] for j in left if logits[j] > logits[i])
        return (top_p >= 1 or ahead < top_p * total) and weight[i] >= min_p

    return [i in left and within(i) for i in range(len(logits))]


@settings(max_examples=60)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=2, max_size=60),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([0.05, 0.31, 0.72, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_equal_tokens_are_kept_or_dropped_together(
    logits: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    values = [x / 8 for x in logits]  # many are equal
    got = kept_tokens(torch.tensor([values]), torch.ones(1), params(1, top_k=top_k, top_p=top_p, min_p=min_p))
    assert got[0].tolist() == plainly_kept(values, top_k, top_p, min_p)


@pytest.mark.parametrize(
    "changes", [{"top_k": 5000}, {"top_k": 1024}, {"top_p": 0.999}, {"top_k": 20_000, "top_p": 0.9}]
)
def test_the_part_that_is_sorted_makes_no_difference(changes: dict[str, Any]) -> None:
    """More tokens are kept than are sorted at first."""
    logits = torch.randn(3, 20_000).mul(64).round().div(64)
    chosen = params(3, **{"top_p": [1.0, 0.7, 0.999]} | changes)
    got = kept_tokens(logits, torch.ones(3), chosen)
    weight = (logits - logits.amax(-1, keepdim=True)).double().exp()
    for i in range(3):
        ranked, order = logits[i].sort(descending=True)
        k = int(chosen.top_k[i]) or 20_000
        mass = weight[i][order].where(ranked >= ranked[k - 1], 0)
        ahead = mass.cumsum(0) - mass
        least = ranked[(ahead < chosen.top_p[i].double() * mass.sum()) & (mass > 0)].amin()
        assert got[i].sum() == (logits[i] >= least).sum()
        assert torch.equal(got[i], logits[i] >= least)


def test_samples_follow_the_distribution() -> None:
    """Chi-squared over 20,000 draws at successive positions; the bound has p < 1e-6."""
    n, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0, 1.5, 0.1])
    for chosen, temperature in ((params(n, seed=5), 1.0), (params(n, seed=-7, temperature=0.5), 0.5)):
        counts = sample(logits.expand(n, -1), chosen, filtered=False).bincount(minlength=8)
        expected = (logits / temperature).softmax(-1) * n
        chi2 = ((counts - expected) ** 2 / expected).sum().item()
        assert chi2 < 42


def test_draws_at_positions_seeds_and_tokens_are_uncorrelated() -> None:
    rows = torch.stack(
        [gumbel_noise(params(64, seed=s, position=p), 512).flatten() for s in (0, 1, 2**32) for p in (0, 64)]
    )
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.03
    across_positions = torch.corrcoef(gumbel_noise(params(64), 4096)).fill_diagonal_(0)
    assert across_positions.abs().max() < 0.08
    assert abs(rows.mean().item() - 0.5772) < 0.01  # Euler's constant, the mean of a Gumbel variable
    assert abs(rows.var().item() - 1.6449) < 0.03  # pi^2 / 6


def test_noise_is_what_its_definition_says() -> None:
    """In integers and float64, written down once more."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (2**64 - 1, 70_000), (0x8123456789ABCDEF, 5)):
        stream = mix((seed + (position + 1) * gamma) % 2**64)
        bits = [mix((stream + (token + 1) * gamma) % 2**64) >> 11 for token in range(2000)]
        wanted = [-math.log(-math.log1p(-(b + 0.5) * 2.0**-53)) for b in bits]
        got = gumbel_noise(params(1, seed=seed, position=position), 2000)[0]
        torch.testing.assert_close(got, torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_noise_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(9, 300)
    chosen = params(9, seed=11, top_p=0.9)
    together = sample(logits, chosen)
    for i in range(9):
        alone = SamplingTensors(*(getattr(chosen, name)[i : i + 1] for name in chosen.__slots__))
        assert sample(logits[i : i + 1], alone).item() == together[i].item()


def test_seeds_of_64_bits_all_count() -> None:
    logits = torch.zeros(64, 1000)
    texts = {tuple(sample(logits, params(64, seed=s)).tolist()) for s in (0, 1, 2**31, 2**32, 2**63, -1)}
    assert len(texts) == 6


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_narrowest_filter_is_greedy(changes: dict[str, Any]) -> None:
    logits = torch.randn(20, 77)
    assert sample(logits, params(20, **changes)).tolist() == logits.argmax(-1).tolist()
