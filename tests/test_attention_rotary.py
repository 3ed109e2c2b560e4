"""Norms and rotary embedding before attention: in torch and in one kernel, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from engine.attention import LayerCache, PagedAttention
from engine.attention.rotary import Rotary
from engine.attention.torch_backend import TorchAttention
from tests.attention_reference import Step, random_step

triton = pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = triton.knobs.runtime.interpret
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)

from engine.attention import triton_backend  # noqa: E402
from engine.attention.triton_backend import TritonAttention  # noqa: E402
from engine.attention.triton_rotary import rotate_and_write  # noqa: E402

needs_compiler = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set")
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
EPS = 1e-3


@dataclass(frozen=True)
class Case:
    """Fresh projections of one step, with a poisoned cache."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rotary: Rotary
    cache: LayerCache
    slots: torch.Tensor

    def rotated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64: x * cos + rotate_half(x) * sin (Su et al., 2021; halves instead of pairs)."""
        return self._rotated(self.query, self.rotary.query_norm), self._rotated(
            self.key, self.rotary.key_norm
        )

    def _rotated(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.double()
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return x * self.rotary.cos[0, :, None].double() + turned * self.rotary.sin[0, :, None].double()


def random_rotary(
    tokens: int,
    head_dim: int,
    *,
    norms: bool,
    dtype: torch.dtype,
    device: str = DEVICE,
    of: torch.dtype | None = None,
) -> Rotary:
    """Cosines and sines that differ between the halves, in the dtype `of`."""
    angle = 7 * torch.rand(1, tokens, head_dim, device=device)
    weights = [(torch.rand(head_dim, device=device) + 0.5).to(dtype) if norms else None for _ in range(2)]
    return Rotary(angle.cos().to(of or dtype), angle.sin().to(of or dtype), weights[0], weights[1], EPS)


def random_case(
    tokens: int = 5,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    norms: bool = False,
    dtype: torch.dtype = torch.float32,
    cos_dtype: torch.dtype | None = None,
    block_size: int = 4,
) -> Case:
    # Small values, so that the epsilon of the norms counts; a row is followed by something else.
    rows = heads + 2 * kv_heads
    wide = (0.1 * torch.randn(tokens, rows + 2, head_dim, device=DEVICE)).to(dtype)
    query, key, value, _ = torch.split(wide, [heads, kv_heads, kv_heads, 2], dim=1)
    blocks = 2 * -(-tokens // block_size)
    cache = torch.full((2, blocks, block_size, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    slots = torch.randperm(blocks * block_size, device=DEVICE)[:tokens].int()
    rotary = random_rotary(tokens, head_dim, norms=norms, dtype=dtype, of=cos_dtype)
    return Case(query, key, value, rotary, LayerCache(cache[0], cache[1]), slots)


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((got.double() - wanted).norm() < TOLERANCE[got.dtype] * wanted.norm())


def check_kernel(case: Case) -> None:
    before = [states.clone() for states in (case.query, case.key, case.value)]
    arguments = (case.rotary, case.cache.key, case.cache.value, case.slots)
    query = rotate_and_write(case.query, case.key, case.value, *arguments)
    assert query.is_contiguous()
    assert query.dtype == case.query.dtype
    wanted_query, wanted_key = case.rotated()
    assert close(query, wanted_query)
    slots = case.slots.long()
    keys, values = case.cache.key.flatten(0, 1), case.cache.value.flatten(0, 1)
    assert close(keys[slots], wanted_key)
    assert torch.equal(values[slots], case.value)
    others = torch.ones(len(keys), dtype=torch.bool, device=DEVICE)
    others[slots] = False
    assert keys[others].isnan().all()
    assert values[others].isnan().all()
    for states, old in zip((case.query, case.key, case.value), before, strict=True):
        assert torch.equal(states, old)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_dims(head_dim: int, norms: bool) -> None:
    check_kernel(random_case(head_dim=head_dim, norms=norms))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (14, 2), (7, 1), (12, 3), (32, 8), (16, 16)]
)
def test_query_heads_per_kv_head(heads: int, kv_heads: int, norms: bool) -> None:
    check_kernel(random_case(heads=heads, kv_heads=kv_heads, norms=norms))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("cos_dtype", [torch.float16, torch.float32])
def test_half_precision(cos_dtype: torch.dtype, norms: bool) -> None:
    check_kernel(random_case(dtype=torch.float16, cos_dtype=cos_dtype, norms=norms))


def test_one_token() -> None:
    check_kernel(random_case(1, norms=True))


def test_a_cache_that_lies_head_by_head() -> None:
    case = random_case(norms=True)
    caches = [
        torch.full_like(states.transpose(1, 2), torch.nan).contiguous().transpose(1, 2)
        for states in (case.cache.key, case.cache.value)
    ]
    assert not caches[0].is_contiguous()
    check_kernel(replace(case, cache=LayerCache(*caches)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norms", [False, True])
def test_in_torch(dtype: torch.dtype, norms: bool) -> None:
    case = random_case(dtype=dtype, norms=norms)
    assert all(map(close, case.rotary.apply(case.query, case.key), case.rotated()))


# Attention after it


def triton_attention(step: Step) -> PagedAttention:
    heads, head_dim = step.query.shape[1:]
    kv_heads, n = step.key.shape[1], len(step.batch.query_len)
    return TritonAttention(
        max_sequences=n, heads=heads, kv_heads=kv_heads, head_dim=head_dim, device=DEVICE, programs=16
    )


BACKENDS: list[Callable[[Step], PagedAttention]] = [lambda step: TorchAttention(), triton_attention]
MIXED: list[tuple[int, int]] = [(1, 1), (300, 1), (31, 1), (40, 17), (5, 5)]
DECODES: list[tuple[int, int]] = [(1, 1), (600, 1), (31, 1), (64, 1), (65, 1)]


def check_attention(
    attention: PagedAttention, step: Step, rotary: Rotary, repeat: int = 1, atol: float = 2e-5
) -> None:
    """The same output and the same cache as from rotated queries and keys."""

    def run(query: torch.Tensor, key: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, LayerCache]:
        cache = LayerCache(step.cache.key.clone(), step.cache.value.clone())
        out = attention(
            query, key, step.value, cache, step.batch, scale=step.scale, window=step.window, rotary=rotary
        )
        return out, cache

    wanted, wanted_cache = run(*rotary.apply(step.query, step.key), None)
    real = ~step.expected.isnan()  # of padded entries, which share a slot, any may come last
    for _ in range(repeat):
        got, cache = run(step.query, step.key, rotary)
        torch.testing.assert_close(got[real], wanted[real], atol=atol, rtol=0)
        # Block 0 is scratch.
        torch.testing.assert_close(cache.key[1:], wanted_cache.key[1:], atol=atol, rtol=0, equal_nan=True)
        torch.testing.assert_close(cache.value[1:], wanted_cache.value[1:], atol=0, rtol=0, equal_nan=True)
    assert not torch.allclose(run(step.query, step.key, None)[0][real], wanted[real], atol=1e-2)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("sequences", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "triton"])
def test_attention_of_what_is_rotated(
    backend: Callable[[Step], PagedAttention], sequences: list[tuple[int, int]], norms: bool
) -> None:
    decodes = sum(new == 1 for _, new in sequences)
    step = random_step(sequences, num_decodes=decodes, padded=1, device=DEVICE)
    rotary = random_rotary(len(step.query), step.query.shape[2], norms=norms, dtype=torch.float32)
    check_attention(backend(step), step, rotary)


@pytest.mark.parametrize("most", [triton_backend.MAX_FRESH, len(DECODES) + 1])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"), [(7, 1, 80, None), (3, 3, 16, 20), (16, 2, 96, 40)]
)
def test_decodes_that_write_their_keys_themselves_or_do_not(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, head_dim: int, window: int | None, most: int
) -> None:
    monkeypatch.setattr(triton_backend, "MAX_FRESH", most)  # there are two padded ones, too
    step = random_step(
        DECODES,
        num_decodes=len(DECODES),
        padded=2,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        device=DEVICE,
    )
    rotary = random_rotary(len(step.query), head_dim, norms=True, dtype=torch.float32)
    check_attention(triton_attention(step), step, rotary)


def test_scattered_cosines_are_refused() -> None:
    step = random_step([(3, 1)], num_decodes=1, device=DEVICE)
    rotary = random_rotary(2, 16, norms=False, dtype=torch.float32)
    rotary = rotary._replace(cos=rotary.cos.mT.contiguous().mT)
    with pytest.raises(ValueError, match="rotary"):
        BACKENDS[1](step)(step.query, step.key, step.value, step.cache, step.batch, scale=1.0, rotary=rotary)


# Compiled


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_compiled_head_dims(head_dim: int, norms: bool, dtype: torch.dtype) -> None:
    cos_dtype = torch.float32 if norms else dtype
    for tokens in (1, 700):
        check_kernel(
            random_case(
                tokens,
                heads=32,
                kv_heads=8,
                head_dim=head_dim,
                norms=norms,
                dtype=dtype,
                cos_dtype=cos_dtype,
                block_size=16,
            )
        )


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (14, 2), (71, 1), (16, 16)])
def test_compiled_layouts(heads: int, kv_heads: int, norms: bool) -> None:
    check_kernel(random_case(300, heads=heads, kv_heads=kv_heads, norms=norms, dtype=torch.bfloat16))


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("most", [triton_backend.MAX_FRESH, 0])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (8, 4, 256), (14, 2, 64)]
)
def test_compiled_decodes_see_what_has_just_been_written(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, head_dim: int, window: int | None, most: int
) -> None:
    """By themselves, or by the kernel before them, which they do not let end before they start."""
    monkeypatch.setattr(triton_backend, "MAX_FRESH", most)
    step = random_step(
        [(1, 1), (2, 1), (64, 1), (65, 1), (500, 1), (3000, 1), (9000, 1)] * 4,
        num_decodes=28,
        padded=4,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    rotary = random_rotary(len(step.query), head_dim, norms=kv_heads == 8, dtype=torch.bfloat16)
    check_attention(triton_attention(step), step, rotary, repeat=100, atol=4e-2)
