"""What fits on a GPU: the estimate against the engine's own arithmetic, and against what it measured."""

from __future__ import annotations

import functools
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.workloads import SHAPES
from cluster.memory import CAPTURED, GPUS, SAMPLING, budget, check
from cluster.shape import DEMO, ModelShape, ShapeError, read_shape, shape_of
from cluster.sizing import table
from deployments import demo_model
from engine.config import EngineConfig
from engine.graphs import MIXED_TOKENS
from engine.penalties import PenaltyTensors
from engine.probe import find_layers
from engine.sampler import SamplingTensors
from tests.tiny_models import ARCHITECTURES, tiny_config

ROOT = Path(__file__).parents[1]
MODELS = Path(__file__).parent / "shapes"
PUBLISHED = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-32B": 32_762_123_264,
}
"""Parameters, as the checkpoints' own metadata has them."""


@functools.cache
def shape(name: str) -> ModelShape:
    return read_shape(str(MODELS / name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_checkpoint(name: str) -> None:
    assert shape(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_and_cache_are_those_of_the_engine(architecture: str) -> None:
    config = tiny_config(architecture)
    found = shape_of(config)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    layers = find_layers(model.eval())
    assert found.cache_bytes(16, 4) == 2 * 16 * 4 * sum(layer.kv_heads * layer.head_dim for layer in layers)


@pytest.mark.slow
def test_the_demo_is_what_it_is_taken_for() -> None:
    assert read_shape(demo_model.resolve("demo")) == DEMO


def measured() -> list[Any]:
    """One line for each shape and number of requests that an engine sized its cache for."""
    lines = (ROOT / "benchmarks" / "results" / "h200.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if run.get("num_blocks") and run["shape"] in SHAPES]
    return [pytest.param(run, id=f"{run['workload']}-{i}") for i, run in enumerate(runs)]


@pytest.mark.parametrize("run", measured())
def test_the_cache_is_as_large_as_on_the_gpu(run: dict[str, Any]) -> None:
    architecture: dict[str, Any] = dict(SHAPES[run["shape"]])
    context = run["prompt"] + run["output"]
    architecture["max_position_embeddings"] = context
    config = CONFIG_MAPPING[architecture.pop("model_type")](**architecture)
    engine = EngineConfig(
        dtype="bfloat16", max_running_requests=run["requests"], block_size=run["block_size"]
    )
    found = budget(shape_of(config), engine, GPUS["H200"] * 2**20)
    assert found.cache // found.block == pytest.approx(run["num_blocks"], rel=0.08)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most memory that the tensors made under it take at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: Any) -> None:
        if getattr(storage, "tracked", False):
            return
        storage.tracked = True
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def test_sampling_takes_no_more_than_it_is_given() -> None:
    """As on a GPU, with penalties, biases, every filter and noise."""
    pytest.importorskip("triton", reason="triton is not installed")
    from engine import triton_penalties, triton_sampler

    s, v = 2, 5000
    logits = torch.randn(s, v, dtype=torch.bfloat16)
    half, ints = torch.full((s,), 0.5), torch.ones(s, dtype=torch.int32)
    params = SamplingTensors(half, 40 * ints, half, half, ints, ints, ints)
    asked = PenaltyTensors(ints, half, half, half)
    gc.collect()
    with LiveBytes() as live:
        counts = torch.zeros(s, v, dtype=torch.int32)
        penalised = triton_penalties.penalise(logits, counts, asked)
        triton_sampler.sample(penalised, params, filtered=True)
    # The interpreter copies its arguments: the logits, here.
    assert SAMPLING <= live.peak / logits.numel() <= SAMPLING + 1.1 * logits.itemsize


def test_graphs_keep_what_their_largest_step_takes() -> None:
    """Of prompts, where logits are few."""
    assert MIXED_TOKENS[-1] == CAPTURED
    gpu = GPUS["H100"] * 2**20
    found = [
        budget(shape("Qwen3-8B"), EngineConfig(max_running_requests=8, max_tokens_per_step=n), gpu)
        for n in (512, 2048, 8192)
    ]
    logits = 8 * 151_936 * 2
    assert found[0].graphs - logits == found[0].step
    assert found[1].graphs - logits == found[1].step > found[0].step
    assert found[2].graphs - logits == found[1].step < found[2].step


def test_more_of_anything_leaves_less() -> None:
    plain = budget(shape("Qwen3-8B"), EngineConfig(), GPUS["H100"] * 2**20)
    assert plain.weights + plain.runtime + plain.step + plain.graphs + plain.cache == plain.usable
    for change in (
        {"max_running_requests": 1024},
        {"max_tokens_per_step": 100_000},
        {"memory_fraction": 0.8},
        {"dtype": "float32"},
    ):
        other = budget(shape("Qwen3-8B"), EngineConfig.model_validate(change), GPUS["H100"] * 2**20)
        assert other.tokens < plain.tokens, change
    without = budget(shape("Qwen3-8B"), EngineConfig(cuda_graphs=False), GPUS["H100"] * 2**20)
    assert without.tokens > plain.tokens
    assert plain.requests(100) == 256  # rows, and not memory
    assert plain.requests(10_000) == plain.tokens // 10_000
    assert plain.requests(10_001) == plain.tokens // 10_016  # whole blocks


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "said"),
    [
        ("Llama-3.1-70B", "H100", {}, "leaves no room.*weights 131.4"),
        ("Llama-3.1-8B", "L4", {}, "context_length to [0-9]+"),
        ("Llama-3.1-8B", "H100", {"num_blocks": 100_000}, "num_blocks"),
    ],
)
def test_what_does_not_fit_is_refused(model: str, gpu: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(shape(model), EngineConfig.model_validate(settings), gpu)


def test_the_advice_of_a_refusal_works() -> None:
    llama = shape("Llama-3.1-8B")
    with pytest.raises(ValueError, match="context_length to") as caught:
        check(llama, EngineConfig(), "L4")
    length = int(str(caught.value).rpartition("context_length to ")[2].split()[0])
    assert check(llama, EngineConfig(context_length=length), "L4").requests(length) == 1


def test_a_model_without_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="nowhere"):
        read_shape(str(tmp_path / "nowhere"))


def test_the_table_of_the_guide_is_what_the_command_prints() -> None:
    shapes = {"demo": DEMO} | {name: shape(name) for name in PUBLISHED}
    wanted = table(shapes, ["L4", "L40S", "H100", "H200"], [2048, 8192, 32768], {})
    assert wanted in (ROOT / "docs" / "operations.md").read_text()
