"""Where programs that share the context of one sequence meet, and how many they should be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_RESIDENT = 3
"""Programs of a decode that a multiprocessor may hold at once."""


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Where the splits of a launch meet. Launches on one stream share it, one after the other.

    A prefill's outputs, larger, meet elsewhere.
    """

    partial: torch.Tensor
    """float32 [n]: the splits' outputs."""
    partial_lse: torch.Tensor
    """float32 [n // head_dim]: the logarithm, in base 2, of the splits' sums."""
    arrivals: torch.Tensor
    """int32, sequences * kv_heads of them at least: splits arrived; 0 between launches."""
    programs: int
    """Multiprocessors to fill."""

    @classmethod
    def allocate(
        cls, max_sequences: int, heads: int, kv_heads: int, head_dim: int, programs: int, device: torch.device
    ) -> SplitScratch:
        """Head counts and dimension are the largest of any layer: one with fewer heads splits further."""
        rows = (max_sequences + MAX_RESIDENT * programs) * heads
        return cls(
            partial=torch.empty(rows * head_dim, dtype=torch.float32, device=device),
            partial_lse=torch.empty(rows, dtype=torch.float32, device=device),
            arrivals=torch.zeros(
                max(max_sequences * kv_heads, programs + kv_heads), dtype=torch.int32, device=device
            ),
            programs=programs,
        )
