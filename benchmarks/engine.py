"""How fast the engine is on this machine's GPU, against what its memory allows.

    python -m benchmarks.engine --workload 8b-b32 0.6b-b32 [--out benchmarks/results/h200.jsonl]
    python -m benchmarks.engine --shape 8b --requests 16 --prompt 100 --output 50
    python -m benchmarks.engine --model $(python -m deployments.demo_model) --requests 32 --output 128

Runs each workload with overlap on and off in one process, on the same random weights and prompts,
checks that every request got exactly its tokens and that the tokens of both are equal, and prints
one JSON line for each run and a table. `python -m benchmarks.report` makes the page of the lines.
Needs torch, transformers and pydantic only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.peers import run_transformers
from benchmarks.workloads import SHAPES, WORKLOADS, Workload, chat_prompts, limit_ms, save_config
from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.request import Request, SamplingParams
from engine.timeline import Recording, Timeline

MOST_STEPS = 20_000


def report(recording: Recording) -> dict[str, Any]:
    """By the engine's own timeline, of the steps that only decode. Milliseconds, but gaps in microseconds."""
    steps, phases = recording.steps, defaultdict[str, list[float]](list)
    for span in recording.spans:
        if span.phase != "idle":
            phases[span.phase].append((span.end - span.begin) * 1e3)
    between = [
        (later.collected - earlier.collected) * 1e3
        for earlier, later in itertools.pairwise(steps)
        if later.kind == "decode"
    ]
    gaps = [each.timing.gap * 1e6 for each in steps[1:]]
    computed = sum(each.timing.compute for each in steps)
    return {
        "steps": len(steps),
        "ms_per_step": statistics.median(between) if between else None,
        "ms_per_step_p99": float(np.percentile(between, 99)) if between else None,
        "host_ms": {name: statistics.median(times) for name, times in phases.items()},
        "gpu_active_events": computed / (computed + sum(gaps) / 1e6),
        "gap_us_p50": float(np.percentile(gaps, 50)) if gaps else None,
        "gap_us_p99": float(np.percentile(gaps, 99)) if gaps else None,
    }


def timing_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


async def run_engine(
    config: EngineConfig, prompts: list[list[int]], output: int, profile: Path | None = None
) -> tuple[dict[str, Any], list[list[int]]]:
    """All requests admitted at once; returns the figures and every request's tokens."""
    engine = AsyncEngine(config)
    engine.timeline = Timeline(MOST_STEPS)
    begin = time.perf_counter()
    await engine.start()
    start_s = time.perf_counter() - begin

    async def generate(name: str, prompt: list[int], n: int) -> list[int]:
        tokens: list[int] = []
        sampling = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
        async for each in engine.generate(Request(name, prompt, sampling)):
            tokens += each.tokens
        return tokens

    await asyncio.gather(*(generate(f"warm-{i}", p[::-1], min(output, 8)) for i, p in enumerate(prompts)))
    gate, warm = threading.Event(), engine.timeline.recent(1).steps[-1].step

    def hold() -> None:
        gate.wait()  # so that no step begins before all requests are there

    engine._inbox.put(hold)
    tasks = [asyncio.create_task(generate(f"{i}", p, output)) for i, p in enumerate(prompts)]
    await asyncio.sleep(0)
    begin = time.perf_counter()
    gate.set()
    tokens = await asyncio.gather(*tasks)
    total_s = time.perf_counter() - begin
    figures = report(engine.timeline.recent(after=warm)) | {"total_s": total_s, "start_s": start_s}
    figures["output_tokens_per_s"] = len(prompts) * output / total_s
    blocks = engine._scheduler.counts().total
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            await asyncio.gather(
                *(generate(f"profile-{i}", p, min(output, 33)) for i, p in enumerate(prompts))
            )
        table = profiler.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=100
        )
        profile.write_text("All kernels of a run of 33 tokens a request, prefill included.\n" + table)
    await engine.stop()
    short = [i for i, got in enumerate(tokens) if len(got) != output]
    if short:
        raise RuntimeError(f"requests {short} did not get exactly {output} tokens")
    return figures | {"num_blocks": blocks}, tokens


def read_bandwidth() -> float:
    """Bytes per second that a reduction over 8 GiB reads: the ceiling that limits are taken from."""
    data = torch.empty(2**31, dtype=torch.int32, device="cuda").random_()
    times = []
    for _ in range(8):
        begin, end = (timing_event() for _ in range(2))
        begin.record()
        data.max()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(data.numel() * data.element_size() / statistics.median(times))


