"""An engine whose device only takes its time: real scheduler, real loop, no model, no GPU.

So everything but the GPU can be measured on CPUs, with any number of replicas.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import transformers

from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.plan import StepPlan, StepResult, StepTiming
from engine.runner import Runner
from engine.scheduler import Scheduler


@dataclass(frozen=True)
class Pace:
    """Seconds that a step takes."""

    step: float
    decode: float
    """More for each sequence."""
    prompt: float
    """More for each token of a prompt."""

    def seconds(self, plan: StepPlan) -> float:
        prompt = len(plan.tokens) - plan.num_decodes
        return self.step + self.decode * len(plan.sequences) + self.prompt * prompt

    def slowed(self, factor: float) -> Pace:
        return Pace(self.step * factor, self.decode * factor, self.prompt * factor)


PACES = {  # lines through what one H200 measured, benchmarks/results/h200.md; 0.6b's prompts by its size
    "8b": Pace(4.27e-3, 33.7e-6, 22.7e-6),
    "0.6b": Pace(1.10e-3, 18.5e-6, 3e-6),
}


class PacedRunner:
    """`Runner` without a device: steps follow each other, each takes what the pace says."""

    def __init__(self, pace: Pace, vocab_size: int) -> None:
        self._pace, self._vocab = pace, vocab_size
        self._free_at = time.perf_counter()
        self._in_flight: deque[tuple[StepPlan, StepTiming, float]] = deque()

    def launch(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        begin = max(now, self._free_at)
        seconds = self._pace.seconds(plan)
        self._in_flight.append(
            (plan, StepTiming(now, begin - self._free_at, begin - now, seconds, 0.0), begin)
        )
        self._free_at = begin + seconds

    def collect(self) -> StepResult:
        plan, timing, begin = self._in_flight.popleft()
        if (wait := begin + timing.compute - time.perf_counter()) > 0:
            time.sleep(wait)  # without the GIL, as on an event
        return StepResult(plan.step, self._tokens(plan), timing)

    def _tokens(self, plan: StepPlan) -> npt.NDArray[np.int32]:
        """As with keyed noise, seed and position determine a token; never 0."""
        sequences = plan.sequences
        mixed = sequences["seed_low"].astype(np.int64) + 7919 * sequences["sample_position"].astype(np.int64)
        return (1 + mixed % (self._vocab - 1)).astype(np.int32)

    def close(self) -> None:
        """There is nothing to end."""


class PacedEngine(AsyncEngine):
    """`AsyncEngine` on a `PacedRunner`. Takes `config.num_blocks`, or as many as an H200 has for an 8B."""

    def __init__(self, config: EngineConfig, pace: Pace) -> None:
        super().__init__(config)
        self._pace = pace

    def _build(self) -> tuple[Scheduler, Runner]:
        config = self.config
        model: Any = transformers.AutoConfig.from_pretrained(config.model)
        scheduler = Scheduler(
            num_blocks=config.num_blocks or 50_000,
            block_size=config.block_size,
            context_length=config.context_length or model.max_position_embeddings,
            max_running_requests=config.max_running_requests,
            max_tokens_per_step=config.max_tokens_per_step,
            prefix_caching=config.prefix_caching,
            identity=config.model.encode(),
        )
        self.context_length, self.vocab_size = scheduler.context_length, model.vocab_size
        self.device = "paced"
        return scheduler, cast(Runner, PacedRunner(self._pace, model.vocab_size))
