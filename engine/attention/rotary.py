"""Rotary position embedding of one layer's queries and keys, each head normed before where the model does."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotary(NamedTuple):
    """What is to happen to queries and keys before attention.

    A backend calls `apply`, or computes the same in a kernel of its own.
    """

    cos: torch.Tensor
    """[1, T, head_dim], as modelling code has it: a compiler would copy a view of it for every layer."""
    sin: torch.Tensor
    """[1, T, head_dim]"""
    query_norm: torch.Tensor | None
    """[head_dim]: weight of each head's root mean square norm; None: no norms, of keys neither"""
    key_norm: torch.Tensor | None
    """[head_dim]"""
    eps: float
    """Of both norms, added to the mean square."""

    def apply(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, heads, head_dim] each, in and out. Norms are rounded as Llama rounds them."""
        return self._rotate(self._norm(query, self.query_norm)), self._rotate(self._norm(key, self.key_norm))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return weight * wide.to(x.dtype)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        first_cos, second_cos = self.cos.float().transpose(0, 1).chunk(2, -1)
        first_sin, second_sin = self.sin.float().transpose(0, 1).chunk(2, -1)
        halves = (first * first_cos - second * first_sin, second * second_cos + first * second_sin)
        return torch.cat(halves, -1).to(x.dtype)
