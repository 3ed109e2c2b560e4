"""Attention modules whose norms, rotary embedding and cache write are left to the attention backend.

Nothing here names an architecture: which modules of a model compute what `FusedAttention` computes is
found by trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from engine.attention.rotary import Rotary
from engine.fusion import Slice, close
from engine.probe import LayerSpec
from engine.projection import project

TOKENS = 8
MAGNITUDES = (0.01, 1.0, 100.0)
"""Of the inputs tried: small ones would show another epsilon, large ones that a model clips."""


class _Pages(Protocol):
    """What a forward hands to its attention modules, as the keyword argument `pages`."""

    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor: ...


class FusedAttention(nn.Module):
    """Takes the place of an attention module of transformers, and is called like one."""

    def __init__(
        self,
        layer_idx: int,
        layer: LayerSpec,
        projection: nn.Linear | Slice,
        o_proj: nn.Module,
        query_norm: nn.Parameter | None = None,
        key_norm: nn.Parameter | None = None,
        eps: float = 0.0,
    ) -> None:
        """`projection`: its weight and bias are those of queries, keys and values, in this order."""
        super().__init__()
        self.layer_idx = layer_idx
        self.heads = [layer.heads, layer.kv_heads, layer.kv_heads]
        self.head_dim = layer.head_dim
        self.weight = projection.weight
        self.bias: nn.Parameter | None = projection.bias
        self.o_proj = o_proj
        self.query_norm, self.key_norm, self.eps = query_norm, key_norm, eps

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *,
        pages: _Pages,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, n], cosines and sines [1, T, head_dim] -> [1, T, n]."""
        if self.bias is None:
            states = project(hidden_states, self.weight, None, 0.0, False)[0]
        else:
            states = linear(hidden_states[0], self.weight, self.bias)
        states = states.view(-1, sum(self.heads), self.head_dim)
        query, key, value = torch.split(states, self.heads, dim=1)
        rotary = Rotary(*position_embeddings, self.query_norm, self.key_norm, self.eps)
        out = pages.attend(self.layer_idx, query, key, value, rotary)
        out = out.flatten(1)[None]
        if type(self.o_proj) is nn.Linear and getattr(self.o_proj, "bias", None) is None:
            return project(out, self.o_proj.weight, None, 0.0, False), None
        return self.o_proj(out), None


@torch.no_grad()
def fuse_attention(model: PreTrainedModel, layers: Sequence[LayerSpec]) -> int:
    """Replace, in place, the attention modules that compute what `FusedAttention` does; returns how many.

    `layers` are those of `find_layers`. The projections are to be joined before. Runs the model once,
    to see how its attention is called.
    """
    candidates = {module: fused for module in model.modules() if (fused := _candidate(module, layers))}
    calls: dict[nn.Module, dict[str, Any]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args:
            calls[module] = kwargs

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in candidates]
    tokens = torch.arange(TOKENS, device=model.device)
    try:
        ids = (tokens * 7919 + 1) % model.config.get_text_config().vocab_size
        model(input_ids=ids[None], position_ids=3 * tokens[None] + 1, use_cache=False, pages=_Recorder())
    finally:
        for hook in hooks:
            hook.remove()
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused, call = candidates.get(child), calls.get(child)
            if fused is not None and call is not None and _same(child, fused, call):
                setattr(parent, name, fused)
                replaced += 1
    return replaced


def _candidate(module: nn.Module, layers: Sequence[LayerSpec]) -> FusedAttention | None:
    """What might take the place of `module`, by the look of it."""
    index: Any = getattr(module, "layer_idx", None)
    projection: Any = getattr(module, "qkv_proj", getattr(module, "q_proj", None))
    o_proj: Any = getattr(module, "o_proj", None)
    if not isinstance(index, int) or type(projection) not in (Slice, nn.Linear) or o_proj is None:
        return None
    layer = layers[index]
    if layer.head_dim % 2 or len(projection.weight) != (layer.heads + 2 * layer.kv_heads) * layer.head_dim:
        return None
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if norms == [None, None]:
        return FusedAttention(index, layer, projection, o_proj)
    weights: list[Any] = [getattr(norm, "weight", None) for norm in norms]
    epsilons: list[Any] = [getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms]
    if any(w is None or w.shape != (layer.head_dim,) or w.dtype != projection.weight.dtype for w in weights):
        return None
    if epsilons[0] is None or epsilons[0] != epsilons[1]:
        return None
    return FusedAttention(index, layer, projection, o_proj, weights[0], weights[1], epsilons[0])


class _Recorder:
    """Stands for pages: keeps what would reach attention, and answers as if each token saw only itself."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        if rotary is not None:
            query, key = rotary.apply(query, key)
        self.seen = [query, key, value]
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def _same(module: nn.Module, fused: FusedAttention, call: dict[str, Any]) -> bool:
    """Whether both hand the same to attention, and make the same of what it returns."""
    hidden, embeddings = call.get("hidden_states"), call.get("position_embeddings")
    if hidden is None or not isinstance(embeddings, tuple):
        return False
    if any(part.shape != (*hidden.shape[:2], fused.head_dim) for part in embeddings):
        return False  # of a part of each head, if at all
    generator = torch.Generator().manual_seed(0)
    norms = [norm for norm in (fused.query_norm, fused.key_norm) if norm is not None]
    kept = [norm.detach().clone() for norm in norms]
    for norm in norms:  # Drawn or fresh weights may all be 1, which says nothing.
        norm.copy_(torch.rand(norm.shape, generator=generator) + 0.5)
    try:
        for magnitude in MAGNITUDES:
            x = (magnitude * torch.randn(hidden.shape, generator=generator)).to(hidden)
            wanted, got = (_outcome(each, call | {"hidden_states": x}) for each in (module, fused))
            if not all(map(close, got, wanted)):
                return False
    finally:
        for norm, weight in zip(norms, kept, strict=True):
            norm.copy_(weight)
    return True


def _outcome(module: nn.Module, call: dict[str, Any]) -> list[torch.Tensor]:
    """[query, key, value, output]"""
    recorder = _Recorder()
    output: torch.Tensor = module(**call | {"pages": recorder})[0]
    return [*recorder.seen, output]
