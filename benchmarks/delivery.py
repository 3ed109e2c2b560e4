"""What one step costs the two processes of a replica: the engine's, and the one that delivers and exports.

    python -m benchmarks.delivery [--json] [--requests 256] [--routers 8] [--step-ms 0] [--seconds 5]
    py-spy record --subprocesses --rate 500 --format raw -o cpu.txt -- python -m benchmarks.delivery

The real `EngineProcess`, `Executor`, tapes and exporter, with a device that only takes its time
(benchmarks/paced.py: none by default, so steps come as fast as the host makes them) and Routers that
only acknowledge, in a process of their own, over sockets. As many requests run at any time as asked
for; they end one after the other and new ones take their place. Threads of one process share its GIL, so
what a step costs the busier process is nearly the shortest that a step can be, whatever the device. Ray
Serve's own work is not here, nor is the launch of a step (benchmarks/host_step.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import psutil
import transformers
import uvloop

from benchmarks.arguments import amount, count
from benchmarks.paced import Pace, PacedEngine
from deployments.execution import Executor
from deployments.exporter import Exporter
from deployments.metrics import ServeRecorder
from deployments.submission import Submission
from deployments.tape import Address, TapeListener
from engine.config import EngineConfig
from engine.process import EngineProcess
from engine.request import SamplingParams

WINDOW = 1.0
"""Seconds of one measurement; the median of all is told."""


def acknowledge(routers: int, pipe: Connection) -> None:
    """Listen as so many Routers do, until killed."""

    async def listen() -> None:
        listeners = [TapeListener(lambda record: True, lambda *_: None) for _ in range(routers)]
        pipe.send([await listener.start("127.0.0.1") for listener in listeners])
        await asyncio.Event().wait()

    asyncio.run(listen())


async def keep(executor: Executor, tapes: list[Address], i: int, prompt: int, output: int) -> None:
    """One client, who asks again whenever it has its answer; the first ones differ in length."""
    random_ = random.Random(i)
    tokens = random_.randint(1, output)
    for attempt in range(1_000_000):
        words = [random_.randint(1, 999) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=tokens, seed=random_.getrandbits(63))
        refusal = await executor.run(
            Submission("model", tapes[i % len(tapes)], 1_000_000 * i + attempt, 0, words, sampling)
        )
        assert refusal is None, refusal
        tokens = output


def cpu_times(engine: EngineProcess) -> dict[str, float]:
    """CPU seconds of the engine's process and of this one."""
    there = psutil.Process(engine.pid).cpu_times()
    return {"engine": there.user + there.system, "delivery": time.process_time()}


async def measure(args: argparse.Namespace, tapes: list[Address]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        transformers.Qwen3Config(vocab_size=1000, max_position_embeddings=4096).save_pretrained(directory)
        config = EngineConfig(model=directory, max_running_requests=args.requests, prefix_caching=True)
        engine = EngineProcess(config, partial(PacedEngine, pace=Pace(args.step_ms / 1e3, 0, 0)))
        await engine.start()
    executor = Executor(engine, "replica", "model")
    exporter = Exporter(engine, ServeRecorder(), "model", None, executor.meter)
    tasks = [asyncio.create_task(exporter.run())]
    for i in range(args.requests):
        tasks.append(asyncio.create_task(keep(executor, tapes, i, args.prompt, args.output)))
    await asyncio.sleep(2 * WINDOW)
    windows: list[dict[str, float]] = []
    for _ in range(max(1, round(args.seconds / WINDOW))):
        stats = await engine.ask_stats()
        begin, before = time.perf_counter(), cpu_times(engine)
        frames = executor.meter.frames
        await asyncio.sleep(WINDOW)
        now = await engine.ask_stats()
        after, end = cpu_times(engine), time.perf_counter()
        steps = now.steps - stats.steps
        windows.append(
            {
                **{name: (after[name] - before[name]) / steps * 1e6 for name in after},
                "frames": (executor.meter.frames - frames) / steps,
                "step": (end - begin) / steps * 1e6,
                "ends": (sum(now.finished.values()) - sum(stats.finished.values())) / steps,
                "tokens_per_s": (now.output_tokens - stats.output_tokens) / (end - begin),
            }
        )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engine.stop()
    return {name: round(median(each[name] for each in windows), 2) for name in windows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=count, default=256)
    parser.add_argument("--routers", type=count, default=8)
    parser.add_argument("--prompt", type=count, default=128)
    parser.add_argument("--output", type=count, default=256)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--seconds", type=amount, default=5.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.step_ms >= 0:
        parser.error("--step-ms: at least 0")
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    readers = spawn.Process(target=acknowledge, args=(args.routers, there), daemon=True)
    readers.start()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # Ray's choice, too
            found = runner.run(measure(args, here.recv()))
    finally:
        readers.terminate()
    if args.json:
        print(json.dumps(vars(args) | found))
        return
    print("CPU us a step:", *(f"{name} {found[name]:,.0f}" for name in ("engine", "delivery")))
    print(
        f"a step took {found['step']:,.0f} us, {found['ends']:.2f} requests ended in each, with"
        f" {found['frames']:.1f} frames,"
        f" {found['tokens_per_s']:,.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
