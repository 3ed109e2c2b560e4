"""What is measured: shapes of models, workloads and their prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
    },
    "0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
}


@dataclass(frozen=True)
class Workload:
    name: str
    shape: str
    requests: int
    prompt: int
    output: int


WORKLOADS = {
    w.name: w
    for w in (
        Workload("8b-b32", "8b", 32, 256, 512),
        Workload("8b-long", "8b", 32, 256, 8192),
        Workload("8b-b256", "8b", 256, 512, 256),
        Workload("8b-prefill", "8b", 256, 512, 1),
        Workload("0.6b-b32", "0.6b", 32, 256, 512),
        Workload("0.6b-b256", "0.6b", 256, 512, 256),
        Workload("tiny", "tiny", 8, 32, 64),
    )
}


def why_not(shapes: Iterable[str]) -> str:
    """Why models of these shapes are not to be made on this machine; empty if they may be."""
    import torch  # which others here, that need no device, do without

    if "8b" in shapes and not torch.cuda.is_available():
        return "there is no GPU, and the 8b shape would fill this machine's memory"
    return ""


def save_config(shape: str, directory: Path, context: int) -> str:
    values = dict(SHAPES[shape], max_position_embeddings=context, eos_token_id=None, bos_token_id=None)
    config = transformers.CONFIG_MAPPING[values.pop("model_type")](**values)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]  # type: ignore[attr-defined]
    config.save_pretrained(directory)
    return str(directory)


def save_tokenizer(shape: str, directory: Path) -> None:
    """One for random weights: every token is a blank and a word, so that each is seen in a stream."""
    letters = sorted(set(bytes_to_unicode().values()))  # type: ignore[no-untyped-call]
    words = [f"Ġw{i}" for i in range(SHAPES[shape]["vocab_size"] - len(letters))]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(letters + words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wrapped: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    wrapped.save_pretrained(directory)


def random_prompts(workload: Workload, seed: int) -> list[list[int]]:
    vocabulary = SHAPES[workload.shape]["vocab_size"]
    rng = np.random.default_rng(seed)
    return rng.integers(1, vocabulary, (workload.requests, workload.prompt)).tolist()  # type: ignore[no-any-return]


def chat_prompts(directory: str, n: int, first: int = 0) -> list[list[int]]:
    """Prompts `first` to `first + n` of an endless series of questions."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    questions = [
        f"What is {i} times {i + 1}?" if i > 1 else "What is the capital of France?"
        for i in range(first + 1, first + n + 1)
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
