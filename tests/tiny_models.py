"""Tiny random models of every supported architecture, with outputs that vary, and what they must say.

Weights are drawn wide, so that each token depends on all that the model may see: a wrong position,
page or window changes the text.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 160
WINDOW = 9
"""Of the layers with a sliding window: less than the test prompts have."""
MARGIN = 1e-3
"""Least lead of a reference token over the second best: rounding can't close it."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MIXED_WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "qwen2": _MIXED_WINDOWS | {"use_sliding_window": True},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": _MIXED_WINDOWS
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 24},
    "gemma3_text": _MIXED_WINDOWS
    | {
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {"sliding_window": WINDOW},
    "olmo2": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "mixtral": _EXPERTS | {"num_local_experts": 4, "sliding_window": WINDOW},
    "qwen3_moe": _EXPERTS | {"num_experts": 6, "norm_topk_prob": True},
}
ARCHITECTURES = list(_SPECIFIC)
"""As transformers' `model_type`."""


def tiny_config(architecture: str) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[architecture](**_COMMON | _SPECIFIC[architecture])
    return config


@functools.cache
def tiny_model(architecture: str) -> tuple[PreTrainedModel, Path]:
    """The model in float32, and the directory where it is saved (until this process ends)."""
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        model: PreTrainedModel = auto.from_config(
            tiny_config(architecture),
            dtype=torch.float32,
            attn_implementation="eager",  # SDPA leaves out the soft cap of Gemma 2 in some versions
        )
    model.train(False)
    directory = Path(tempfile.mkdtemp(prefix=f"tiny-{architecture}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    model.save_pretrained(directory)
    return model, directory


def reference_greedy(model: PreTrainedModel, prompt: list[int], n: int) -> list[int]:
    """The `n` tokens that `transformers.generate` appends to `prompt`."""
    return _generate(model, prompt, n)[0]


def _generate(model: PreTrainedModel, prompt: list[int], n: int) -> tuple[list[int], float]:
    """The tokens, and the least lead of any of them."""
    generator: Any = model
    output = generator.generate(
        torch.tensor([prompt]),
        max_new_tokens=n,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.logits)[:, 0].topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


@functools.cache
def reference_texts(architecture: str, lengths: tuple[int, ...], n: int) -> list[tuple[list[int], list[int]]]:
    """For each length a random prompt and its `n` greedy tokens, each ahead of the others by `MARGIN`."""
    model, _ = tiny_model(architecture)
    generator = torch.Generator().manual_seed(2)
    texts = []
    for length in lengths:
        margin = 0.0
        while margin < MARGIN:
            prompt: list[int] = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
            tokens, margin = _generate(model, prompt, n)
        texts.append((prompt, tokens))
    return texts


def save_weights(directory: Path) -> None:
    """Make a checkpoint without weights, of whatever vocabulary, one of a tiny random Llama in float32."""
    config = AutoConfig.from_pretrained(directory)
    for name, value in _COMMON.items():
        if name not in ("vocab_size", "max_position_embeddings"):
            setattr(config, name, value)
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        auto.from_config(config, dtype=torch.float32).save_pretrained(directory)
