"""The Triton kernels choose what plain torch chooses: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampler
from engine.sampler import SamplingTensors

triton = pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET, which conftest sets where there is no GPU
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)

from engine import triton_sampler  # noqa: E402
from engine.triton_sampler import KEY_BITS, SamplerConfig, rounds  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = SamplerConfig(chunk=128, block=64)  # chunks of several blocks, the last of each in part
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def params(n: int, seed: int = 0, **changes: Any) -> SamplingTensors:
    """Any value may be a list, which is repeated."""
    values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    generator = torch.Generator().manual_seed(seed)
    for name in ("seed_low", "seed_high", "position"):
        low = 0 if name == "position" else -(2**31)
        values[name] = torch.randint(low, 2**31, (n,), generator=generator).tolist()
    ints = ("top_k", "seed_low", "seed_high", "position")
    tensors = {}
    for name, value in values.items():
        each = value if isinstance(value, list) else [value]
        repeated = (each * n)[:n]
        tensors[name] = torch.tensor(repeated, dtype=torch.int32 if name in ints else torch.float32)
    return SamplingTensors(**tensors)


def draw(
    logits: torch.Tensor, chosen: SamplingTensors, filtered: bool, config: SamplerConfig = SMALL
) -> torch.Tensor:
    there = SamplingTensors(*(getattr(chosen, field.name).to(DEVICE) for field in fields(chosen)))
    return triton_sampler.sample(logits.to(DEVICE), there, filtered=filtered, config=config).cpu()


def check(logits: torch.Tensor, chosen: SamplingTensors, filtered: bool = True, **kwargs: Any) -> None:
    """The tokens of plain torch, but where noise makes two of them equal to within rounding."""
    got = draw(logits, chosen, filtered, **kwargs).long()
    wanted = sampler.sample(logits, chosen, filtered=filtered).long()
    if torch.equal(got, wanted):
        return
    assert INTERPRETED is False, (got, wanted)
    hot = chosen.temperature > 0
    inverse = 1 / chosen.temperature.where(hot, torch.ones(()))
    noise = sampler.gumbel_noise(chosen, logits.shape[1]) * hot[:, None]
    scores = logits.float() * inverse[:, None] + noise
    kept = sampler.kept_tokens(logits.float(), inverse, chosen) | ~hot[:, None]
    rows = torch.arange(len(got))
    assert kept[rows, got].all()
    torch.testing.assert_close(scores[rows, got], scores[rows, wanted], atol=1e-5, rtol=1e-6)


FILTERS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.bfloat16, {"top_k": [3, 0, 50]}),
    (torch.float16, {"top_p": [0.3, 0.9, 1e-9]}),
    (torch.bfloat16, {"top_k": [0, 40, 3000], "top_p": [0.9, 0.5, 1.0], "min_p": [0.0, 0.2]}),
    (torch.float32, {"temperature": [0.0, 0.6, 1.4], "top_k": 30, "top_p": 0.9, "min_p": [0.0, 0.05]}),
]


@pytest.mark.parametrize(("dtype", "changes"), FILTERS, ids=lambda value: str(value)[:40])
def test_filters(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    logits = (torch.randn(3, 200, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    check(logits, params(3, **changes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_alone(dtype: torch.dtype) -> None:
    logits = torch.randn(12, 200, generator=torch.Generator().manual_seed(2)).to(dtype)
    check(logits, params(12, temperature=[0.0, 0.7, 1.0, 1.3]), filtered=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("allowed", [1, 2, 300])
def test_what_a_grammar_forbids_is_never_chosen(dtype: torch.dtype, allowed: int) -> None:
    """Nearly all of a row is -inf, its likeliest tokens among it."""
    generator = torch.Generator().manual_seed(allowed)
    logits = (torch.randn(8, 1000, generator=generator) * 4).to(dtype)
    kept = torch.rand(8, 1000, generator=generator).argsort(-1)[:, :allowed]
    masked = torch.full_like(logits, -torch.inf).scatter(1, kept, logits.gather(1, kept))
    masked[0] = logits[0]  # beside one that may say anything
    chosen = params(
        8, temperature=[1.0, 0.0, 3.0], top_k=[0, 0, 5, 50], top_p=[1.0, 0.9, 1e-9], min_p=[0.0, 0.3]
    )
    for filtered in (True, False):
        check(masked, chosen, filtered)
        got = draw(masked, chosen, filtered)
        assert (masked.gather(1, got[:, None].long()) > -torch.inf).all()


@pytest.mark.parametrize("filtered", [False, True])
def test_of_equals_without_noise_the_lowest_is_chosen(filtered: bool) -> None:
    """As a step that is greedy altogether does: a request's text must not depend on who is beside it."""
    logits = torch.zeros(4, 300)
    logits[0, [70, 90, 200]] = logits[2, [130, 290]] = 1
    got = draw(logits, params(4, temperature=[0.0, 1.0]), filtered)
    assert got[::2].tolist() == logits[::2].argmax(-1).tolist() == [70, 130]


