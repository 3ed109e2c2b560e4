"""The probe sees what a model does that pages can't serve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.probe import UnsupportedModelError, find_layers
from tests.tiny_models import ARCHITECTURES, tiny_config, tiny_model


@pytest.fixture
def llama() -> Any:
    return copy.deepcopy(tiny_model("llama")[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_passes(architecture: str, dtype: torch.dtype) -> None:
    """Rounding is no token mixing."""
    model: Any = copy.deepcopy(tiny_model(architecture)[0])
    assert len(find_layers(model.to(dtype))) == 4


def test_the_model_is_left_as_it_was(llama: PreTrainedModel) -> None:
    before = llama.config._attn_implementation
    find_layers(llama)
    assert llama.config._attn_implementation == before


@pytest.mark.parametrize("window", [1, 2, 8, 100, 511, 512, 600])
def test_windows_beyond_the_trial_run_are_found(window: int) -> None:
    config: Any = tiny_config("mistral")
    config.sliding_window = window
    auto: Any = AutoModelForCausalLM
    layers = find_layers(auto.from_config(config))
    # One that covers all positions that the model has is no window.
    assert {layer.window for layer in layers} == {window if window < 512 else None}


def refused(model: PreTrainedModel, reason: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"^model: LlamaForCausalLM is not supported: .*" + reason
    ):
        find_layers(model)


def test_tokens_that_meet_outside_attention(llama: Any) -> None:
    def mix(module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + 0.1 * out.roll(1, dims=1)

    llama.model.layers[1].mlp.register_forward_hook(mix)
    refused(llama, "outside attention")


def test_positions_of_its_own(llama: Any) -> None:
    def count(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"position_ids": torch.arange(args[0].shape[1])[None]}

    llama.model.rotary_emb.register_forward_pre_hook(count, with_kwargs=True)
    refused(llama, "positions are not taken from position_ids")


def test_an_attention_layer_used_twice(llama: Any) -> None:
    llama.model.layers[2].self_attn.layer_idx = 1
    refused(llama, "attention layer 1 is used more than once")


def test_a_layer_without_attention(llama: Any) -> None:
    llama.model.layers[2].self_attn.layer_idx = 5
    refused(llama, "some layer is not attention")


Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda kwargs: {"sinks": torch.zeros(4)}, "arguments unknown here: sinks"),
        (lambda kwargs: {"is_causal": False}, "not causal"),
        (lambda kwargs: {"softcap": torch.ones(())}, "not a constant"),
        (lambda kwargs: {"attention_mask": None}, "mask"),
        (lambda kwargs: {"attention_mask": kwargs["attention_mask"].float() - 1.5}, "mask"),
        (lambda kwargs: {"attention_mask": kwargs["attention_mask"] + torch.arange(8)}, "mask"),
    ],
)
def test_what_attention_is_told(llama: Any, change: Change, reason: str) -> None:
    def tell(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs | change(kwargs)

    llama.model.layers[1].self_attn.register_forward_pre_hook(tell, with_kwargs=True)
    refused(llama, reason)


def test_a_harmless_argument(llama: Any) -> None:
    def tell(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"sinks": None, "cache_position": torch.arange(8)}

    llama.model.layers[1].self_attn.register_forward_pre_hook(tell, with_kwargs=True)
    assert len(find_layers(llama)) == 4


def test_a_model_that_does_not_run(llama: Any) -> None:
    llama.lm_head = torch.nn.Linear(7, 9)
    refused(llama, "a trial run failed: RuntimeError")
