"""Feed-forward modules are replaced where they compute the same, and then norms become parts of products."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from engine import fusion
from engine.config import EngineConfig
from engine.fused_mlp import FusedMLP, fuse_mlps
from engine.model import PagedModel
from engine.projection import project
from tests.paged_steps import PagedSteps
from tests.test_fusion import logits_of, model_of
from tests.tiny_models import _COMMON, ARCHITECTURES

LAYERS = 4
NOT_REPLACED = ("gemma2", "gemma3_text", "gpt_neox", "mixtral", "qwen3_moe")  # other activations, experts


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_logits(architecture: str) -> None:
    model = model_of(architecture)
    before = logits_of(model)
    fusion.fuse_projections(model)
    assert fuse_mlps(model) == (0 if architecture in NOT_REPLACED else model.config.num_hidden_layers)
    assert torch.allclose(logits_of(model), before, atol=1e-5)


def test_another_activation_stays() -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["llama"](**_COMMON | {"hidden_act": "gelu"})
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    fusion.fuse_projections(model)
    assert fuse_mlps(model) == 0


def test_norms_between_projections_become_parts_of_them() -> None:
    model = model_of("llama", width=fusion.MIN_NORM)
    model.model.layers[-1].mlp.down_proj = torch.nn.Linear(model.config.intermediate_size, fusion.MIN_NORM)
    before = logits_of(model)
    fusion.fuse_projections(model)
    fusion.fuse_norms(model)
    assert fuse_mlps(model) == model.config.num_hidden_layers - 1  # the last one has a bias now
    left: Counter[str] = Counter()

    def compile_with_pass(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        fusion.FusionPass()(graph.graph)
        graph.graph.lint()
        graph.recompile()
        left.update(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compile_with_pass), fullgraph=True)
    assert torch.allclose(logits_of(model, compiled), before, atol=1e-4)
    layers = model.config.num_hidden_layers
    # Attention is not fused here, so its products are the library's, and norms before it stay.
    assert left["stepahead.project.default"] == 2 * (layers - 1)
    assert left["stepahead.add_rms_norm.default"] == 2 * layers


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_compiled_in_half_precision_on_a_gpu(architecture: str, tmp_path: Path) -> None:
    """Wide enough for the kernels of few rows, and for norms between them."""
    torch._dynamo.reset()
    width = {"hidden_size": 1024, "intermediate_size": 1536, "head_dim": 128, "num_hidden_layers": LAYERS}
    config = CONFIG_MAPPING[architecture](
        **_COMMON | width | {"num_attention_heads": 8, "num_key_value_heads": 2}
    )
    auto: Any = AutoModelForCausalLM
    config.architectures = [auto._model_mapping[type(config)].__name__]
    config.save_pretrained(tmp_path)
    settings = EngineConfig(model=str(tmp_path), load_format="random", attention="triton")

    def logits(model: PagedModel, rows: int) -> torch.Tensor:
        paged = PagedSteps(model, num_blocks=160)
        texts = [paged.add(list(range(n, n + 3 + n % 5))) for n in range(1, rows + 1)]
        paged.step([(text, len(text.tokens)) for text in texts])
        for n, text in enumerate(texts):  # where two tokens are as likely, rounding decides
            text.tokens[-1] = n
        return paged.step([(text, 1) for text in texts])

    device = torch.device("cuda")
    model = PagedModel.load(settings, device, torch.bfloat16)
    wanted = {rows: logits(model, rows) for rows in (3, 33, 70)}
    model.compile()
    assert sum(isinstance(module, FusedMLP) for module in model.model.modules()) == LAYERS
    for rows, want in wanted.items():
        got = logits(model, rows)
        # Of each text. One that follows another's tokens would be at 1.4.
        errors = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)
        assert errors.max() < 0.15


class Chain(torch.nn.Module):
    """Projections with norms between them, as a fused layer has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(rows, width) * width**-0.5) for rows in (width, 2 * width, width)
        )
        self.norms = torch.nn.ModuleList(
            fusion.FusedNorm(torch.nn.Parameter(torch.rand(width) + 0.5), 1e-6) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, gates, last = self.weights
        total = x + project(x, first, None, 0.0, False)
        gated = project(self.norms[0](total), gates, None, 0.0, True)
        total = project(gated, last, None, 0.0, False) + total
        normed = self.norms[1](total)
        return normed, project(normed, first, None, 0.0, False)  # a norm that somebody else reads too


@pytest.mark.parametrize(("width", "deferred"), [(128, 1), (96, 0)])
@pytest.mark.parametrize("rows", [5, 100])
def test_a_norm_is_deferred_where_only_projections_read_it(width: int, deferred: int, rows: int) -> None:
    torch.manual_seed(0)
    chain = Chain(width)
    x = torch.randn(1, rows, width)
    counts: list[int] = []

    def compile_with_pass(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        fusion.merge_additions(graph.graph)
        counts.append(fusion.defer_norms(graph.graph))
        graph.graph.lint()
        graph.recompile()
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(chain, backend=aot_autograd(fw_compiler=compile_with_pass), fullgraph=True)
    with torch.inference_mode():
        for got, wanted in zip(compiled(x), chain(x), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert counts == [deferred]
