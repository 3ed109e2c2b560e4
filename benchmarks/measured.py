"""`EngineReplica`, with or without a device, that says what it is and runs its engine alone.

In a module of its own, since this is all that its process has to import.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pynvml

from benchmarks.latency import window
from benchmarks.lone import lone_engine
from benchmarks.targets import Chats, Seen
from deployments.replica import EngineReplica
from engine.config import EngineConfig
from engine.process import EngineProcess

PACE = "STEPAHEAD_FLEET_PACE"
"""Environment variable: how much slower than a GPU engines are that only take their time; unset: real ones.

The shape is the name of the model's directory.
"""


class MeasuredReplica(EngineReplica):
    """See above."""

    async def __init__(self, *args: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        begin = time.perf_counter()
        await super().__init__(*args)
        self._start_s = time.perf_counter() - begin

    def engine(self, config: EngineConfig) -> EngineProcess:
        pace = os.environ.get(PACE)
        return EngineProcess(config, partial(lone_engine, pace=float(pace) if pace else None))

    async def about(self) -> dict[str, Any]:
        return {
            "replica": self._name,
            "pid": os.getpid(),
            "start_s": self._start_s,
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "gpus_seen": await self._engine.call("visible_gpus"),
            "cores": sorted(os.sched_getaffinity(0)),
            "cores_near_gpu": _cores_near(self._engine.gpu_uuid),
            "blocks_free": (await self.stats()).blocks_free,
        }

    async def bare(
        self, names: Sequence[str], chats: Chats, begin: float, ramp: float, seconds: float
    ) -> dict[str, Any] | None:
        """The engine alone, asked from within its process. None: not of `names`."""
        if self._name not in names:
            return None
        share = chats.share(list(names).index(self._name), len(names))
        first, last = begin + ramp, begin + ramp + seconds
        seen: list[Seen] = await self._engine.call("keep", share, begin, last)
        found: dict[str, Any] = window(seen, first, last) | {"steps": await self.steps(first, last)}
        return found

    async def steps(self, begin: float, end: float) -> dict[str, Any] | None:
        """The engine's steps between two times, by its own timeline; None if there was none."""
        found: dict[str, Any] | None = await self._engine.call("steps", begin, end)
        return found and {"replica": self._name} | found


def _cores_near(uuid: str | None) -> list[int] | None:
    """The cores of the GPU's own memory node, as NVML says; None if it says nothing."""
    if uuid is None:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        words = pynvml.nvmlDeviceGetCpuAffinity(handle, (os.cpu_count() or 1) // 64 + 1)
    except pynvml.NVMLError:
        return None
    return [core for core in range(64 * len(words)) if words[core // 64] >> core % 64 & 1]
