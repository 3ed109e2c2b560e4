"""Traffic as it comes: an open loop of requests against the engine, or against a server over HTTP.

    python -m benchmarks.traffic --shape 8b --scenario long-beside-chats shared-prefix overload
    python -m benchmarks.traffic --shape 8b --scenario mixed --overlap both
    python -m benchmarks.traffic --shape 8b --scenario mixed --url http://127.0.0.1:8000 --model MODEL

Without --url it starts the engine in this process, on random weights; that needs torch, transformers,
pydantic and msgspec only. Scenarios are in benchmarks/scenarios.py, lengths in benchmarks/data. Prints
one JSON line for each part of a scenario and a table; `python -m benchmarks.report` makes the page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.arguments import amount, count, file
from benchmarks.arrivals import PROCESSES
from benchmarks.engine import release
from benchmarks.pages.traffic import traffic_table
from benchmarks.scenarios import SCENARIOS, SIZES, Scenario, Sizes, Traffic
from benchmarks.targets import Clients, EngineTarget, HttpTarget, now, play, undisturbed
from benchmarks.workloads import save_config, why_not
from engine.config import EngineConfig
from engine.engine import AsyncEngine

BLOCK_SIZE: Literal[16] = 16


def engine_config(
    model: str, scenario: Scenario, sizes: Sizes, overlap: bool, tokens: int, args: Any
) -> EngineConfig:
    return EngineConfig(
        model=model,
        load_format="random",
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        overlap=overlap,
        max_running_requests=min(args.max_running_requests or scenario.max_running, tokens),
        max_waiting_requests=scenario.max_waiting,
        max_tokens_per_step=tokens,
        inter_token_target_ms=args.inter_token_target_ms,
        block_size=BLOCK_SIZE,
        num_blocks=sizes.small_cache // BLOCK_SIZE + 1 if scenario.small_cache else None,
        compile=not args.no_compile,
    )


async def on_engine(
    scenario: Scenario, sizes: Sizes, config: EngineConfig, args: Any
) -> list[dict[str, Any]]:
    engine = AsyncEngine(config)
    begin = now()
    await engine.start()
    start_s = now() - begin
    target = EngineTarget(engine)
    traffic = Traffic(target, partial(play, target), sizes, args.process, args.rate, args.seed)
    try:
        # Of the traffic is neither what is compiled at first use, nor these requests: they would be cached.
        others = replace(traffic, seed=args.seed + 1).recorded("azure-2023-conversation", 1.0)[:16]
        await traffic.play([replace(one, at=0.0, output=min(one.output, 4)) for one in others])
        before = engine.stats()
        with undisturbed():
            lines = await scenario.run(traffic)
        after = engine.stats()
    finally:
        await engine.stop()
    common = {
        "target": "engine",
        "overlap": config.overlap,
        "max_tokens_per_step": engine._scheduler.max_tokens_per_step,
        "inter_token_target_ms": config.inter_token_target_ms,
        "num_blocks": after.blocks_free + after.blocks_cached + after.blocks_owned,
        "preemptions": after.preemptions - before.preemptions,
        "steps": after.steps - before.steps,
        "start_s": start_s,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    return [common | line for line in lines]


async def on_server(scenario: Scenario, sizes: Sizes, args: Any) -> list[dict[str, Any]]:
    with Clients(args.clients) as clients:
        target = HttpTarget(args.url, args.model)
        send = partial(clients.play, args.url, args.model)
        traffic = Traffic(target, send, sizes, args.process, args.rate, args.seed)
        with undisturbed():
            lines = await scenario.run(traffic)
        return [{"target": "http", "device": args.url} | line for line in lines]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, required=True)
    parser.add_argument(
        "--shape", choices=SIZES, required=True, help="of the model, and how much of everything"
    )
    parser.add_argument("--overlap", choices=["both", "on", "off"], default="on")
    parser.add_argument(
        "--max-tokens-per-step",
        type=count,
        nargs="+",
        default=[0],
        help="each in turn; the scenario's by default",
    )
    parser.add_argument(
        "--inter-token-target-ms", type=amount, help="the engine finds its tokens per step, up to those above"
    )
    parser.add_argument("--max-running-requests", type=count, help="the scenario's by default")
    parser.add_argument(
        "--process", choices=PROCESSES, default="gamma", help="arrivals of mixed and overload"
    )
    parser.add_argument("--rate", type=amount, help="requests a second that count as what it can answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--url", help="of a server, in place of an engine here")
    parser.add_argument("--model", help="what the server calls its model")
    parser.add_argument("--clients", type=count, default=4, help="processes that send to the server")
    parser.add_argument("--version", default="", help="what this state of the code is called in the results")
    parser.add_argument("--out", type=file, help="append the JSON lines to this file")
    args = parser.parse_args(argv)
    if not args.url and (why := why_not([args.shape])):
        parser.error(why)
    if bool(args.url) != bool(args.model):
        parser.error("--url and --model go together")
    sizes, lines = SIZES[args.shape], list[dict[str, Any]]()
    overlaps = {"both": [True, False], "on": [True], "off": [False]}[args.overlap]

    def add(name: str, found: list[dict[str, Any]]) -> None:
        for each in found:
            line = {"scenario": name, "shape": args.shape} | each
            line |= {"version": args.version, "date": datetime.now(UTC).strftime("%Y-%m-%d")}
            lines.append(line)
            print(json.dumps(line), flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")

    with tempfile.TemporaryDirectory() as directory:
        model = save_config(args.shape, Path(directory), sizes.context)
        for name in args.scenario:
            scenario = SCENARIOS[name]
            if args.url:
                add(name, asyncio.run(on_server(scenario, sizes, args)))
                continue
            for tokens in args.max_tokens_per_step:
                for overlap in overlaps:
                    release()
                    config = engine_config(
                        model, scenario, sizes, overlap, tokens or scenario.max_tokens_per_step, args
                    )
                    add(name, asyncio.run(on_engine(scenario, sizes, config, args)))
    print("\n".join(["", *traffic_table(lines)]))
    return lines


if __name__ == "__main__":
    main()