def test_exactly_the_kept_tokens_are_drawn() -> None:
    """At a great temperature all kept tokens are about as likely, so that each is drawn in a few tries."""
    one = torch.randn(120, generator=torch.Generator().manual_seed(3)).mul(4).round().div(4)  # many are equal
    chosen = params(16, temperature=1e5, top_k=2)
    wanted = (one >= one.sort(descending=True).values[1]).nonzero().flatten()
    got = draw(one.bfloat16().expand(16, -1).contiguous(), chosen, True)
    assert sorted(set(got.tolist())) == wanted.tolist()


@settings(max_examples=3 if INTERPRETED else 200)
@given(
    logits=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, 1.0078125, -1.0, 3.5, -3e37, 3e37, 1e-38, -1e-38, -torch.inf]),
        min_size=1,
        max_size=120,
    ).filter(lambda values: max(values) > -torch.inf),
    top_k=st.integers(1, 40),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_floats(logits: list[float], top_k: int, top_p: float, seed: int) -> None:
    check(torch.tensor([logits]).bfloat16(), params(1, seed, top_k=top_k, top_p=top_p))


@pytest.mark.parametrize("config", [SamplerConfig(128, 64, pivots=16), SamplerConfig(256, 256, pivots=4)])
def test_other_cuts(config: SamplerConfig) -> None:
    logits = torch.randn(2, 250, generator=torch.Generator().manual_seed(4)).bfloat16()
    check(logits, params(2, top_k=[20, 0], top_p=[0.9, 0.5]), config=config)


@pytest.mark.parametrize("pivots", [2, 3, 8, 16])
def test_rounds_are_as_many_as_it_takes(pivots: int) -> None:
    for dtype, bits in KEY_BITS.items():
        assert pivots ** rounds(dtype, pivots) >= 2**bits > pivots ** (rounds(dtype, pivots) - 1)


def test_rows_of_a_larger_matrix() -> None:
    wide = torch.randn(2, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    chosen = params(2, top_k=9)
    assert torch.equal(draw(wide[:, :150], chosen, True), sampler.sample(wide[:, :150], chosen))


@pytest.mark.gpu  # the interpreter warns
def test_broken_logits_give_some_token() -> None:
    logits = torch.full((3, 300), torch.nan)
    logits[1] = -torch.inf
    logits[2] = torch.inf
    for filtered in (True, False):
        got = draw(logits, params(3, top_k=5, top_p=0.5), filtered)
        assert ((got >= 0) & (got < 300)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128_256, 151_936, 50_257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_vocabularies(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for spread in (0.5, 3.0):  # nearly flat, and peaked
        logits = (torch.randn(64, vocab, generator=generator) * spread).to(dtype)
        check(logits, params(64, temperature=[0.0, 0.7, 1.0, 2.0]), filtered=False, config=SamplerConfig())
        chosen = params(
            64,
            temperature=[0.0, 0.7, 1.0, 2.0, 1.0],
            top_k=[0, 50, 1000],
            top_p=[0.9, 0.95, 1.0, 0.1],
            min_p=[0.0, 0.02],
        )
        check(logits, chosen, config=SamplerConfig())


@pytest.mark.gpu
def test_captured_it_follows_its_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 128_256, generator=generator).bfloat16()
    there = SamplingTensors(*(getattr(params(8), field.name).cuda() for field in fields(SamplingTensors)))
    seen = logits.cuda()
    triton_sampler.sample(seen, there, filtered=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = triton_sampler.sample(seen, there, filtered=True)
    for seed in range(4):
        chosen = params(8, seed, top_k=[0, 5, 50][seed % 3 :], top_p=[0.9, 0.5], temperature=[1.0, 0.5])
        for field in fields(chosen):
            getattr(there, field.name).copy_(getattr(chosen, field.name))
        fresh = torch.randn(8, 128_256, generator=generator).bfloat16()
        seen.copy_(fresh)
        graph.replay()
        assert torch.equal(tokens.cpu(), triton_sampler.sample(seen, there, filtered=True).cpu())
        wanted = sampler.sample(fresh, chosen, filtered=True)
        assert (tokens.cpu() == wanted).sum() >= 7  # but for rounding
