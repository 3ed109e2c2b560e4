"""How many tokens a step may compute, so that tokens of a stream come as often as they should."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import isqrt

import numpy as np

from engine.config import EngineConfig
from engine.plan import StepPlan, scratch_plan
from engine.runner import Runner

logger = logging.getLogger(__name__)

LEAST_PROMPT = 64
"""Prompt tokens that a step may always compute beside a full set of decodes: they must get on, too."""


def choose_step_tokens(config: EngineConfig, runner: Runner, num_blocks: int) -> int:
    """Tokens of the largest mixed step within `inter_token_target_ms`, at most `max_tokens_per_step`.

    Found by running such steps: every row decodes, with the cache half full, and a prompt has the rest.
    """
    high = config.max_tokens_per_step
    if config.inter_token_target_ms is None:
        return high

    def milliseconds(tokens: int) -> float:
        plan = mixed_plan(
            tokens, config.max_running_requests, num_blocks, runner.max_blocks, config.block_size
        )
        times = []
        for _ in range(3):  # the first may compile
            begin = time.perf_counter()
            runner.launch(plan)
            runner.collect()
            times.append(time.perf_counter() - begin)
        return min(times) * 1000

    low = min(config.max_running_requests + LEAST_PROMPT, high)
    found = largest_within(config.inter_token_target_ms, low, high, milliseconds)
    logger.info(
        "steps of %d tokens: %.1f ms, where inter_token_target_ms is %g",
        found,
        milliseconds(found),
        config.inter_token_target_ms,
    )
    return found


def largest_within(target: float, low: int, high: int, cost: Callable[[int], float]) -> int:
    """The largest of low..high that costs at most `target`, to within an eighth of it; `low` if none does.

    `cost` grows with its argument.
    """
    if cost(high) <= target:
        return high
    while high - low > low // 8 and high - low > 1:
        middle = max(isqrt(low * high), low + 1)  # of small neighbours the root is the lower one itself
        if cost(middle) <= target:
            low = middle
        else:
            high = middle
    return low


def mixed_plan(tokens: int, sequences: int, num_blocks: int, max_blocks: int, block_size: int) -> StepPlan:
    """A step that writes to scratch only: decodes that together read half of the cache, and a prompt."""
    plan = scratch_plan(tokens, sequences, max_blocks * block_size, max_blocks)
    n = plan.num_decodes
    blocks = max(1, min((num_blocks - 1) // sequences, max_blocks) // 2)
    ids = 1 + np.arange(n * blocks) % (num_blocks - 1)
    plan.block_tables[:n, :blocks] = ids.reshape(n, blocks)
    plan.sequences["context_len"][:n] = blocks * block_size
    plan.tokens["position"][:n] = blocks * block_size - 1
    return plan
