"""Projections compute what the separate calls compute, in few rows and in many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from engine import projection
from engine.norm import reference_rms_norm
from engine.projection import project, project_add

try:
    import triton

    from engine import triton_projection as kernels

    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:
    INTERPRETED = False

on_gpu = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not (on_gpu or INTERPRETED), reason="neither a GPU nor TRITON_INTERPRET=1")
DEVICE = "cuda" if on_gpu else "cpu"
DTYPE = torch.bfloat16 if on_gpu else torch.float16  # which the interpreter can multiply
EPS = 1e-5


@pytest.fixture(autouse=True)
def some_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that interpreted kernels split their work too."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "multiprocessors", lambda device: 4)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert got.shape == wanted.shape
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < tolerance, f"{error:.2e}"


@pytest.mark.parametrize("rows", [3, 200])
def test_a_projection_between_norms_equals_the_separate_calls(rows: int) -> None:
    x, residual = drawn(1, rows, 96, seed=0), drawn(1, rows, 128, seed=1)
    first, gates = drawn(128, 96, seed=2, scale=0.1), drawn(64, 128, seed=3, scale=0.1)
    norm = drawn(128, seed=4).abs()
    normed, total, squares = project_add(x, first, residual, norm, EPS)
    wanted_total = linear(x, first) + residual
    wanted_normed = reference_rms_norm(wanted_total, norm, EPS)
    close(total, wanted_total, 1e-5)
    close(project(normed, gates, squares, EPS, False), linear(wanted_normed, gates), 1e-5)
    gate, up = linear(wanted_normed, gates).chunk(2, -1)
    close(project(normed, gates, squares, EPS, True), silu(gate) * up, 1e-5)


SHAPES = [  # rows, inputs, outputs: of one split, of several, of a wide tile
    (1, 128, 128),
    (7, 256, 64),
    (33, 2048, 128),
    (64, 512, 256),
]


@needs_triton
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_kernels_equal_the_reference(rows: int, inputs: int, outputs: int) -> None:
    dtype, tolerance = DTYPE, 6e-3
    x = drawn(1, rows, inputs, seed=rows, dtype=dtype)
    weight = drawn(outputs, inputs, seed=1, dtype=dtype, scale=inputs**-0.5)
    wanted = linear(x.double(), weight.double())
    close(kernels.launch(x, weight)[0], wanted, tolerance)

    residual, norm = drawn(1, rows, outputs, seed=2, dtype=dtype), drawn(outputs, seed=3, dtype=dtype)
    normed, total, squares = kernels.launch(x, weight, residual=residual, norm_weight=norm)
    close(total, wanted + residual.double(), tolerance)
    close(normed, total.double() * norm.double(), tolerance)
    close(squares, total.double().square().view(1, rows, -1, kernels.COLUMNS).sum(-1), 1e-5)

    if outputs % projection.DEPTH:
        return
    second = drawn(256, outputs, seed=4, dtype=dtype, scale=outputs**-0.5)
    factor = torch.rsqrt(total.double().square().mean(-1, keepdim=True) + EPS)
    wanted = linear(normed.double() * factor, second.double())
    close(kernels.launch(normed, second, squares=squares, eps=EPS)[0], wanted, tolerance)
    gate, up = wanted.chunk(2, -1)
    got = kernels.launch(normed, second, squares=squares, eps=EPS, gated=True)[0]
    close(got, silu(gate) * up, 2 * tolerance)


@needs_triton
def test_wide_tiles_and_splits_are_chosen_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 4)
    seen: list[tuple[int, int]] = []
    run = kernels._projection_kernel

    class Noting:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> Any:
                seen.append((kwargs["COLUMNS"], kwargs["SPLIT"]))
                return run[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(kernels, "_projection_kernel", Noting())
    for outputs, inputs in ((64 * 14, 128), (64, 1024)):
        x = drawn(5, inputs, seed=0, dtype=DTYPE)
        weight = drawn(outputs, inputs, seed=1, dtype=DTYPE, scale=inputs**-0.5)
        for _ in range(2):  # the counters of the splits are as the next launch needs them
            close(kernels.launch(x, weight)[0], linear(x.double(), weight.double()), 6e-3)
    assert seen == [(128, 1)] * 2 + [(64, 4)] * 2


@needs_triton
def test_gates() -> None:
    x = drawn(5, 2 * 300, seed=0, dtype=DTYPE)
    first, second = x.double().chunk(2, -1)
    close(kernels.gate(x), silu(first) * second, 6e-3)


@needs_triton
def test_splits_fill_the_multiprocessors_and_no_more() -> None:
    assert kernels.splits(64, 2048, 132) == 1  # enough programs
    assert kernels.splits(64, 4096, 132) == 2  # long ones: use what is left
    assert kernels.splits(16, 2048, 132) == 4
    assert kernels.splits(448, 4096, 132) == 1
    assert kernels.splits(1, 128, 132) == 1  # nothing to split


def test_float16_does_not_defer_norms() -> None:
    assert projection.can_defer_norm(128, 128, torch.bfloat16)
    assert not projection.can_defer_norm(128, 128, torch.float16)
    assert not projection.can_defer_norm(100, 128, torch.bfloat16)
