"""How fast the engine is on this machine's GPU, against what its memory and matrix units allow.

    python -m benchmarks.engine --workload 8b-b32 0.6b-b32 --runs 3 [--out benchmarks/results/h200.jsonl]
    python -m benchmarks.engine --workload 8b-b32 --peer vllm transformers
    python -m benchmarks.engine --shape 8b --requests 16 --prompt 100 --output 50
    python -m benchmarks.engine --model $(python -m deployments.demo_model) --requests 32 --output 128

Measures the limits, then runs each workload with overlap on and off in one process, on the same random
weights and prompts, checks that every request got exactly its tokens and that those of on and off are
equal, then runs the peers, and at last looks at the kernels with a profiler, which slows down what comes
after. Prints a table and a JSON line for each run. `python -m benchmarks.report` makes the page of the
lines. Needs torch, transformers, pydantic and msgspec only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import arguments
from benchmarks.limits import measure_limits, percentages, read_bandwidth
from benchmarks.measuring import Measured, Prompts
from benchmarks.pages.engine import screen
from benchmarks.peers import PEERS, Stuck, within
from benchmarks.workloads import (
    SHAPES,
    WORKLOADS,
    Workload,
    chat_prompts,
    random_prompts,
    save_config,
    why_not,
)
from engine.config import EngineConfig

LONG_RUN = 60.0
"""Seconds: what takes longer runs once with overlap off and on a peer, whatever `--runs` says."""
PEER_START = 150.0
"""Seconds that a peer may take to start; then five times what the engine took, and 20 s, for each run."""


def release() -> None:
    """Give back the memory of what was measured before."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Case:
    """One workload: its model, its prompts, and what was measured of it so far."""

    def __init__(self, workload: Workload, folder: Path, args: argparse.Namespace) -> None:
        self.workload, self.args = workload, args
        self.random = workload.shape in SHAPES
        self.model = workload.shape
        if self.random:
            self.model = save_config(
                workload.shape, folder / workload.name, workload.prompt + workload.output
            )
        self.lines: list[dict[str, Any]] = []
        self.limits: dict[str, Any] = {}
        self._tokens: dict[tuple[bool, int], list[list[int]]] = {}

    def prompts(self, run: int) -> Prompts:
        """Other ones for each run, so that none is in the prefix cache; the same for whatever runs them."""
        workload = self.workload
        if self.random:
            return random_prompts(workload, seed=run)
        return chat_prompts(self.model, workload.requests, first=run * workload.requests)

    def warm_up(self) -> Prompts:
        return [prompt[::-1] for prompt in self.prompts(0)]

    def config(self, overlap: bool) -> EngineConfig:
        args = self.args
        return EngineConfig(
            model=self.model,
            load_format="random" if self.random else "safetensors",
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
            overlap=overlap,
            max_running_requests=self.workload.requests,
            max_tokens_per_step=args.max_tokens_per_step,
            block_size=args.block_size,
            attention=args.attention,
            cuda_graphs=not args.no_graphs,
            compile=not args.no_compile,
        )

    def measure_limits(self, bandwidth: float, device: torch.device) -> None:
        release()
        self.limits = measure_limits(
            transformers.AutoConfig.from_pretrained(self.model),
            self.workload,
            statistics.mean(map(len, self.prompts(0))),
            max_tokens_per_step=self.args.max_tokens_per_step,
            bandwidth=bandwidth,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            device=device,
        )._asdict()

    def line(self, overlap: bool, run: int, peer: str | None, figures: dict[str, Any]) -> dict[str, Any]:
        """A line of the results: what ran, its figures, and these against the limits."""
        workload, args = self.workload, self.args
        made = {
            "workload": workload.name,
            "shape": Path(workload.shape).name,
            "requests": workload.requests,
            "prompt": workload.prompt,
            "output": workload.output,
            "overlap": overlap,
            "run": run,
            "peer": peer,
            "block_size": args.block_size,
            "attention": args.attention,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "version": args.version,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "tokens_equal": None,
            "gpu_active_kernels": None,
            **self.limits,
            **figures,
        }
        return made | percentages(made)

    async def measure(self, overlap: bool, args: argparse.Namespace, results: Results) -> None:
        """All runs on one started engine."""
        release()
        measured = Measured(self.config(overlap))
        await measured.start(self.warm_up(), self.workload.output)
        for run in range(args.runs):
            figures, tokens = await measured.run(self.prompts(run), self.workload.output)
            figures["tokens_checked"] &= not (self.random and figures["cached_tokens"])
            line = self.line(overlap, run, None, figures)
            self._tokens[overlap, run] = tokens
            if (not overlap, run) in self._tokens:
                other = next(each for each in self.lines if each["run"] == run)
                line["tokens_equal"] = other["tokens_equal"] = tokens == self._tokens[not overlap, run]
            self.lines.append(line)
            results.add(line)
            if not overlap and figures["total_s"] > LONG_RUN:
                break
        await measured.stop()

    def measure_peer(self, name: str, overlaps: list[bool], results: Results) -> None:
        """Synchronous and asynchronous batching of the peer, each as often as the engine ran."""
        release()
        peer = PEERS[name](self.model)
        for overlap in overlaps:
            ours = [line for line in self.lines if line["overlap"] is overlap]
            ours = ours[: 1 if ours[0]["total_s"] > LONG_RUN / 5 else None]
            prompts = [self.prompts(line["run"]) for line in ours]
            limit = PEER_START + sum(20 + 5 * line["total_s"] for line in ours)
            try:
                found = within(
                    limit,
                    lambda stop: peer.run(self.warm_up(), prompts, self.workload.output, overlap, stop),  # noqa: B023
                )
            except Exception as error:
                results.add(self.line(overlap, 0, name, {"error": f"{type(error).__name__}: {error}"}))
                results.stuck = isinstance(error, Stuck)
                if results.stuck:
                    return
                continue
            for line, (figures, tokens) in zip(ours, found, strict=True):
                if tokens is not None:
                    own = self._tokens[overlap, line["run"]]
                    figures["tokens_equal_share"] = equal = share_of_equal(own, tokens)
                    figures["tokens_equal"] = equal == 1
                figures["ratio"] = line["output_tokens_per_s"] / figures["output_tokens_per_s"]
                results.add(self.line(overlap, line["run"], name, figures))

    async def profile(self, overlap: bool) -> str:
        """Kernels of a short run, on an engine of its own: into the lines of the runs. Returns a table."""
        release()
        measured = Measured(self.config(overlap))
        await measured.start(self.warm_up(), self.workload.output)
        figures, table = await measured.profile(self.prompts(0), self.workload.output)
        await measured.stop()
        for line in self.lines:
            if line["overlap"] is overlap:
                line |= figures
        return f"{self.workload.name}, overlap {'on' if overlap else 'off'}, prompts included\n{table}\n"


