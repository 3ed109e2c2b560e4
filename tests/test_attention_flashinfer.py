"""Decode by FlashInfer: what it refuses, and on a GPU the same as every other backend."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from engine.attention import PagedAttention, flashinfer_decode
from engine.attention.flashinfer_decode import check_flashinfer
from engine.config import EngineConfig
from engine.model import PagedModel
from engine.probe import LayerSpec
from tests.attention_reference import Step, random_step
from tests.tiny_models import tiny_model

LAYER = LayerSpec(heads=32, kv_heads=8, head_dim=128, scale=0.1, window=None, softcap=None)
CPU = torch.device("cpu")

# What it refuses


def check(
    *layers: LayerSpec, device: torch.device = CPU, dtype: torch.dtype = torch.bfloat16, block_size: int = 16
) -> None:
    check_flashinfer(layers or [LAYER], device=device, dtype=dtype, block_size=block_size)


@pytest.mark.parametrize(
    "layer",
    [
        replace(LAYER, window=100),
        replace(LAYER, softcap=30.0),
        replace(LAYER, head_dim=512),
        replace(LAYER, head_dim=72),
        replace(LAYER, heads=136),
    ],
)
def test_a_model_of_which_it_decodes_no_layer(layer: LayerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="attention: flashinfer decodes no layer"):
        check(layer, layer)
    monkeypatch.setattr(flashinfer_decode, "version", lambda _: flashinfer_decode.OLDEST)
    with pytest.raises(ValueError, match="device"):  # one layer is enough; the others decode in Triton
        check(layer, LAYER)


def test_other_settings_that_it_does_not_go_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"dtype: .*float32"):
        check(dtype=torch.float32)
    for block_size in (8, 256):
        with pytest.raises(ValueError, match=f"block_size: .*not {block_size}"):
            check(block_size=block_size)
    monkeypatch.setattr(flashinfer_decode, "version", lambda _: flashinfer_decode.OLDEST)
    with pytest.raises(ValueError, match=r"device: .*not cpu"):
        check()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(flashinfer_decode, "version", missing)
    with pytest.raises(ValueError, match=r"attention: flashinfer is not installed .*stepahead\[flashinfer\]"):
        check()


def test_a_version_whose_splits_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_decode, "version", lambda _: "0.6.16.post4")
    with pytest.raises(ValueError, match=r"attention: flashinfer must be 0\.6\.17 or later, not 0\.6\.16"):
        check()


def test_a_model_is_loaded_only_if_it_can() -> None:
    config = EngineConfig(model=str(tiny_model("llama")[1]), attention="flashinfer")
    with pytest.raises(ValueError, match="dtype: attention by flashinfer"):
        PagedModel.load(config, CPU, torch.float32)


# On a GPU

MANY = [(1, 1), (15, 1), (16, 1), (17, 1), (255, 1), (256, 1), (257, 1), (4097, 1), (20_000, 1), (64, 1)]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def attend(step: Step, attention: PagedAttention) -> torch.Tensor:
    return attention(
        step.query,
        step.key,
        step.value,
        step.cache,
        step.batch,
        scale=step.scale,
        window=step.window,
        softcap=step.softcap,
    )


def backend(step: Step) -> PagedAttention:
    pytest.importorskip("flashinfer", reason="flashinfer is not installed")
    from engine.attention.triton_backend import TritonAttention

    return TritonAttention(
        max_sequences=step.batch.context_len.shape[0],
        heads=step.query.shape[1],
        kv_heads=step.key.shape[1],
        head_dim=step.query.shape[2],
        device=step.query.device,
        flashinfer=True,
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each call of FlashInfer decoded."""
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer is not installed")
    seen: list[int] = []
    xqa = flashinfer.xqa

    def noting(query: torch.Tensor, *args: object, **kwargs: object) -> None:
        seen.append(len(query))
        xqa(query, *args, **kwargs)

    monkeypatch.setattr(flashinfer, "xqa", noting)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (32, 8, 128, 16, torch.bfloat16),
        (16, 8, 128, 16, torch.bfloat16),
        (14, 2, 64, 64, torch.float16),
        (32, 2, 256, 32, torch.bfloat16),
        (9, 3, 96, 128, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("copies", [1, 5])
def test_like_the_reference(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    copies: int,
    calls: list[int],
) -> None:
    """Contexts that are split and, with more sequences, contexts that are not; prompts in the same step."""
    step = random_step(
        [*MANY * copies, (300, 300), (2049, 40)],
        num_decodes=len(MANY) * copies,
        padded=3,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        scale=1.5 * head_dim**-0.5,
        device="cuda",
        seed=head_dim,
    )
    step.check(attend(step, backend(step)), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert calls == [len(MANY) * copies + 3]


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "softcap"), [(700, None), (None, 30.0)])
def test_windows_and_soft_caps_stay_with_triton(
    window: int | None, softcap: float | None, calls: list[int]
) -> None:
    step = random_step(
        [*MANY, (300, 300)],
        num_decodes=len(MANY),
        heads=32,
        kv_heads=8,
        head_dim=128,
        window=window,
        softcap=softcap,
        dtype=torch.bfloat16,
        device="cuda",
    )
    step.check(attend(step, backend(step)), atol=2e-2, rtol=2e-2)
    assert not calls


def growing(lengths: list[int], seed: int) -> Step:
    return random_step(
        [(length, 1) for length in lengths],
        num_decodes=len(lengths),
        table_width=512,
        heads=32,
        kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
        seed=seed,
    )


@pytest.mark.gpu
def test_a_captured_graph_stays_right_as_lengths_grow() -> None:
    """Captured on short contexts, replayed on long ones, with nothing planned in between."""
    lengths = ([1, 2, 17, 40], [300, 1, 8000, 41], [5000, 5001, 5002, 5003])
    static = growing(lengths[2], 2)  # whose cache is the largest: the others' pages are copied into it
    attention = backend(static)

    def load(step: Step) -> None:
        for name in ("query", "key", "value"):
            getattr(static, name).copy_(getattr(step, name))
        for name in ("cache_slots", "context_len", "block_tables"):
            getattr(static.batch, name).copy_(getattr(step.batch, name))
        for mine, other in zip(
            (static.cache.key, static.cache.value), (step.cache.key, step.cache.value), strict=True
        ):
            mine.fill_(torch.nan)
            mine[: len(other)] = other

    load(growing(lengths[0], 0))
    attend(static, attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(static, attention)
    for index in (1, 2, 0, 1):
        step = growing(lengths[index], index)
        load(step)
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out.double(), step.expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_splits_race_and_agree() -> None:
    """Many launches back to back: whichever split comes last merges the same sum, and none comes after it."""
    step = growing([8000, 1, 33, 4000], 3)
    attention = backend(step)
    first = attend(step, attention)
    step.check(first, atol=2e-2, rtol=2e-2)
    outputs = [attend(step, attention) for _ in range(500)]
    assert all(torch.equal(out, first) for out in outputs)


@pytest.mark.gpu
def test_the_installed_version_is_one_that_is_taken() -> None:
    pytest.importorskip("flashinfer", reason="flashinfer is not installed")
    check(device=torch.device("cuda"))
