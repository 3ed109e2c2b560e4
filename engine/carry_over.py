"""Tokens that the host does not know yet, from the step that samples them to the next.

Both ends of a step's arithmetic on the device: what lies before the model, and what follows sampling.
"""

from __future__ import annotations

import torch


def step_inputs(
    last_token: torch.Tensor,
    carry_row: torch.Tensor,
    input_id: torch.Tensor,
    position: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    block_tables: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token ids [T], positions [T], indices of tokens with logits [S]; int64, and contiguous block tables).

    `last_token` [rows]: of each row, for the tokens whose `carry_row` [T] is one and not -1. `input_id` [T]
    is that of the others. `query_start`, `query_len` [S], `block_tables` [S, N]; all int32.
    """
    carried = last_token[carry_row.clamp(min=0)]
    token = torch.where(carry_row >= 0, carried, input_id)
    logits_indices = query_start + query_len - 1  # each sequence's last token
    return token.long(), position.long(), logits_indices.long(), block_tables.contiguous()


def keep_tokens(
    tokens: torch.Tensor, row: torch.Tensor, sampled: torch.Tensor, last_token: torch.Tensor
) -> None:
    """Tokens int32 [S] to `sampled` [S], to be downloaded, and to their `row` [S] of `last_token`.

    Sequences whose token nobody wants (padding, parts of prompts) share row 0, which nobody reads.
    """
    sampled.copy_(tokens)
    last_token.index_copy_(0, row.long(), tokens)
