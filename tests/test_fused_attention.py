"""Attention modules are replaced where, and only where, the replacement computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from engine.config import EngineConfig
from engine.fused_attention import FusedAttention, fuse_attention
from engine.fusion import fuse_projections
from engine.model import IMPLEMENTATION, PagedModel
from engine.probe import find_layers
from tests.paged_steps import PagedSteps
from tests.tiny_models import _COMMON, ARCHITECTURES, reference_texts, tiny_model

CPU = torch.device("cpu")
LENGTHS = (29, 3, 17, 1, 40)
OUTPUT = 8
REPLACED = {
    "gemma3_text": 0,  # its norms scale by 1 + weight
    "olmo2": 0,  # its norms are of all heads together
    "gpt_neox": 0,  # rotates a part of each head
    "smollm3": 3,  # its last layer knows no positions
}
USUAL = 4
COMPILED = ["llama", "qwen2", "qwen3", "mistral"]

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def load(
    architecture: str,
    attention: Any = "torch",
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> PagedModel:
    config = EngineConfig(model=str(tiny_model(architecture)[1]), attention=attention)
    return PagedModel.load(config, device, dtype)


def fused(architecture: str, attention: Any = "torch") -> PagedModel:
    model = load(architecture, attention)
    fuse_projections(model.model)
    assert fuse_attention(model.model, model.layers) == REPLACED.get(architecture, USUAL)
    return model


def texts(architecture: str) -> tuple[list[list[int]], list[list[int]]]:
    prompts, outputs = zip(*reference_texts(architecture, LENGTHS, OUTPUT), strict=True)
    return list(prompts), list(outputs)


@every_architecture
def test_the_same_tokens(architecture: str) -> None:
    model = fused(architecture)
    replaced = [module for module in model.model.modules() if isinstance(module, FusedAttention)]
    assert len(replaced) == REPLACED.get(architecture, USUAL)
    prompts, outputs = texts(architecture)
    assert PagedSteps(model).together(prompts, OUTPUT, chunk=6) == outputs


PROMPTS = {"a": 18, "b": 3, "c": 7, "d": 7, "e": 10, "f": 5, "g": 4}
"""Tokens of the prompts of seven texts."""
WORK = [
    {"a": 18, "b": 3, "c": 7},
    {"a": 1, "b": 1, "c": 1, "d": 7, "e": 8, "f": 2},
    {"a": 1, "b": 1, "c": 1, "d": 1, "e": 2, "f": 3, "g": 4},
    {"a": 1, "b": 1, "c": 1, "d": 1},
]
"""Tokens computed in each step: prompts, decodes beside them, decodes alone. No two sizes of a step are the
same, except in the last."""


def logits_of(model: PagedModel) -> list[torch.Tensor]:
    paged = PagedSteps(model, block_size=4)
    texts = {name: paged.add(list(range(n, 2 * n))) for name, n in PROMPTS.items()}
    return [paged.step([(texts[name], n) for name, n in work.items()]) for work in WORK]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", COMPILED)
def test_few_compilations_serve_all_sizes(architecture: str) -> None:
    """With the kernel, and the logits that the unmodified model gives."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is not set")
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = fused(architecture, "triton")
    model._call = torch.compile(model.model, backend=keep, fullgraph=True, dynamic=True)
    logits = logits_of(model)
    assert len(graphs) <= 2  # decodes alone have as many tokens as sequences
    for graph in graphs:
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert sum("paged_attention" in name for name in called) == USUAL
        assert not any("neg" in name for name in called)  # as in rotations
    for got, wanted in zip(logits, logits_of(load(architecture)), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_architecture
def test_the_trial_is_right_in_half_precision_too(architecture: str, dtype: torch.dtype) -> None:
    model = load(architecture, dtype=dtype)
    fuse_projections(model.model)
    assert fuse_attention(model.model, model.layers) == REPLACED.get(architecture, USUAL)


# What must stay as it is


def replaced_of(architecture: str, **changes: Any) -> int:
    """Attention modules replaced in a small model of two layers."""
    config = CONFIG_MAPPING[architecture](**_COMMON | {"num_hidden_layers": 2} | changes)
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation=IMPLEMENTATION)
    model.train(False).requires_grad_(False)
    fuse_projections(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    replaced = fuse_attention(model, find_layers(model))
    after = model.state_dict()
    kept = [name for name in before if name in after]  # a replaced module has other names
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)
    return replaced


def test_clipped_projections_stay() -> None:
    """Even where the clip is far above what the model's own inputs reach."""
    assert replaced_of("olmo") == 2
    assert replaced_of("olmo", clip_qkv=60.0) == 0


def test_rotation_of_pairs_stays() -> None:
    assert replaced_of("cohere") == 0
    assert replaced_of("glm", partial_rotary_factor=1.0) == 0


def test_rotation_of_a_part_stays() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert replaced_of("phi3", rope_parameters=rope) == 0
    assert replaced_of("phi3") == 2


def test_norms_after_the_rotation_stay() -> None:
    assert replaced_of("hunyuan_v1_dense") == 0


def test_norm_weights_are_the_same_after_the_trial() -> None:
    model = load("qwen3")
    before = model.model.model.layers[0].self_attn.q_norm.weight.clone()
    fuse_projections(model.model)
    assert fuse_attention(model.model, model.layers) == USUAL
    attention = model.model.model.layers[0].self_attn
    assert isinstance(attention, FusedAttention)
    assert attention.query_norm is not None
    assert torch.equal(attention.query_norm, before)


def test_projections_that_are_apart_stay() -> None:
    model = load("llama")
    assert fuse_attention(model.model, model.layers) == 0


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", COMPILED)
def test_compiled_on_a_gpu(architecture: str) -> None:
    torch._dynamo.reset()
    device = torch.device("cuda")
    model = load(architecture, "triton", device)
    wanted = logits_of(model)
    model.compile()
    assert sum(isinstance(module, FusedAttention) for module in model.model.modules()) == USUAL
    for got, want in zip(logits_of(model), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_half_precision_on_a_gpu(architecture: str) -> None:
    """As far from float32 as the unfused model is, and no further."""
    torch._dynamo.reset()
    device = torch.device("cuda")

    def prompts_of(model: PagedModel) -> torch.Tensor:
        paged = PagedSteps(model)
        return paged.step([(paged.add(list(range(n, 2 * n))), n) for n in PROMPTS.values()])

    exact = prompts_of(load(architecture, "triton", device))
    model = load(architecture, "triton", device, torch.bfloat16)
    unfused = prompts_of(model)
    model.compile()
    assert (prompts_of(model) - exact).norm() < 1.5 * (unfused - exact).norm()
