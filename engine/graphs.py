"""CUDA graphs: the kernels of a step recorded once and launched as one.

A graph reads and writes the very tensors that it was captured with, so it is named by everything
that fixes them (slot, bucket, what it computes) and replayed for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from engine.lanes import CudaLane


def buckets(max_sequences: int) -> list[int]:
    """Batch sizes to capture, up to `max_sequences`: steps in between are padded to the next.

    From 2 on: a compiled model takes a size of 1 for a constant.
    """
    sizes = [2, 4, 8, 16, 32, *range(64, max_sequences, 32)]
    return [*(size for size in sizes if size < max_sequences), max(max_sequences, 2)]


MIXED_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Sizes to capture of steps that prefill, too: but for models of 1B and less, larger ones keep a GPU busy for
longer than a launch takes, some 25 ms."""


def mixed_buckets(max_tokens: int, max_sequences: int) -> list[tuple[int, int]]:
    """(tokens, sequences) to capture steps of any mixture for, in order; like `buckets`, from 2 on.

    Few sequences or as many as there may be: logits of sequences that no step of so few tokens has would be
    computed for nothing. Their numbers are among `buckets(max_sequences)`, whose sampling serves here, too.
    """
    tokens = {max(2, min(size, max_tokens)) for size in MIXED_TOKENS}
    return sorted({(t, min(t, s, max_sequences)) for t in tokens for s in (64, max_sequences)})


def bucket_for(n: int, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes`, in order, that holds n; None if none does."""
    return next((size for size in sizes if size >= n), None)


class Graphs:
    """Graphs by name, sharing one memory pool: they run one after the other on the compute lane."""

    def __init__(self, lane: CudaLane) -> None:
        self._stream = lane.stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def capture(self, name: Hashable, work: Callable[[], None]) -> None:
        """Run `work` once to warm up, then record it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        self._graphs[name] = graph

    def replay(self, name: Hashable) -> None:
        """Launch a graph on the current stream. Raises `KeyError` if none was captured under that name."""
        self._graphs[name].replay()
