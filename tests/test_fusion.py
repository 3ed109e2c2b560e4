"""Fused projections and norms compute what the unmodified model computes, in fewer calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoModelForCausalLM

from engine import fused_mlp, fusion, norm
from engine.projection import project
from tests.tiny_models import ARCHITECTURES, tiny_config

JOINED = {
    "phi3": 0,  # its projections are joined already
    "gpt_neox": 0,
    "mixtral": 4,  # its experts have matrices of their own
    "qwen3_moe": 4,
}


def model_of(architecture: str, width: int = 64) -> Any:
    torch.manual_seed(0)
    config = tiny_config(architecture)
    config.hidden_size = width
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config).eval()


def logits_of(model: Any, compiled: Any = None) -> torch.Tensor:
    ids = torch.arange(24)[None] * 7 % 150
    with torch.inference_mode():
        output: torch.Tensor = (model if compiled is None else compiled)(
            input_ids=ids, use_cache=False
        ).logits
    return output


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_joined_projections_change_nothing(architecture: str) -> None:
    model = model_of(architecture)
    before = logits_of(model)
    assert fusion.fuse_projections(model) == JOINED.get(architecture, 8)
    assert torch.allclose(logits_of(model), before, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_norms_are_replaced_only_where_the_formula_is_the_same(architecture: str) -> None:
    model = model_of(architecture, width=fusion.MIN_NORM)
    before = logits_of(model)
    replaced = fusion.fuse_norms(model)
    # Gemma scales by 1 + weight, GPT-NeoX subtracts the mean: both must stay.
    assert (replaced > 0) == (architecture not in ("gemma2", "gemma3_text", "gpt_neox"))
    assert torch.allclose(logits_of(model), before, atol=1e-4)


def test_a_norm_with_another_formula_is_left_alone() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(fusion.MIN_NORM)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight / (x.abs().mean(-1, keepdim=True) + self.eps)

    assert fusion.fuse_norms(nn.Sequential(Norm())) == 0


@pytest.mark.parametrize(
    "formula",
    [
        lambda x, eps: x / (x.square().mean(-1, keepdim=True).sqrt() + eps),
        lambda x, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True)),
        lambda x, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp(min=eps)),
        lambda x, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 100 * eps),
        lambda x, eps: x.no_such_thing(),
    ],
)
def test_a_norm_that_differs_near_zero_is_left_alone_with_its_weight(formula: Any) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(fusion.MIN_NORM)), 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed: torch.Tensor = formula(x, self.eps) * self.weight
            return normed

    norms = nn.Sequential(Norm())
    assert fusion.fuse_norms(norms) == 0
    assert torch.equal(norms[0].weight, torch.ones(fusion.MIN_NORM))  # type: ignore[arg-type]


def test_the_pass_merges_equal_products_and_additions() -> None:
    model = model_of("llama", width=fusion.MIN_NORM)
    before = logits_of(model)
    fusion.fuse_projections(model)
    fusion.fuse_norms(model)
    counts: dict[str, int] = {}

    def compile_with_pass(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        counts["products"] = fusion.merge_equal_calls(graph.graph)
        counts["additions"] = fusion.merge_additions(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compile_with_pass), fullgraph=True)
    assert torch.allclose(logits_of(model, compiled), before, atol=1e-4)
    layers = model.config.num_hidden_layers
    assert counts == {"products": 3 * layers, "additions": 2 * layers}


def test_what_follows_the_last_attention_is_done_for_picked_rows_only() -> None:
    model = model_of("llama", width=fusion.MIN_NORM)
    rows = torch.tensor([23, 5, 11])
    before = logits_of(model)[:, rows]
    fusion.fuse_projections(model)
    fusion.fuse_norms(model)
    fused_mlp.fuse_mlps(model)
    done: list[int] = []

    def compile_with_pass(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        fusion.merge_equal_calls(graph.graph)
        fusion.merge_additions(graph.graph)
        # The norm before the last feed-forward module, its two products, and the norm after it.
        assert fusion.pick_rows_early(graph.graph) == 4
        assert fusion.pick_rows_early(graph.graph) == 0
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        values = [node.meta["val"] for node in graph.graph.nodes if "stepahead" in str(node.target)]
        done.extend((value[0] if isinstance(value, tuple) else value).shape[1] for value in values)
        graph.recompile()
        return graph

    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=aot_autograd(fw_compiler=compile_with_pass), fullgraph=True)
    ids = torch.arange(24)[None] * 7 % 150
    with torch.inference_mode():
        got = compiled(input_ids=ids, use_cache=False, logits_to_keep=rows).logits
    assert torch.allclose(got, before, atol=1e-4)
    layers = model.config.num_hidden_layers
    assert done == [24] * (4 * layers - 3) + [3] * 4


@pytest.mark.parametrize("rank", [2, 3])
def test_two_branches_that_read_the_same_and_rows_that_are_none(rank: int) -> None:
    """The choice comes before both of its readers; of a matrix, `[:, i]` picks columns, which stay."""
    x = torch.randn(1, 6, 64)[(0,) * (3 - rank)]
    weights, norm_weight = torch.randn(2, 64, 64), torch.rand(64)

    def branches(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        one, other = (project(x, w, None, 0.0, False) for w in weights)
        made: torch.Tensor = norm.add_rms_norm(one, other, norm_weight, 1e-6)[0][:, rows]
        return made

    moved: list[int] = []

    def compile_with_pass(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        moved.append(fusion.pick_rows_early(graph.graph))
        graph.graph.lint()
        graph.recompile()
        return graph

    torch._dynamo.reset()
    rows = torch.tensor([4, 0])
    compiled: Any = torch.compile(branches, backend=aot_autograd(fw_compiler=compile_with_pass))
    with torch.inference_mode():
        assert torch.allclose(compiled(x, rows), branches(x, rows), atol=1e-5)
    assert moved == [3 if rank == 3 else 0]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096), (32, 4096), (7, 1000), (2, 3, 512), (300, 8192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_kernels_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.rand(shape[-1], device="cuda", dtype=dtype) + 0.5
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5

    def close(got: torch.Tensor, value: torch.Tensor) -> bool:
        wide = value.double()
        wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        return bool((got.double() - wanted).norm() / wanted.norm() < tolerance)

    assert close(norm.rms_norm(x, weight, 1e-6), x)
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert close(normed, x + residual)
