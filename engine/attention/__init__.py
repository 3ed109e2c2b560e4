"""Paged attention: the interface that every backend fulfils.

A backend writes this step's keys and values into the cache, those of all its sequences, and then attends
over it: a sequence may share blocks that another one computes in the same step, but where all are
decodes each sees but one token of the step, its own. Every path is causal: token at position p sees
positions 0..p of its own sequence, or the last `window` of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from engine.attention.rotary import Rotary


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's batch, as attention sees it. All tensors are on the device, rows contiguous."""

    cache_slots: torch.Tensor
    """int32 [T]: block * block_size + offset of each token's key and value."""
    query_start: torch.Tensor
    """int32 [S]: first token of each sequence."""
    query_len: torch.Tensor
    """int32 [S]: tokens of each sequence in this step."""
    context_len: torch.Tensor
    """int32 [S]: positions to attend to, this step's included, so the last token is at context_len - 1."""
    block_tables: torch.Tensor
    """int32 [S, B]: blocks of each sequence in order of position."""
    num_decodes: int
    """The first `num_decodes` sequences have exactly one token each, token i being sequence i."""
    num_prefills: int
    """The last `num_prefills` sequences may have any number of tokens, none included.

    The two add up to all sequences, but in a captured step that is replayed for any division of them:
    there each is the number of all, and a decode is a sequence i whose only token is token i.
    """


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache. Block 0 is scratch: padded tokens write there."""

    key: torch.Tensor
    """[num_blocks, block_size, kv_heads, head_dim]"""
    value: torch.Tensor
    """[num_blocks, block_size, kv_heads, head_dim]"""


class PagedAttention(Protocol):
    """A backend: `out = attend(query, key, value, cache, batch, scale=..., window=..., softcap=...)`."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """query [T, heads, head_dim], key and value [T, kv_heads, head_dim] -> [T, heads, head_dim].

        `heads` is a multiple of `kv_heads`; query head h reads key-value head h // (heads // kv_heads).
        `window` w: position p sees max(0, p - w + 1)..p. `softcap` c: scores become c * tanh(s / c).
        `rotary`: query and key come as projected, and are first to become `rotary.apply(query, key)`.
        """
        ...


@runtime_checkable
class PreparesBatch(Protocol):
    """A backend may also derive once per step what its layers share."""

    def prepare(self, batch: PagedBatch) -> PagedBatch:
        """Called before the first layer of a step; the result takes the place of `batch` in every layer."""
        ...


def get_backend(
    name: Literal["auto", "torch", "triton", "flashinfer"],
    device: torch.device,
    *,
    max_sequences: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> PagedAttention:
    """The backend of that name; `auto` is triton on a GPU and torch on a CPU. See `check_flashinfer`, too.

    Sized for `max_sequences` in a step; head counts and dimension are the largest of any layer.
    """
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        from engine.attention.torch_backend import TorchAttention

        return TorchAttention()
    from engine.attention.triton_backend import TritonAttention

    return TritonAttention(
        max_sequences=max_sequences,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        device=device,
        flashinfer=name == "flashinfer",
    )
