"""A device half without torch: runs plans one after the other on a numpy key-value cache.

The 'model' hashes the tokens that the block tables lead to, so a wrong table, position, slot,
carry-over row or reused block changes the output.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from engine.plan import StepPlan, StepResult

VOCAB = 13


def next_token(context: list[int], seed: int) -> int:
    h = seed % 2**64
    for position, token in enumerate(context):
        h = (h * 6364136223846793005 + token * 1442695040888963407 + position) % 2**64
    return (h >> 33) % VOCAB


def reference(prompt: list[int], limit: int, stop: tuple[int, ...], seed: int) -> list[int]:
    """What a request must generate, computed alone."""
    output: list[int] = []
    while len(output) < limit:
        output.append(next_token(prompt + output, seed))
        if output[-1] in stop:
            break
    return output


class FakeDevice:
    """Like `engine.runner.Runner`: `launch` in order, `collect` the oldest."""

    def __init__(self, num_blocks: int, block_size: int, capacity: int) -> None:
        self.block_size = block_size
        self.cache = np.full(num_blocks * block_size, -1, np.int64)
        self.last_token = np.full(capacity + 1, -1, np.int64)
        self.in_flight: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self.in_flight.append(plan)

    def collect(self) -> StepResult:
        """Runs the step only now, as late as possible."""
        plan = self.in_flight.popleft()
        carry = plan.tokens["carry_row"]
        ids = np.where(carry >= 0, self.last_token[carry], plan.tokens["input_id"])
        assert (ids >= 0).all(), "a token that was never sampled is used"
        slots = plan.tokens["cache_slot"]
        assert (slots >= self.block_size).all(), "a real token is written to the scratch block"
        assert len(set(slots.tolist())) == len(slots), "two tokens of a step share a cache slot"
        self.cache[slots] = ids
        sampled = np.full(len(plan.sequences), -1, np.int32)
        for i, seq in enumerate(plan.sequences):
            assert (
                seq["context_len"] == plan.tokens["position"][seq["query_start"] + seq["query_len"] - 1] + 1
            )
            if seq["row"] == 0:
                continue
            positions = np.arange(seq["context_len"])
            slots = plan.block_tables[i][positions // self.block_size] * self.block_size
            context = self.cache[slots + positions % self.block_size]
            assert (context >= 0).all(), "an unwritten cache slot is read"
            seed = (int(np.uint32(seq["seed_high"])) << 32) | int(np.uint32(seq["seed_low"]))
            sampled[i] = next_token(context.tolist(), seed)
            assert seq["sample_position"] == seq["context_len"]
        self.last_token[plan.sequences["row"]] = sampled
        return StepResult(plan.step, sampled)
