"""Greedy tokens through pages equal `transformers.generate`; what can't be served is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from engine.config import EngineConfig
from engine.model import ModelError, PagedModel, UnsupportedModelError
from tests.paged_steps import PagedSteps, Text
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, WINDOW, reference_texts, tiny_config, tiny_model

CPU = torch.device("cpu")
LENGTHS = (29, 3, 17, 1, 40)
OUTPUT = 20

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def load(model: Path | str, **settings: Any) -> PagedModel:
    return PagedModel.load(EngineConfig(model=str(model), **settings), CPU, torch.float32)


@functools.cache
def paged(architecture: str) -> PagedModel:
    return load(tiny_model(architecture)[1])


def texts(architecture: str) -> tuple[list[list[int]], list[list[int]]]:
    prompts, outputs = zip(*reference_texts(architecture, LENGTHS, OUTPUT), strict=True)
    return list(prompts), list(outputs)


# The same tokens as transformers


@every_architecture
def test_alone(architecture: str) -> None:
    for prompt, output in zip(*texts(architecture), strict=True):
        assert PagedSteps(paged(architecture)).alone(prompt, OUTPUT) == output


@every_architecture
def test_chunked_prompts(architecture: str) -> None:
    """transformers#48296: causal within a chunk and across chunks, with no mask passed."""
    for prompt, output in zip(*texts(architecture), strict=True):
        assert PagedSteps(paged(architecture)).alone(prompt, OUTPUT, chunk=7) == output


@every_architecture
def test_mixed_batch(architecture: str) -> None:
    prompts, outputs = texts(architecture)
    assert len(set(map(tuple, outputs))) == len(outputs)
    assert PagedSteps(paged(architecture)).together(prompts, OUTPUT, chunk=6) == outputs


@every_architecture
def test_logits_are_all_that_the_model_does_to_them(architecture: str) -> None:
    reference, _ = tiny_model(architecture)
    prompt, _ = reference_texts(architecture, LENGTHS, OUTPUT)[0]
    with torch.inference_mode():
        wanted = reference(input_ids=torch.tensor([prompt])).logits[:, -1]
    steps = PagedSteps(paged(architecture))
    got = steps.step([(steps.add(prompt), len(prompt))])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


# The comparison sees what it should see


@every_architecture
def test_wrong_positions_change_the_text(architecture: str) -> None:
    class Scrambled(PagedSteps):
        def position_of(self, position: int) -> int:
            return position ^ 3

    prompts, outputs = texts(architecture)
    assert Scrambled(paged(architecture)).together(prompts, OUTPUT, chunk=6) != outputs


@every_architecture
def test_a_wrong_page_changes_the_text(architecture: str) -> None:
    class Scrambled(PagedSteps):
        def pages_of(self, text: Text) -> list[int]:
            return [*text.blocks[:-2], *reversed(text.blocks[-2:])]

    prompt, output = reference_texts(architecture, LENGTHS, OUTPUT)[0]
    steps = Scrambled(paged(architecture))
    for cache in steps.caches:  # the wrong page may be read beyond what is written
        cache.key.zero_()
        cache.value.zero_()
    assert steps.alone(prompt, OUTPUT) != output


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral"])
def test_windows_matter(architecture: str) -> None:
    model = paged(architecture)
    assert WINDOW in [layer.window for layer in model.layers]
    without = [dataclasses.replace(layer, window=None) for layer in model.layers]
    prompts, outputs = texts(architecture)
    blind = PagedModel(model.model, without, model.attention, model.context_length)
    assert PagedSteps(blind).together(prompts, OUTPUT, chunk=6) != outputs


# On a GPU

CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["torch", "triton"])
@every_architecture
def test_the_same_tokens_on_a_gpu(architecture: str, attention: Literal["torch", "triton"]) -> None:
    config = EngineConfig(model=str(tiny_model(architecture)[1]), attention=attention)
    model = PagedModel.load(config, CUDA, torch.float32)
    prompts, outputs = texts(architecture)
    assert PagedSteps(model).together(prompts, OUTPUT, chunk=6) == outputs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_architecture
