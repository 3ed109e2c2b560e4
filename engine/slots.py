"""Slots A and B: everything that belongs to one step in flight.

A slot is filled by the host, read and written by the three lanes in turn, and free again once its
`d2h_done` is reached. Its device tensors are at fixed addresses, since captured graphs read and
write them; fields are contiguous rows of a matrix, so one copy moves them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.logprobs import log_probabilities
from engine.penalties import HistoryTensors
from engine.plan import SEQUENCE, TOKEN, Scores, StepPlan
from engine.request import MAX_LOGPROBS

if TYPE_CHECKING:
    from engine.lanes import Event, Lanes

_TOKEN_ROW = {name: i for i, name in enumerate(TOKEN.names or ())}
_SEQUENCE_ROW = {name: i for i, name in enumerate(SEQUENCE.names or ())}

AT_ONCE = 64
"""Sequences of which something is held for each token of the vocabulary, so that it needs little memory."""


class Slot:
    """Buffers for steps of up to `max_tokens` tokens and `max_sequences` sequences of `max_blocks` blocks."""

    def __init__(
        self, max_tokens: int, max_sequences: int, max_blocks: int, device: torch.device, lanes: Lanes
    ) -> None:
        pinned = device.type == "cuda"

        def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
            host = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
            return host, torch.zeros(shape, dtype=torch.int32, device=device)

        self._tokens_host, self._tokens = pair(len(_TOKEN_ROW), max_tokens)
        self._sequences_host, self._sequences = pair(len(_SEQUENCE_ROW), max_sequences)
        # Blocks first: the part in use, [blocks of the longest, sequences], is one contiguous copy.
        self._tables_host, self._tables = pair(max_blocks, max_sequences)
        self._sampled_host, self.sampled = pair(max_sequences)
        self._scored_host, self._scored = pair(max_sequences)
        self._ids_host, self._ids = pair(max_sequences * (1 + MAX_LOGPROBS))
        self._logprobs_host, self._logprobs = pair(max_sequences * (1 + MAX_LOGPROBS))
        self.num_scored = self._likeliest = 0
        self._constrained_host, self._constrained = pair(max_sequences)
        self._masks_host = self._masks = torch.empty(0, 0, dtype=torch.int32)  # made when they are needed
        self.num_constrained = 0
        self.logits: torch.Tensor | None = None
        """Of this step, from its forward to its sampling."""
        self._num_blocks = 0
        self.histories: list[HistoryTensors] = []
        self.h2d_done: Event = lanes.new_event()
        self.masks_done: Event = lanes.new_event()
        self.compute_done: Event = lanes.new_event()
        self.d2h_done: Event = lanes.new_event()

    def fill(self, plan: StepPlan, num_tokens: int, num_sequences: int) -> None:
        """Copy a plan into the pinned buffers (host), padded with scratch entries.

        A padded sequence of a step of decodes is one token of its own, in row 0 and block 0. In other
        steps it has none, and the padded tokens belong to nobody.
        """
        t, s = len(plan.tokens), len(plan.sequences)
        tokens, sequences = self._tokens_host.numpy(), self._sequences_host.numpy()
        for name, i in _TOKEN_ROW.items():
            tokens[i, :t] = plan.tokens[name]
        for name, i in _SEQUENCE_ROW.items():
            sequences[i, :s] = plan.sequences[name].view(np.int32)
        self._num_blocks = plan.block_tables.shape[1]
        tables = self._tables_host.numpy()
        tables[: self._num_blocks, :s] = plan.block_tables.T
        self.histories = [
            HistoryTensors(row, *(self._copied(each) for each in arrays)) for row, *arrays in plan.histories
        ]
        self.num_scored, self._likeliest = len(plan.scored), plan.likeliest
        if self.num_scored:
            self._scored_host.numpy()[: self.num_scored] = plan.scored
        self.num_constrained = len(plan.constrained)
        if self.num_constrained:
            self._constrained_host.numpy()[: self.num_constrained] = plan.constrained
        if num_tokens > t:
            tokens[:, t:num_tokens] = 0
            tokens[_TOKEN_ROW["carry_row"], t:num_tokens] = -1
        if num_sequences > s:
            own = plan.num_decodes == t
            sequences[:, s:num_sequences] = 0
            # Of none, too, the last token is one that there is: number 0.
            start = np.arange(t, num_tokens) if own else 1
            sequences[_SEQUENCE_ROW["query_start"], s:num_sequences] = start
            sequences[_SEQUENCE_ROW["query_len"], s:num_sequences] = own
            sequences[_SEQUENCE_ROW["context_len"], s:num_sequences] = own
            tables[: self._num_blocks, s:num_sequences] = 0

    def _copied(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array.copy())
        return tensor.pin_memory() if self._tokens.is_cuda else tensor

    def upload(self) -> None:
        """Pinned buffers to device tensors (H2D lane)."""
        self._tokens.copy_(self._tokens_host, non_blocking=True)
        self._sequences.copy_(self._sequences_host, non_blocking=True)
        n = self._num_blocks
        self._tables[:n].copy_(self._tables_host[:n], non_blocking=True)
        if self.num_scored:
            self._scored.copy_(self._scored_host, non_blocking=True)
        if self.num_constrained:
            self._constrained.copy_(self._constrained_host, non_blocking=True)

    def fill_masks(self, masks: npt.NDArray[np.int32]) -> None:
        """Copy what grammars allow, [constrained, words], into a pinned buffer (host)."""
        if self._masks_host.shape[1] != masks.shape[1]:
            shape = len(self._constrained), masks.shape[1]
            self._masks_host = torch.empty(shape, dtype=torch.int32, pin_memory=self._tokens.is_cuda)
            self._masks = torch.empty(shape, dtype=torch.int32, device=self._tokens.device)
        self._masks_host.numpy()[: len(masks)] = masks

    def upload_masks(self) -> None:
        """The pinned buffer to a device tensor (H2D lane)."""
        n = self.num_constrained
        self._masks[:n].copy_(self._masks_host[:n], non_blocking=True)

    def constrain(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [S, V], -inf where a grammar allows no token; a copy (compute lane)."""
        logits = logits.clone()
        places = self._constrained[: self.num_constrained].long()
        for i in range(0, self.num_constrained, AT_ONCE):
            part = slice(i, i + AT_ONCE)
            allowed = unpacked(self._masks[: self.num_constrained][part], logits.shape[-1])
            logits[places[part]] = logits[places[part]].masked_fill(~allowed, -torch.inf)
        return logits

    def score(self, logits: torch.Tensor) -> None:
        """Log-probabilities of sampled tokens, where they are wanted, by logits [S, V] (compute lane)."""
        self._likeliest = min(self._likeliest, logits.shape[-1])
        ids, logprobs = self._scores(self._ids, self._logprobs)
        wanted = self._scored[: self.num_scored].long()
        for i in range(0, self.num_scored, AT_ONCE):
            part = slice(i, i + AT_ONCE)
            places = wanted[part]
            ids[part], found = log_probabilities(logits[places], self.sampled[places], self._likeliest)
            logprobs[part] = found.view(torch.int32)

    def _scores(self, *buffers: torch.Tensor) -> list[torch.Tensor]:
        """The part in use of each: [scored, 1 + likeliest]."""
        shape = self.num_scored, 1 + self._likeliest
        return [buffer[: shape[0] * shape[1]].view(shape) for buffer in buffers]

    def download(self) -> None:
        """Sampled tokens, and their log-probabilities, to their pinned buffers (D2H lane)."""
        self._sampled_host.copy_(self.sampled, non_blocking=True)
        if self.num_scored:
            there = self._scores(self._ids, self._logprobs)
            for host, device in zip(self._scores(self._ids_host, self._logprobs_host), there, strict=True):
                host.copy_(device, non_blocking=True)

    def token(self, name: str, n: int) -> torch.Tensor:
        """Field `name` of the first n tokens: int32 [n] on the device."""
        return self._tokens[_TOKEN_ROW[name], :n]

    def sequence(self, name: str, n: int) -> torch.Tensor:
        """Field `name` of the first n sequences: int32 or float32 [n] on the device."""
        row = self._sequences[_SEQUENCE_ROW[name], :n]
        return row.view(torch.float32) if SEQUENCE[name] == np.float32 else row

    def block_tables(self, n: int, num_blocks: int | None = None) -> torch.Tensor:
        """int32 [n, num_blocks] on the device, with strides (1, max_sequences)."""
        return self._tables[:num_blocks, :n].T

    def result(self, n: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """A copy of the first n sampled tokens. Only after `d2h_done`."""
        sampled = self._sampled_host[:n].numpy().copy()
        self._sampled_host.fill_(-1)
        return sampled

    def scores(self) -> Scores | None:
        """A copy of the log-probabilities, if there are any. Only after `d2h_done`."""
        if not self.num_scored:
            return None
        ids, logprobs = (each.numpy().copy() for each in self._scores(self._ids_host, self._logprobs_host))
        return Scores(self._scored_host[: self.num_scored].numpy().copy(), ids, logprobs.view(np.float32))

    def make_scratch(self, n: int, tokens: int) -> None:
        """Device tensors of a step of n padded sequences, of `tokens` (0 or 1) each, for capturing steps."""
        start = torch.arange(n, dtype=torch.int32) if tokens else 1
        self._tokens.zero_()
        self._tokens[_TOKEN_ROW["carry_row"]] = -1
        self._sequences.zero_()
        self._sequences[_SEQUENCE_ROW["query_start"], :n] = start
        self._sequences[_SEQUENCE_ROW["query_len"]] = tokens
        self._sequences[_SEQUENCE_ROW["context_len"]] = tokens
        self._tables.zero_()

    def poison(self) -> None:
        """Fill every buffer with what no step can use, to show in tests that nobody reads a free slot."""
        for buffer in vars(self).values():
            if isinstance(buffer, torch.Tensor):
                buffer.fill_(-(2**30))


def unpacked(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bits, int32 [n, words], the lowest first -> bool [n, vocab_size]; what there are no bits for is 0."""
    token = torch.arange(min(vocab_size, 32 * masks.shape[1]), device=masks.device)
    bits = (masks[:, token >> 5] >> (token & 31).int()) & 1
    return torch.nn.functional.pad(bits.bool(), (0, vocab_size - len(token)))