def share_of_equal(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Of all tokens, those that are equal at the same place; after one that is not, few are."""
    return statistics.mean(
        a == b for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=False)
    )


class Results:
    """Lines so far, also at the end of a file, whole whenever the program is killed."""

    def __init__(self, out: Path | None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.stuck = False
        self._out = out
        self._before = out.read_text() if out and out.exists() else ""

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        print(screen([line])[-1], flush=True)
        self.save()

    def save(self) -> None:
        if self._out:
            text = self._before + "".join(json.dumps(line) + "\n" for line in self.lines)
            self._out.write_text(text)


def run(args: argparse.Namespace, workloads: list[Workload], folder: Path, results: Results) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    overlaps = {"both": [True, False], "on": [True], "off": [False]}[args.overlap]
    bandwidth = read_bandwidth(device)
    print("\n".join(screen([])), flush=True)
    cases = [Case(workload, folder, args) for workload in workloads]
    for case in cases:
        case.measure_limits(bandwidth, device)
        for overlap in overlaps:
            asyncio.run(case.measure(overlap, args, results))
    for case in cases:
        for peer in args.peer:
            case.measure_peer(peer, overlaps, results)
            if results.stuck:
                return  # what still runs would be in the way of what is measured
    tables = [asyncio.run(case.profile(overlap)) for case in cases for overlap in overlaps if on_gpu]
    results.save()
    if args.profile:
        args.profile.write_text("\n".join(tables))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=[])
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument(
        "--model",
        type=arguments.folder,
        help="directory of a chat model with its weights, in place of --shape",
    )
    parser.add_argument("--requests", type=arguments.count, default=32)
    parser.add_argument("--prompt", type=arguments.count, default=256)
    parser.add_argument("--output", type=arguments.count, default=128)
    parser.add_argument(
        "--runs", type=arguments.count, default=1, help="of each configuration, on one started engine"
    )
    parser.add_argument("--overlap", choices=["both", "on", "off"], default="both")
    parser.add_argument("--max-tokens-per-step", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--attention", choices=["auto", "torch", "triton", "flashinfer"], default="auto")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--version", default="", help="what this state of the code is called in the results")
    parser.add_argument(
        "--peer", nargs="+", choices=PEERS, default=[], help="also run these, on the same shapes and prompts"
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--profile", type=arguments.file, help="write tables of kernels to this file (on a GPU)"
    )
    parser.add_argument("--out", type=arguments.file, help="append the JSON lines to this file")
    args = parser.parse_args()
    workloads = [WORKLOADS[name] for name in args.workload]
    for shape in filter(None, (args.shape, args.model)):
        name = f"{Path(shape).name}-{args.requests}x{args.prompt}+{args.output}"
        workloads.append(Workload(name, shape, args.requests, args.prompt, args.output))
    if not workloads:
        parser.error("name a --workload, --shape or --model")
    if why := why_not(each.shape for each in workloads):
        parser.error(why)
    for peer in args.peer:
        if find_spec(peer) is None:
            parser.error(f"argument --peer: {peer} is not installed here")
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("engine").setLevel(logging.INFO)
    results = Results(args.out)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(args, workloads, Path(folder), results)
    finally:
        print("", *map(json.dumps, results.lines), "", *screen(results.lines), sep="\n", flush=True)
    if results.stuck:
        os._exit(1)  # a thread that does not end would keep the interpreter from its end
    if not all(line.get("tokens_checked", True) for line in results.lines):
        sys.exit("not every request got exactly its tokens")


if __name__ == "__main__":
    main()
