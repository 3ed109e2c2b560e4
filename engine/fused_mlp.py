"""Feed-forward modules as two calls: gate, its activation and what it gates are one product.

Nothing here names an architecture: which modules compute that is found by trying.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.fused_attention import MAGNITUDES, TOKENS
from engine.fusion import Slice, close
from engine.projection import project


class FusedMLP(nn.Module):
    """W2 (SiLU(W x) * V x) (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, gates: nn.Parameter, down: torch.Tensor) -> None:
        """`gates` [2n, m]: W, and V below it. `down` [m, n]: W2."""
        super().__init__()
        self.gates, self.down = gates, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = project(project(x, self.gates, None, 0.0, True), self.down, None, 0.0, False)
        return out


@torch.no_grad()
def fuse_mlps(model: nn.Module) -> int:
    """Replace, in place, the modules that compute what `FusedMLP` does; returns how many.

    Their projections are to be joined before.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _candidate(child)
            if fused is not None and _same(child, fused):
                setattr(parent, name, fused)
                replaced += 1
    return replaced


def _candidate(module: nn.Module) -> FusedMLP | None:
    joined: Any = getattr(module, "gate_up_proj", getattr(module, "gate_proj", None))
    down: Any = getattr(module, "down_proj", None)
    if type(joined) not in (nn.Linear, Slice) or type(down) is not nn.Linear:
        return None
    if any(getattr(each, "bias", None) is not None for each in (joined, down)):
        return None
    gates = joined.weight
    if gates.shape != (2 * down.in_features, down.out_features):
        return None
    return FusedMLP(gates, down.weight)


def _same(module: nn.Module, fused: FusedMLP) -> bool:
    generator = torch.Generator().manual_seed(0)
    for magnitude in MAGNITUDES:
        x = magnitude * torch.randn(1, TOKENS, fused.gates.shape[1], generator=generator)
        x = x.to(fused.gates)
        if not close(fused(x), module(x)):
            return False
    return True
