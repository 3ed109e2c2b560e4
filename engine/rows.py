"""The numbers of the running requests, one array entry per request.

A request owns a row from admission until it ends or is preempted. The device has tables with the
same rows, so a row is also the name under which a sampled token is carried over on the device.
Arrays let one numpy expression do a step's work for every request. Row 0 is scratch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.plan import SCRATCH_ROW, SEQUENCE
from engine.request import Request

Int32s = npt.NDArray[np.int32]


class Rows:
    """`capacity` rows beside the scratch row, each of at most `max_blocks` blocks of `block_size` tokens."""

    def __init__(self, capacity: int, max_blocks: int, block_size: int) -> None:
        n = capacity + 1
        self.block_size = block_size
        self.requests: list[Request | None] = [None] * n
        self.generation = np.zeros(n, np.int64)
        """Counts the owners a row has had: (row, generation) names one stay of one request."""
        self.known = np.zeros(n, np.int32)
        """Tokens whose ids the host knows."""
        self.in_flight = np.zeros(n, np.int32)
        """Tokens sampled, or to be sampled, by steps that have not been committed."""
        self.scheduled = np.zeros(n, np.int32)
        """Positions computed, or to be computed by steps in flight."""
        self.registered = np.zeros(n, np.int32)
        """Full blocks that have been offered to the prefix cache."""
        self.limit = np.zeros(n, np.int32)
        """Tokens at which the request ends by length."""
        self.last_token = np.zeros(n, np.int32)
        """The last known token."""
        self.blocks = np.zeros((n, max_blocks), np.int32)
        """Its blocks in order of position; entries beyond num_blocks are 0."""
        self.num_blocks = np.zeros(n, np.int32)
        self.sequences = np.zeros(n, SEQUENCE)
        """What plans say of it, as far as it is the same in each that samples."""
        self.noisy = np.zeros(n, np.bool_)
        """Whether it draws noise."""
        self.filtered = np.zeros(n, np.bool_)
        """Whether it draws noise, and from some of the tokens only."""
        self.uncounted = np.zeros(n, np.bool_)
        """Whether it has penalties or biases, and no step has brought the device its tokens."""
        self.logprobs = np.full(n, -1, np.int32)
        """How many of the likeliest tokens' log-probabilities it wants beside its own; -1: not even that."""
        self.num_scored = 0
        """Rows that want any."""
        self.constrained = np.zeros(n, np.bool_)
        """Whether its tokens have to follow a grammar."""
        self.num_constrained = 0
        """Rows whose tokens have to follow one."""
        self._free = list(range(n - 1, SCRATCH_ROW, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        return len(self.requests) - 1

    def take(self, request: Request, blocks: list[int], computed: int) -> int:
        """Give the request a row, with blocks whose first `computed` positions are in the cache."""
        row = self._free.pop()
        sampling = request.sampling
        self.requests[row] = request
        self.generation[row] += 1
        self.known[row] = request.num_tokens
        self.in_flight[row] = 0
        self.scheduled[row] = computed
        self.registered[row] = 0
        self.limit[row] = request.limit
        self.last_token[row] = request.tokens[request.num_tokens - 1]
        self.num_blocks[row] = 0
        self.append_blocks(row, blocks)
        # Dividing by less would overflow; and the likeliest alone is greedy, even where two are equal.
        greedy = sampling.temperature < 1e-5 or sampling.top_k == 1
        sequence = self.sequences[row]
        sequence["row"] = row
        sequence["seed_low"], sequence["seed_high"] = np.array([sampling.seed % 2**64], "<u8").view("<i4")
        sequence["temperature"] = 0 if greedy else sampling.temperature
        sequence["penalty_row"] = row if sampling.penalised else SCRATCH_ROW
        for name in (
            "top_k",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            sequence[name] = getattr(sampling, name)
        self.noisy[row] = not greedy
        self.filtered[row] = not greedy and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
        self.uncounted[row] = sampling.penalised
        self.logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.num_scored += sampling.logprobs is not None
        self.constrained[row] = sampling.grammar is not None
        self.num_constrained += sampling.grammar is not None
        request.row = row
        return row

    def append_blocks(self, row: int, blocks: list[int]) -> None:
        n = int(self.num_blocks[row])
        self.blocks[row, n : n + len(blocks)] = blocks
        self.num_blocks[row] = n + len(blocks)

    def append_block_each(self, rows: Int32s, blocks: list[int]) -> None:
        """One block for each of `rows`, which are different ones."""
        self.blocks[rows, self.num_blocks[rows]] = blocks
        self.num_blocks[rows] += 1

    def release(self, row: int) -> list[int]:
        """Take the row back; returns the blocks it had."""
        request = self.requests[row]
        if request is None:
            raise ValueError(f"row {row} has no owner")
        self.requests[row] = None
        self.num_scored -= request.sampling.logprobs is not None
        self.num_constrained -= request.sampling.grammar is not None
        request.row = SCRATCH_ROW
        self.generation[row] += 1  # results of steps still in flight no longer match
        self._free.append(row)
        blocks = self.owned_blocks(row)
        self.blocks[row, : len(blocks)] = 0
        self.num_blocks[row] = self.known[row] = self.scheduled[row] = 0
        return blocks

    def owned_blocks(self, row: int) -> list[int]:
        blocks: list[int] = self.blocks[row, : self.num_blocks[row]].tolist()
        return blocks