def line(workload: Workload, overlap: bool, peer: str | None, args: Any) -> dict[str, Any]:
    """What was run, for the record."""
    return {
        "workload": workload.name,
        "shape": Path(workload.shape).name,
        "requests": workload.requests,
        "prompt": workload.prompt,
        "output": workload.output,
        "overlap": overlap,
        "peer": peer,
        "block_size": args.block_size,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "version": args.version,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def release() -> None:
    """Give back the memory of what was measured before."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(workload: Workload, overlaps: list[bool], bandwidth: float | None, args: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    first = None

    def add(figures: dict[str, Any]) -> None:
        lines.append(figures)
        print(json.dumps(figures), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(figures) + "\n")

    with tempfile.TemporaryDirectory() as directory:
        if workload.shape in SHAPES:
            model = save_config(workload.shape, Path(directory), workload.prompt + workload.output)
            rng = np.random.default_rng(0)
            vocab = SHAPES[workload.shape]["vocab_size"]
            prompts = rng.integers(1, vocab, (workload.requests, workload.prompt)).tolist()
        else:
            model = workload.shape
            prompts = chat_prompts(model, workload.requests)
        mean_context = statistics.mean(map(len, prompts)) + workload.output / 2
        shape = transformers.AutoConfig.from_pretrained(model)
        for overlap in overlaps:
            release()
            config = EngineConfig(
                model=model,
                load_format="random" if workload.shape in SHAPES else "safetensors",
                dtype="bfloat16" if torch.cuda.is_available() else "float32",
                overlap=overlap,
                max_running_requests=workload.requests,
                max_tokens_per_step=args.max_tokens_per_step,
                block_size=args.block_size,
                attention=args.attention,
                cuda_graphs=not args.no_graphs,
                compile=not args.no_compile,
            )
            figures, tokens = asyncio.run(
                run_engine(config, prompts, workload.output, args.profile if overlap else None)
            )
            first = first or tokens
            add(
                line(workload, overlap, None, args)
                | figures
                | {
                    "limit_ms": bandwidth and limit_ms(shape, workload.requests, mean_context, bandwidth),
                    "tokens_equal": tokens == first,
                }
            )
        for overlap in overlaps if args.peer else []:
            release()
            figures, tokens = run_transformers(model, prompts, workload.output, overlap)
            equal = statistics.mean(
                a == b
                for ours, theirs in zip(first or [], tokens, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            )
            add(
                line(workload, overlap, args.peer, args)
                | figures
                | {"limit_ms": lines[0]["limit_ms"], "tokens_equal": equal == 1, "tokens_equal_share": equal}
            )
        if workload.shape not in SHAPES:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
            text = tokenizer.decode(tokens[0])
            print(f"the first answer: {text[:200]!r}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, default=[])
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model", help="directory of a chat model with its weights, in place of --shape")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--overlap", choices=["both", "on", "off"], default="both")
    parser.add_argument("--max-tokens-per-step", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--attention", choices=["auto", "torch", "triton", "flashinfer"], default="auto")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--version", default="", help="what this state of the code is called in the results")
    parser.add_argument("--peer", choices=["transformers"], help="also run this, on the same weights")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--profile", type=Path, help="write a table of kernels (overlap on) to this file")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    args = parser.parse_args()
    workloads = [WORKLOADS[name] for name in args.workload]
    if args.shape:
        name = f"{args.shape}-{args.requests}x{args.prompt}+{args.output}"
        workloads.append(Workload(name, args.shape, args.requests, args.prompt, args.output))
    if not torch.cuda.is_available():
        args.profile = None
    if args.model:
        name = f"{Path(args.model).name}-{args.requests}+{args.output}"
        workloads.append(Workload(name, args.model, args.requests, args.prompt, args.output))
    overlaps = {"both": [True, False], "on": [True], "off": [False]}[args.overlap]
    bandwidth = read_bandwidth() if torch.cuda.is_available() else None
    lines = [each for workload in workloads for each in run(workload, overlaps, bandwidth, args)]
    print(
        f"\n{'workload':24} overlap  ms/step     p99   limit  tokens/s   total s  GPU active  gap us  equal"
    )
    for x in lines:
        name = x["workload"] if x["peer"] is None else f"{x['workload']}, {x['peer']}"
        print(
            f"{name:24} {'on ' if x['overlap'] else 'off'}     {x['ms_per_step'] or 0:7.3f} "
            f"{x['ms_per_step_p99'] or 0:7.3f} {x['limit_ms'] or 0:7.3f} {x['output_tokens_per_s']:9.0f} "
            f"{x['total_s']:9.2f}  {x.get('gpu_active_events', 0):9.4f} {x.get('gap_us_p50') or 0:7.1f}  "
            f"{x['tokens_equal']}"
        )


if __name__ == "__main__":
    main()
