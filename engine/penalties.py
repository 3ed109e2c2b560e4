"""Logits changed by what a request has said already, and by what its client wants more or less of.

Counts live on the device in a table by row, and change on the compute lane only: a token is counted in the
step that samples it, before the next step samples, whether or not the host knows it by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.request import MAX_BIASES


@dataclass(frozen=True, slots=True)
class PenaltyTensors:
    """What the sequences of a step ask for, each [S] on the device."""

    row: torch.Tensor
    """int32; 0 where nothing is sampled, or nothing asked for"""
    presence: torch.Tensor
    """float32: subtracted from the logit of a token that was generated before; 0 changes nothing"""
    frequency: torch.Tensor
    """float32: subtracted once for each time that it was generated"""
    repetition: torch.Tensor
    """float32: divides the logit of a token of prompt or output where it is positive, and multiplies it
    where it is not (Keskar et al., "CTRL", 2019, as transformers and vLLM have it); 1 changes nothing"""


@dataclass(frozen=True, slots=True)
class HistoryTensors:
    """What a request brings to the row that it gets; in pinned memory where the device is a GPU."""

    row: int
    prompt: torch.Tensor
    """int32 [n]"""
    generated: torch.Tensor
    """int32 [m]"""
    bias_ids: torch.Tensor
    """int32, at most `MAX_BIASES`"""
    biases: torch.Tensor
    """float32, of the same length"""


class Penalties:
    """The tables of `rows` rows and what is computed from them. They are allocated at first use."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = rows, vocab_size
        self._device = device
        # Of each token: 2 for each time that it was generated, and 1 if it is in the prompt.
        self._counts: torch.Tensor | None = None
        self._bias_ids: torch.Tensor | None = None
        self._biases: torch.Tensor | None = None

    def release(self) -> None:
        """Give the memory back. Rows that are in use lose their counts."""
        self._counts = self._bias_ids = self._biases = None

    @property
    def counts(self) -> torch.Tensor:
        """int32 [rows, vocab_size]"""
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._counts

    @torch.inference_mode()
    def begin(self, histories: Iterable[HistoryTensors]) -> None:
        """Rows begin anew with these tokens and biases."""
        for history in histories:
            counts = self.counts[history.row]
            counts.zero_()
            counts[self._there(history.prompt).long()] = 1
            generated = self._there(history.generated).long()
            counts.index_add_(0, generated, torch.full_like(generated, 2, dtype=torch.int32))
            n = len(history.biases)
            if n and self._biases is None:
                shape = self._shape[0], MAX_BIASES
                self._bias_ids = torch.zeros(shape, dtype=torch.int64, device=self._device)
                self._biases = torch.zeros(shape, dtype=torch.float32, device=self._device)
            if self._bias_ids is not None and self._biases is not None:
                self._biases[history.row] = 0  # what is left over adds nothing
                self._bias_ids[history.row, :n] = self._there(history.bias_ids).long()
                self._biases[history.row, :n] = self._there(history.biases)

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    @torch.inference_mode()
    def apply(self, logits: torch.Tensor, params: PenaltyTensors) -> torch.Tensor:
        """Logits [S, V] of any float dtype -> float32 [S, V], biases added and penalties taken."""
        row = params.row.long()
        if self._bias_ids is not None and self._biases is not None:
            logits = logits.to(torch.float32, copy=True)
            logits.scatter_add_(1, self._bias_ids[row], self._biases[row])
        if logits.is_cuda:
            from engine.triton_penalties import penalise  # comes with torch's CUDA builds only

            return penalise(logits, self.counts, params, out=logits if self._biases is not None else None)
        logits = logits.float()
        seen = self.counts[row]
        times = seen >> 1
        divisor = torch.where(seen > 0, params.repetition[:, None], 1)
        logits = torch.where(logits > 0, logits / divisor, logits * divisor)
        return logits - params.frequency[:, None] * times - params.presence[:, None] * (times > 0)

    @torch.inference_mode()
    def count(self, row: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count sampled tokens, int32 [S], in their rows, int32 [S]; each row comes once, but for row 0."""
        place = row.long(), tokens.long()
        self.counts[place] += 2
