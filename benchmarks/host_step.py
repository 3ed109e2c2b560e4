"""What a decode step costs the host: schedule, prepare, launch and commit, with a device that does nothing.

    python -m benchmarks.host_step [--json] [--requests 32 256 1024] [--steps 400] [--waiting 4096]

The real scheduler, slots and runner; only the lanes drop their work and a token is drawn at random.
Prints the median, 99th percentile and phases of the steps in microseconds, and beside them what the
timing of a step costs (of which these figures have none, but for reading the clock); with --json
the last line is the same as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import count
from engine.attention import LayerCache, PagedBatch
from engine.lanes import Event, Lanes, ThreadEvent, Work
from engine.plan import StepResult, scratch_plan
from engine.request import Request, SamplingParams
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.step_clock import StepClock
from engine.timeline import Timeline

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


def measure(requests: int, steps: int, prompt: int = 256, waiting: int = 0) -> dict[str, Any]:
    """Steady decode of `requests` requests, while `waiting` ones of as many clients have no row."""
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
    for i in range(waiting):
        tokens = rng.integers(1, 100, prompt).tolist()
        scheduler.add(Request(f"waiting {i}", tokens, SamplingParams(), client=str(i), timeout=1e6))
    times: list[tuple[float, float, float, float]] = []
    gc.collect()
    for _ in range(steps):
        begin = time.perf_counter()
        scheduler.expire(time.monotonic())
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
    p99 = float(np.percentile(micros[:, 3], 99))
    return {"requests": requests} | figures | {"whole_p99": p99, "timing": timing_cost(requests)}


def timing_cost(requests: int, steps: int = 2000) -> float:
    """Microseconds that the timeline and the step clock add to the host's part of a step."""
    plan = scratch_plan(requests, requests, 2, 1)
    tokens = np.zeros(requests, np.int32)
    lane = NoLane()
    clock = StepClock(Lanes(lane, lane, lane, ThreadEvent, lambda: None, ThreadEvent), depth=1)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def timed_result() -> StepResult:
        marks = clock.take()
        for mark in marks:
            lane.record(mark)
        return StepResult(0, tokens, clock.read(marks, time.perf_counter()))

    def run(phases: list[Any], launch: Any, collect: Any) -> float:
        laps = []
        for _ in range(steps):
            begin = time.perf_counter()
            phases[0](block=False)
            for phase in phases[1:]:
                phase(plan)
            launch(plan)
            collect()
            laps.append(time.perf_counter() - begin)
        return float(np.median(laps)) * 1e6

    timeline = Timeline()
    wrapped = [timeline.inbox(nothing), timeline.publish(nothing), timeline.schedule(nothing)]
    wrapped += [timeline.commit(nothing), timeline.publish(nothing)]
    bare = run([nothing] * 5, nothing, lambda: StepResult(0, tokens))
    return run(wrapped, timeline.launch(nothing), timeline.collect(timed_result)) - bare


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=count, nargs="*", default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--steps", type=count, default=400)
    parser.add_argument("--waiting", type=int, default=0, help="requests without a row, each of a client")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.steps < 10 or args.waiting < 0:
        parser.error("--steps: at least 10; --waiting: at least 0")
    torch.set_num_threads(1)
    found = [measure(n, args.steps, waiting=args.waiting) for n in args.requests]
    names = ("schedule", "launch", "commit", "whole", "whole_p99", "timing")
    print(f"{'requests':>9}", *(f"{name:>9}" for name in names), " us a step")
    for x in found:
        print(f"{x['requests']:9}", *(f"{x[name]:9.1f}" for name in names))
    if args.json:
        print(json.dumps({"unit": "us", "steps": found}))


if __name__ == "__main__":
    main()