def test_the_host_never_waits_for_a_gpu(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PagedModel.load(EngineConfig(model=str(tiny_model(architecture)[1])), CUDA, dtype)
    forward = model.forward

    def watched(*args: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return forward(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(model, "forward", watched)
    PagedSteps(model).together(texts(architecture)[0], 4, chunk=6)


# What is found out about a model


def test_layers() -> None:
    gemma = paged("gemma2").layers
    assert [layer.window for layer in gemma] == [WINDOW, None, WINDOW, None]
    assert {(layer.heads, layer.kv_heads, layer.head_dim) for layer in gemma} == {(4, 2, 16)}
    assert {(layer.scale, layer.softcap) for layer in gemma} == {(24**-0.5, 2.0)}
    assert {layer.window for layer in paged("mistral").layers} == {WINDOW}
    assert {(layer.scale, layer.window, layer.softcap) for layer in paged("granite").layers} == {
        (0.2, None, None)
    }


def test_cache_size() -> None:
    model = paged("llama")
    caches = model.allocate_cache(5, 16)
    assert [cache.key.shape for cache in caches] == [(5, 16, 1, 16)] * 4
    held = sum(t.nbytes for cache in caches for t in (cache.key, cache.value))
    assert held == 5 * model.cache_bytes_per_block(16)


def test_end_tokens_come_from_both_configurations(tmp_path: Path) -> None:
    model, _ = tiny_model("llama")
    model.save_pretrained(tmp_path)
    for name, ids in (("config.json", 7), ("generation_config.json", [9, 8])):
        content = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(content | {"eos_token_id": ids}))
    assert load(tmp_path).eos_token_ids == (7, 8, 9)
    assert paged("llama").eos_token_ids == ()


def test_context_length() -> None:
    _, path = tiny_model("llama")
    assert load(path).context_length == 512
    assert load(path, context_length=100).context_length == 100
    with pytest.raises(ModelError, match=r"context_length: 513 is more than the 512"):
        load(path, context_length=513)


def save_config(directory: Path, model_type: str, **changes: Any) -> Path:
    """A directory with a configuration alone."""
    CONFIG_MAPPING[model_type](**changes).save_pretrained(directory)
    return directory


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
HEAD_SIZE = 16


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    save_config(tmp_path, "llama", **SMALL, max_position_embeddings=64, rope_parameters=rope)
    assert load(tmp_path, load_format="random").context_length == 256


def test_random_weights_are_drawn_in_the_dtype_and_the_same_each_time(tmp_path: Path) -> None:
    save_config(tmp_path, "llama", **SMALL)
    config = EngineConfig(model=str(tmp_path), load_format="random")
    first, second = (PagedModel.load(config, CPU, torch.bfloat16) for _ in range(2))
    weights, again = first.model.state_dict(), second.model.state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert weights["model.layers.0.mlp.up_proj.weight"].std() > 0


# Rotary embeddings that change with the length of a call


def test_dynamic_rope_stays_as_it_is_within_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = tiny_config("llama").to_dict() | {"rope_parameters": rope, "max_position_embeddings": 64}
    agrees_with_transformers(LlamaConfig(**config), tmp_path, context_length=None)


def phi_with_longrope() -> Any:
    factors = [float(i) for i in range(1, HEAD_SIZE // 2 + 1)]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors[::-1], "rope_theta": 1e4}
    config = tiny_config("phi3").to_dict() | {
        "rope_parameters": rope | {"original_max_position_embeddings": 64},
        "original_max_position_embeddings": 64,
    }
    return CONFIG_MAPPING["phi3"](**config)


def test_longrope_works_within_its_original_context(tmp_path: Path) -> None:
    agrees_with_transformers(phi_with_longrope(), tmp_path, context_length=64)


def agrees_with_transformers(config: Any, directory: Path, context_length: int | None) -> None:
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        reference = auto.from_config(config, dtype=torch.float32)
    reference.save_pretrained(directory)
    prompt = torch.randint(VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        wanted = reference(input_ids=torch.tensor([prompt])).logits[:, -1]
    steps = PagedSteps(load(directory, context_length=context_length))
    text = steps.add(prompt)
    steps.step([(text, 20)])
    got = steps.step([(text, 30)])
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("context_length", [None, 65])
def test_longrope_is_refused_beyond_it(tmp_path: Path, context_length: int | None) -> None:
    phi_with_longrope().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"longrope.* context_length of at most 64"):
        load(tmp_path, context_length=context_length, load_format="random")


# What can't be loaded


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model_type": "no-such-model"}', "[]"])
def test_a_directory_without_a_usable_configuration(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"^model: .*" + tmp_path.name):
        load(tmp_path)


@pytest.mark.parametrize("name", ["no/such/model", "no-such-owner/no-such-model", "../nowhere", "a b"])
def test_an_unknown_model(name: str) -> None:
    with pytest.raises(ModelError, match=r"^model: .*" + name):
        load(name)


def test_a_checkpoint_without_weights(tmp_path: Path) -> None:
    save_config(tmp_path, "llama", **SMALL)
    with pytest.raises(ModelError, match=r"^model: the weights of .*" + tmp_path.name):
        load(tmp_path)


def test_a_checkpoint_that_lacks_weights(tmp_path: Path) -> None:
    model, _ = tiny_model("llama")
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.2.mlp.up" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"lacks 1 weights, such as model.layers.2.mlp.up_proj.weight"):
        load(tmp_path)


def test_a_truncated_checkpoint(tmp_path: Path) -> None:
    model, _ = tiny_model("llama")
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"^model: the weights of"):
        load(tmp_path)


def test_weights_of_another_shape(tmp_path: Path) -> None:
    model, _ = tiny_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict() | {"intermediate_size": 64}))
    with pytest.raises(ModelError, match=r"^model: the weights of"):
        load(tmp_path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder-decoder": ("t5", {"d_model": 32, "d_ff": 32, "num_layers": 1}, "encoder-decoder"),
    "no language model": ("vit", {"hidden_size": 32}, "not a causal language model"),
    "encoder": ("bert", SMALL | {"is_decoder": False}, "causal"),
    "own attention": ("mpt", {"d_model": 32, "n_heads": 2, "n_layers": 1}, "attention interface"),
    "alibi": ("bloom", {"hidden_size": 32, "n_head": 2, "n_layer": 1}, "attention interface"),
    "state space": ("mamba", {"hidden_size": 32, "num_hidden_layers": 1}, "attention interface"),
    "linear attention": ("minimax", SMALL | {"num_local_experts": 2}, "linear_attention"),
    "convolution": ("lfm2", SMALL | {"full_attn_idxs": [1]}, "conv"),
    "sinks": ("gpt_oss", SMALL | {"head_dim": 16, "num_local_experts": 2}, "s_aux"),
    "chunked": ("llama4_text", SMALL | {"head_dim": 16, "intermediate_size_mlp": 32}, "chunked_attention"),
    "latent attention": (
        "deepseek_v3",
        SMALL | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
        "latent",
    ),
    "shared caches": ("gemma3n_text", SMALL | {"num_kv_shared_layers": 1}, "share keys and values"),
    "both directions": ("gemma3_text", SMALL | {"use_bidirectional_attention": True}, "causal"),
}


@pytest.mark.parametrize(("model_type", "changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str) -> None:
    save_config(tmp_path, model_type, **changes)
    with pytest.raises(UnsupportedModelError, match=r"^model: \w+ is not supported: .*" + reason):
        load(tmp_path, load_format="random", context_length=32)
