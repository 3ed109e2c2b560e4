"""The least time that a workload can take on this device, of what the device itself was measured to do.

Two limits for a decode step: every weight and every key and value read once at the measured read
bandwidth, and the measured time of the bare matrix products in place of the weights' reading.
Prompts are limited by the rate of the same products at as many rows as a step has tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from benchmarks.workloads import Workload


class Limits(NamedTuple):
    """Milliseconds of a decode step, seconds of the whole run; None where there is no decode step."""

    limit_ms: float | None
    """Weights, keys and values of the mean context at the read bandwidth."""
    limit_matmul_ms: float | None
    """The products of a decode step as measured, keys and values at the read bandwidth."""
    limit_total_s: float
    """Prompts at the rate of their products, then decode steps at `limit_matmul_ms`."""
    matmul_ms: float
    """All products of a step of as many rows as requests, the output layer's included."""
    read_gb_per_s: float


class Widths(NamedTuple):
    """What of a model decides its limits."""

    layers: int
    hidden: int
    intermediate: int
    query: int
    """Of all heads together."""
    key: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> Widths:
        """Of a configuration of transformers with dense layers."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads * head_dim,
            config.num_key_value_heads * head_dim,
            config.vocab_size,
        )

    @property
    def products(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of one layer's products, those of one input joined, as the engine has them."""
        return [
            (self.query + 2 * self.key, self.hidden),
            (self.hidden, self.query),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    @property
    def layer_weights(self) -> int:
        return self.layers * sum(outputs * inputs for outputs, inputs in self.products)

    def cache_bytes(self, tokens: float, itemsize: int) -> float:
        return tokens * 2 * self.key * itemsize * self.layers

    def attention_flops(self, prompt: float) -> float:
        """Of a causal prompt: two products of each query with half of the positions."""
        return 2 * prompt * prompt * self.query * self.layers


def percentages(line: dict[str, Any]) -> dict[str, float]:
    """Percent of each limit that a line of results reached, where it has both."""
    pairs = {
        "percent_of_limit": ("limit_ms", "ms_per_step"),
        "percent_of_matmul_limit": ("limit_matmul_ms", "ms_per_step"),
        "percent_of_total_limit": ("limit_total_s", "total_s"),
    }
    return {
        name: 100 * line[limit] / line[taken]
        for name, (limit, taken) in pairs.items()
        if line.get(limit) and line.get(taken)
    }


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Median time of `work`, on a GPU as one CUDA graph, so that only its kernels count."""
    if device.type == "cpu":
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    once = _replay(graph)
    repeats = min(max(int(0.5 / once), 5), 1000)  # long enough for the clocks to settle
    return statistics.median(_replay(graph) for _ in range(repeats))


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that a reduction reads from memory: 8 GiB on a GPU, 128 MiB on a CPU."""
    n = 2**31 if device.type == "cuda" else 2**25
    data = torch.empty(n, dtype=torch.int32, device=device).random_()
    return data.nbytes / seconds(data.max, device)


@torch.inference_mode()
def measure_limits(
    config: Any,
    workload: Workload,
    prompt: float,
    *,
    max_tokens_per_step: int,
    bandwidth: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Limits:
    """Of a model's configuration and prompts of so many tokens in the mean; `bandwidth` in bytes per second.

    The products run on weights of every layer apart, which together no cache holds, by the library that
    torch calls. A kernel that beats it can be faster than `limit_matmul_ms`, and never than `limit_ms`.
    """
    widths = Widths.of(config)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    layers = [draw(*shape) for _ in range(widths.layers) for shape in widths.products]
    head = draw(widths.vocabulary, widths.hidden)

    def product_seconds(weights: list[torch.Tensor], rows: int) -> float:
        inputs = {width: draw(rows, width) for width in {weight.shape[1] for weight in weights}}

        def work() -> None:
            for weight in weights:
                linear(inputs[weight.shape[1]], weight)

        return seconds(work, device)

    requests, output, itemsize = workload.requests, workload.output, dtype.itemsize
    matmul = product_seconds([*layers, head], requests)
    tokens = requests * prompt
    rows = min(max_tokens_per_step, round(tokens))
    steps = tokens / rows
    a_step = product_seconds(layers, rows)
    rate = 2 * rows * widths.layer_weights / a_step
    prefill = (
        steps * (a_step + product_seconds([head], max(1, round(requests / steps))))
        + requests * widths.attention_flops(prompt) / rate
    )
    cache = widths.cache_bytes(requests * (prompt + output / 2), itemsize) / bandwidth
    weights = itemsize * (widths.layer_weights + widths.vocabulary * widths.hidden) / bandwidth
    decodes = output > 1
    return Limits(
        limit_ms=(weights + cache) * 1e3 if decodes else None,
        limit_matmul_ms=(matmul + cache) * 1e3 if decodes else None,
        limit_total_s=prefill + (output - 1) * (matmul + cache),
        matmul_ms=matmul * 1e3,
        read_gb_per_s=bandwidth / 1e9,
    )
