"""Whether a model fits on a GPU, and how many requests beside it: the engine's memory model, ahead of time.

The engine measures at its start (`engine.device.choose_num_blocks`): of `memory_fraction` of the GPU, what
the weights, the largest step and the captured graphs leave is the cache. Here the two measured terms are
estimated from the model's shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.shape import ModelShape
from engine.config import EngineConfig

GIB = 2**30

GPUS = {
    "T4": 15360,
    "L4": 23034,
    "A10G": 23028,
    "L40S": 46068,
    "A100-40GB": 40960,
    "A100-80GB": 81920,
    "H100": 81559,
    "H200": 143771,
    "B200": 183359,
}
"""MiB of memory, as `nvidia-smi --query-gpu=memory.total` says."""

RUNTIME = int(1.25 * GIB)
"""Bytes that CUDA, its libraries and their workspaces take, and what CUDA sees less than nvidia-smi."""
CAPTURED = 2048
"""Tokens of the largest step that prefills and is captured: the last of `engine.graphs.MIXED_TOKENS`."""
SAMPLING = 8
"""Bytes per logit where requests have penalties: a copy in float32, and counts in int32."""

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Budget:
    """Where a GPU's memory goes, in bytes."""

    usable: int
    """What `memory_fraction` lets the engine use."""
    weights: int
    runtime: int
    step: int
    """The largest step that may be planned."""
    graphs: int
    """What captured steps keep."""
    block: int
    """One block of the cache, in all layers."""
    block_size: int
    """Tokens of one block."""
    max_requests: int

    @property
    def cache(self) -> int:
        """What is left for the cache; negative where nothing is."""
        return self.usable - self.weights - self.runtime - self.step - self.graphs

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds; one block is scratch."""
        return max(self.cache // self.block - 1, 0) * self.block_size

    def requests(self, context: int) -> int:
        """Requests of `context` tokens each, prompt and answer, that run at once."""
        blocks = -(-context // self.block_size)
        return min(self.tokens // (blocks * self.block_size), self.max_requests)


def itemsize(shape: ModelShape, engine: EngineConfig) -> int:
    """Bytes of one weight and of one number in the cache, on a GPU."""
    return shape.stored_bytes if engine.dtype == "auto" else _ITEMSIZE[engine.dtype]


def context_of(shape: ModelShape, engine: EngineConfig) -> int:
    """Tokens that one request may hold. Raises `ValueError` where nothing says."""
    context = engine.context_length or shape.context
    if context is None:
        raise ValueError("engine.context_length: must be set, since the model names no limit")
    return context


def budget(shape: ModelShape, engine: EngineConfig, gpu_bytes: int) -> Budget:
    """How the engine will divide a GPU of `gpu_bytes`."""
    size = itemsize(shape, engine)
    rows = engine.max_running_requests
    captured = max(rows, min(CAPTURED, engine.max_tokens_per_step))
    logits = rows * shape.vocab * size  # beside what graphs reuse for one another
    return Budget(
        usable=int(gpu_bytes * engine.memory_fraction),
        weights=shape.parameters * size,
        runtime=RUNTIME + engine.depth * _tables(shape, engine),
        step=step_bytes(shape, engine.max_tokens_per_step, rows, size),
        graphs=step_bytes(shape, captured, rows, size) + logits if engine.cuda_graphs else 0,
        block=shape.cache_bytes(engine.block_size, size),
        block_size=engine.block_size,
        max_requests=rows,
    )


def step_bytes(shape: ModelShape, tokens: int, sequences: int, size: int) -> int:
    """Most that a step of `tokens` tokens needs at one time beside weights and cache."""
    residual = 2 * shape.hidden  # what goes round the layer, and what goes in
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = tokens * (residual + max(attention, 3 * shape.feed_forward)) * size
    logits = sequences * shape.vocab
    return max(layer, logits * (size + SAMPLING))


def check(shape: ModelShape, engine: EngineConfig, gpu: str) -> Budget:
    """The budget, if the engine can start on that GPU and serve a request of full length.

    Raises `ValueError`, which says what does not fit and which settings would help.
    """
    found = budget(shape, engine, GPUS[gpu] * 2**20)
    parts = (
        f"engine.memory_fraction {engine.memory_fraction} of {gpu} is {found.usable / GIB:.1f} GiB: "
        f"weights {found.weights / GIB:.1f}, CUDA {found.runtime / GIB:.1f}, "
        f"largest step {found.step / GIB:.1f}, graphs {found.graphs / GIB:.1f}"
    )
    if found.cache < 2 * found.block:
        raise ValueError(
            f"the model leaves no room for a cache; {parts} GiB. A larger GPU, or a smaller "
            "engine.max_tokens_per_step and engine.max_running_requests, would help"
        )
    context = context_of(shape, engine)
    if not found.requests(context):
        raise ValueError(
            f"the cache holds {found.tokens:,} tokens, less than one request of {context:,}; {parts} GiB. "
            f"Set engine.context_length to {found.tokens} or less, or use a larger GPU"
        )
    if engine.num_blocks is not None and engine.num_blocks * found.block > found.cache:
        raise ValueError(
            f"engine.num_blocks: {engine.num_blocks} blocks take {engine.num_blocks * found.block / GIB:.1f} "
            f"GiB, and {found.cache / GIB:.1f} are left; {parts} GiB"
        )
    return found


def _tables(shape: ModelShape, engine: EngineConfig) -> int:
    """Block tables of one slot, int32."""
    return 4 * engine.max_running_requests * -(-context_of(shape, engine) // engine.block_size)
