"""Engines that, asked from outside their process, load themselves and tell of their steps."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from benchmarks.paced import PacedEngine
from benchmarks.targets import Chats, EngineTarget, Seen, keep
from engine.collector import spare_collector
from engine.engine import AsyncEngine
from engine.overlap import overlap_report
from engine.timeline import Recording


class LoneEngine(AsyncEngine):
    """What an engine does with nothing around it: no tape, no Router, no HTTP, not even another process."""

    async def keep(self, chats: Chats, begin: float, end: float) -> list[Seen]:
        """Keep that many streams open, see `benchmarks.targets.keep`."""
        spare_collector()
        return await keep(EngineTarget(self), chats, begin, end)

    async def steps(self, begin: float, end: float) -> dict[str, Any] | None:
        """The steps between two times, by the timeline; None if there was none."""
        whole = self.timeline.recent()
        steps = [each for each in whole.steps if begin <= each.launched and each.collected < end]
        if len(steps) < 2:
            return None
        spans = [span for span in whole.spans if begin <= span.begin and span.end < end]
        found = overlap_report(Recording(steps, spans))
        between = [b.collected - a.collected for a, b in itertools.pairwise(steps) if b.kind == "decode"]
        return {
            "steps": found.steps,
            "requests": float(np.mean([each.requests for each in steps])),
            "step_ms_p50": float(np.percentile(between, 50)) * 1e3 if between else None,
            "step_ms_p99": float(np.percentile(between, 99)) * 1e3 if between else None,
            "gap_us_p50": found.gap_us_p50,
            "gap_us_p99": found.gap_us_p99,
            "compute_ms": found.compute_ms,
            "host_ms": found.host_ms,
            "active_ratio": found.active_ratio,
        }

    def visible_gpus(self) -> list[str]:
        """Their UUIDs."""
        return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


class LonePacedEngine(PacedEngine, LoneEngine):
    """Without a device."""
