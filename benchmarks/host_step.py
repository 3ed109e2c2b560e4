"""What a decode step costs the host: schedule, prepare, launch and commit, with a device that does nothing.

    python -m benchmarks.host_step [--json] [--requests 32 256 1024] [--steps 400]

The real scheduler, slots and runner; only the lanes drop their work and a token is drawn at random.
Prints the median, 99th percentile and phases of the steps in microseconds; with --json the last
line is the same as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import numpy as np
import torch

from engine.attention import LayerCache, PagedBatch
from engine.lanes import Event, Lanes, ThreadEvent, Work
from engine.plan import StepResult
from engine.request import Request, SamplingParams
from engine.runner import Runner
from engine.scheduler import Scheduler

BLOCK_SIZE = 16


class NoLane:
    def run(self, work: Work) -> None:
        pass

    def record(self, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        pass


class NoModel:
    vocab_size = 128

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        caches: list[LayerCache],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        raise NotImplementedError("its lane drops it")


def measure(requests: int, steps: int, prompt: int = 256) -> dict[str, Any]:
    """Steady decode of `requests` requests."""
    context = prompt + steps + 64
    blocks = -(-context // BLOCK_SIZE)
    scheduler = Scheduler(
        num_blocks=requests * blocks + 1,
        block_size=BLOCK_SIZE,
        context_length=context,
        max_running_requests=requests,
        max_tokens_per_step=requests * prompt,
    )
    empty = torch.zeros(2, BLOCK_SIZE, 1, 1)
    lane = NoLane()
    runner = Runner(
        NoModel(),
        [LayerCache(empty, empty)],
        Lanes(lane, lane, lane, ThreadEvent, lambda: None, ThreadEvent),
        torch.device("cpu"),
        max_tokens=requests * prompt,
        max_sequences=requests,
        max_blocks=blocks,
        depth=2,
    )
    rng = np.random.default_rng(0)
    for i in range(requests):
        tokens = rng.integers(1, 100, prompt).tolist()
        scheduler.add(Request(str(i), tokens, SamplingParams(temperature=0, stop_token_ids=(0,))))
    times: list[tuple[float, float, float, float]] = []
    gc.collect()
    for _ in range(steps):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        runner.launch(plan)
        launched = time.perf_counter()
        if scheduler.num_in_flight == 2:
            step = runner.collect().step
            result = StepResult(step, rng.integers(1, 100, requests).astype(np.int32))
            collected = time.perf_counter()
            scheduler.commit(result)
            done = time.perf_counter()
            times.append(
                (
                    scheduled - begin,
                    launched - scheduled,
                    done - collected,
                    launched - begin + done - collected,
                )
            )
    micros = np.array(times[10:]) * 1e6
    names = ("schedule", "launch", "commit", "whole")
    figures: dict[str, Any] = {name: float(np.median(micros[:, i])) for i, name in enumerate(names)}
    return {"requests": requests} | figures | {"whole_p99": float(np.percentile(micros[:, 3], 99))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="*", default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(n, args.steps) for n in args.requests]
    print(f"{'requests':>8} {'schedule':>9} {'launch':>9} {'commit':>9} {'whole':>9} {'p99':>9}  us a step")
    for x in found:
        phases = " ".join(
            f"{x[name]:9.1f}" for name in ("schedule", "launch", "commit", "whole", "whole_p99")
        )
        print(f"{x['requests']:8} {phases}")
    if args.json:
        print(json.dumps({"unit": "us", "steps": found}))


if __name__ == "__main__":
    main()
