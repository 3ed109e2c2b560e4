"""Penalties in Triton against plain torch: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from engine.penalties import Penalties, PenaltyTensors

triton = pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET, which conftest sets where there is no GPU
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)

from engine.triton_penalties import penalise  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [100, 2500])
def test_penalties(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    plain = Penalties(6, vocab, torch.device("cpu"))
    plain.counts.copy_(torch.randint(0, 7, (6, vocab), generator=generator))
    params = PenaltyTensors(
        row=torch.tensor([3, 0, 5], dtype=torch.int32),
        presence=torch.tensor([0.5, 0.0, -2.0]),
        frequency=torch.tensor([0.0, 0.0, 1.25]),
        repetition=torch.tensor([1.3, 1.0, 0.5]),
    )
    logits = torch.randn(3, vocab, generator=generator).to(dtype)
    logits[0, 7] = -torch.inf
    there = PenaltyTensors(*(getattr(params, field.name).to(DEVICE) for field in fields(params)))
    got = penalise(logits.to(DEVICE), plain.counts.to(DEVICE), there)
    torch.testing.assert_close(got.cpu(), plain.apply(logits, params), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_on_a_gpu_rows_are_filled_and_counted_alike() -> None:
    from tests.test_penalties import VOCAB, history, tensors

    device = torch.device("cuda")
    there, here = (Penalties(4, VOCAB, where) for where in (device, torch.device("cpu")))
    histories = [history(1, [5, 5, 2], [6, 6, 5]), history(3, [1], [], {3: -1.0, 9: 50.0})]
    rows, tokens = torch.tensor([3, 1, 0], dtype=torch.int32), torch.tensor([9, 9, 4], dtype=torch.int32)
    logits = torch.randn(3, VOCAB).bfloat16()
    params = tensors([3, 1, 0], 0.5, 0.25, 1.5)
    for penalties, where in ((there, device), (here, torch.device("cpu"))):
        penalties.begin(histories)
        penalties.count(rows.to(where), tokens.to(where))
    moved = PenaltyTensors(*(getattr(params, field.name).to(device) for field in fields(params)))
    torch.testing.assert_close(there.apply(logits.to(device), moved).cpu(), here.apply(logits, params))
