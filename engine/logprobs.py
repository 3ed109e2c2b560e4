"""Log-probabilities of sampled tokens, and of the likeliest ones beside them, by the model's own logits."""

from __future__ import annotations

import torch


def log_probabilities(
    logits: torch.Tensor, tokens: torch.Tensor, likeliest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [S, V], tokens int32 [S] -> token ids int32 and natural logarithms float32, [S, 1 + likeliest].

    The token itself comes first, then the likeliest, in order; equal ones in any.
    """
    logits = logits.float()
    ids = torch.cat([tokens[:, None].long(), logits.topk(likeliest).indices], 1)
    return ids.int(), logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
