"""What is measured on one started engine: whole runs by its timeline, its kernels by a profiler."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.collector import spare_collector
from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.request import FinishReason, Output, Request, SamplingParams
from engine.timeline import IDLE, PHASES, Recording, StepTimes, Timeline

MOST_STEPS = 20_000
PROFILED = 48
"""Tokens of each request while a profiler looks on."""

Prompts = list[list[int]]


def decode_steps(recording: Recording) -> list[StepTimes]:
    """Those that only decode; all where there are none, as with one token out."""
    return [step for step in recording.steps if step.kind == "decode"] or recording.steps


def host_ms(recording: Recording) -> dict[str, float]:
    """The host's time in each phase of a step, medians: `collect` is its wait, the others are its work."""
    sums: dict[str, dict[int, float]] = {phase: defaultdict(float) for phase in PHASES if phase != IDLE}
    for span in recording.spans:
        if span.phase != IDLE:
            sums[span.phase][span.step] += (span.end - span.begin) * 1e3
    steps = [step.step for step in decode_steps(recording)]
    return {phase: statistics.median(found[step] for step in steps) for phase, found in sums.items()}


def summary(recording: Recording) -> dict[str, Any]:
    """By the engine's own timeline. Milliseconds of decode steps; gaps, of all steps, in microseconds."""
    steps = recording.steps
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
        "host_ms": host_ms(recording),
        "host_work_ms": statistics.median(step.work for step in decode_steps(recording)) * 1e3,
        "gpu_active_events": computed / (computed + sum(gaps) / 1e6),
        "gap_us_p50": float(np.percentile(gaps, 50)) if gaps else None,
        "gap_us_p99": float(np.percentile(gaps, 99)) if gaps else None,
    }


class Measured:
    """A started engine. `start` first, `stop` last; prompts must be new to its prefix cache."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = AsyncEngine(config)
        self.engine.timeline = self.timeline = Timeline(MOST_STEPS)
        self.start_s = 0.0
        self._names = itertools.count()

    async def start(self, prompts: Prompts, output: int) -> None:
        """Start it, and run these once, so that nothing is compiled later."""
        begin = time.perf_counter()
        await self.engine.start()
        self.start_s = time.perf_counter() - begin
        spare_collector()
        await self._all(prompts, min(output, 8))

    async def stop(self) -> None:
        await self.engine.stop()

    async def run(self, prompts: Prompts, output: int) -> tuple[dict[str, Any], list[list[int]]]:
        """All requests admitted at once; returns the figures and every request's tokens."""
        before, last = self.engine.stats(), self.timeline.recent(1).steps[-1].step
        gate = threading.Event()

        def hold() -> None:
            gate.wait()  # so that no step begins before all requests are there

        self.engine._inbox.put(hold)
        task = asyncio.ensure_future(self._all(prompts, output))
        await asyncio.sleep(0)  # the gathering
        await asyncio.sleep(0)  # the requests
        begin = time.perf_counter()
        gate.set()
        tokens = await task
        total_s = time.perf_counter() - begin
        after = self.engine.stats()
        computed = after.prompt_tokens - before.prompt_tokens
        cached = after.cached_tokens - before.cached_tokens
        return {
            **summary(self.timeline.recent(after=last)),
            "total_s": total_s,
            "output_tokens_per_s": sum(map(len, tokens)) / total_s,
            "cached_tokens": cached,
            "tokens_checked": all(len(each) == output for each in tokens)
            and computed + cached >= sum(map(len, prompts)),
            "start_s": self.start_s,
            "startup_s": self.engine.startup_s,
            "start_after_weights_s": self.start_s - self.engine.startup_s["weights"],
            "num_blocks": after.blocks_free + after.blocks_cached + after.blocks_owned,
        }, tokens

    async def profile(self, prompts: Prompts, output: int) -> tuple[dict[str, Any], str]:
        """Kernels of a short run by torch.profiler: figures of its decode steps, and a table of all of it."""
        last = self.timeline.recent(1).steps[-1].step
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            await self._all(prompts, min(output, PROFILED))
        steps = decode_steps(self.timeline.recent(after=last))
        table = profiler.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=100
        )
        return kernel_figures(kernel_spans(profiler), steps), table

    async def _all(self, prompts: Prompts, output: int) -> list[list[int]]:
        return await asyncio.gather(*(self._tokens(prompt, output) for prompt in prompts))

    async def _tokens(self, prompt: list[int], n: int) -> list[int]:
        """Read as the engine's own process reads (engine/worker.py): no task wakes for a token."""
        tokens: list[int] = []
        ended = asyncio.get_running_loop().create_future()

        def sink(output: Output) -> None:
            tokens.extend(output.tokens)
            if output.finish_reason is FinishReason.ERROR:
                ended.set_exception(RuntimeError("the engine failed; its log says why"))
            elif output.finish_reason is not None:
                ended.set_result(None)

        sampling = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
        self.engine.submit(Request(f"{next(self._names)}", prompt, sampling), sink)
        await ended
        return tokens


# Kernels


class Span(NamedTuple):
    """Seconds of one clock."""

    begin: float
    end: float


def kernel_spans(profiler: torch.profiler.profile) -> list[Span]:
    """Of the kernels alone, without copies and fills."""
    return [
        Span(event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or ()  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
    ]


def busy(spans: list[Span], begin: float, end: float) -> float:
    """Seconds of begin..end that lie in any of the spans."""
    total, through = 0.0, begin
    for span in sorted(spans):
        last = min(span.end, end)
        total += max(last - max(span.begin, through), 0.0)
        through = max(through, last)
    return total


def kernel_figures(spans: list[Span], steps: list[StepTimes]) -> dict[str, Any]:
    """Of profiled steps, `steps` among them: the share of their time in which any kernel ran.

    Only steps of the most requests count, as those at the end have fewer. The last kernel belongs to
    the last step, which puts the profiler's clock beside the host's. A profiler slows steps down;
    `kernel_ms_per_step` says what of a step its kernels are, whatever lies between them.
    """
    most = max(step.requests for step in steps)
    full = [step.collected for step in steps if step.requests == most]
    if len(full) < 2 or not spans:
        return {"gpu_active_kernels": None}
    offset = max(span.end for span in spans) - steps[-1].collected
    begin, end = full[0] + offset, full[-1] + offset
    worked, n = busy(spans, begin, end), len(full) - 1
    return {
        "gpu_active_kernels": worked / (end - begin),
        "kernel_ms_per_step": worked / n * 1e3,
        "profiled_ms_per_step": (end - begin) / n * 1e3,
    }
