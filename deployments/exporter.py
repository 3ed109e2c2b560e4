"""What one EngineReplica exports: reads its engine, its GPU and its tapes about once a second."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from deployments.gpu import Gpu, GpuReading
from deployments.metrics import Recorder
from deployments.tape_meter import TapeMeter
from engine import metrics as m
from engine.config import EngineConfig
from engine.stats import EngineStats, Reading, sample
from engine.timeline import PHASES, StepTimes, Totals

logger = logging.getLogger(__name__)

T = TypeVar("T")

PERIOD = 1.0
"""Seconds. Ray forgets a gauge that is not set for 20."""
SAMPLES = 50
"""Of so many steps, waits and round trips, drawn from all, each histogram is made: 8 tapes alone have
2,000 round trips a second, and each takes as much of the process as delivering a dozen tokens does."""
PORTION = 20
"""Steps recorded at once: about 0.2 ms."""
RATES_OVER = 60.0
"""Seconds over which tokens per joule and cost are averaged."""


class Engine(Protocol):
    """What is needed of an engine here."""

    config: EngineConfig
    device: str

    async def reading(self, after: int, most: int) -> Reading: ...


class Exporter:
    """Everything is a difference to the time before, so `export` may come as often or seldom as it likes."""

    def __init__(
        self,
        engine: Engine,
        record: Recorder,
        model: str,
        gpu: Gpu | None,
        tapes: TapeMeter,
        cost_per_hour: float | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._record = record
        self._model = model
        self._gpu = gpu
        self._tapes = tapes
        self._cost_per_hour = cost_per_hour
        self._version = _version()
        self._before: dict[tuple[m.Metric, str], float] = {}
        self._step = -1
        self._clock = clock
        self._time = clock()
        self._active = 0.0
        self._work = (0.0, 0.0)  # of the host, and what was hidden of it
        self._overlap = 0.0
        self._rates: deque[tuple[float, int, float | None]] = deque()  # time, output tokens, joules

    async def run(self) -> None:
        """Export until cancelled, also while nothing happens."""
        while True:
            try:
                await self.export()
            except Exception:  # what is measured goes on
                logger.exception("metrics were not exported")
            await asyncio.sleep(PERIOD)

    async def export(self) -> None:
        stats, totals, queue_times, steps, last = await self._engine.reading(self._step, SAMPLES)
        reading = await asyncio.to_thread(self._gpu.read) if self._gpu else None
        self._export_info()
        self._export_gpu(reading, stats.output_tokens)
        self._export_overlap(totals)
        self._export_engine(stats)
        self._export_tapes()
        await self._spread(partial(self._record.observe, m.QUEUE), queue_times)
        round_trips = sample(self._tapes.round_trips(), SAMPLES)
        await self._spread(partial(self._record.observe, m.TAPE_ROUND_TRIP), round_trips)
        self._step = last
        await self._spread(self._export_step, steps)

    async def _spread(self, export: Callable[[T], None], items: list[T]) -> None:
        """A few at a time: between them the event loop turns."""
        for i, item in enumerate(items, 1):
            export(item)
            if i % PORTION == 0:
                await asyncio.sleep(0)

    def _count(self, metric: m.Metric, total: float, label: str = "") -> None:
        """Raise a counter to `total`."""
        key = metric, label
        rise = total - self._before.get(key, 0)
        self._before[key] = total
        self._record.add(metric, rise, **dict(zip(metric.labels, (label,), strict=False)))

    def _export_info(self) -> None:
        config, gpu = self._engine.config, self._gpu
        self._record.set(
            m.ENGINE_INFO,
            1,
            model=self._model,
            accelerator=gpu.name if gpu else self._engine.device,
            mig=str(bool(gpu and gpu.mig)).lower(),
            overlap=str(config.overlap).lower(),
            version=self._version,
        )
        self._record.set(m.RUNNING_LIMIT, config.max_running_requests)
        self._record.set(m.KV_BLOCK_SIZE, config.block_size)

    def _export_gpu(self, reading: GpuReading | None, tokens: int) -> None:
        if reading is not None:
            for metric, value in (
                (m.GPU_UTILIZATION, reading.utilization),
                (m.GPU_MEMORY_USED, reading.memory_used),
                (m.GPU_MEMORY_TOTAL, reading.memory_total),
                (m.GPU_POWER, reading.power),
            ):
                if value is not None:
                    self._record.set(metric, value)
        energy = reading.energy if reading else None
        now = self._clock()
        self._rates.append((now, tokens, energy))
        while now - self._rates[0][0] > RATES_OVER and len(self._rates) > 2:
            self._rates.popleft()
        began, tokens_then, energy_then = self._rates[0]
        made = tokens - tokens_then
        if energy is not None and energy_then is not None:
            self._before.setdefault((m.GPU_ENERGY, ""), energy)  # the driver has counted before us
            self._count(m.GPU_ENERGY, energy)
            if energy > energy_then:
                self._record.set(m.TOKENS_PER_JOULE, made / (energy - energy_then))
        if self._cost_per_hour is not None:
            self._record.set(m.GPU_COST, self._cost_per_hour)
            if made:
                cost = self._cost_per_hour * (now - began) / 3600
                self._record.set(m.TOKEN_COST, cost / made * 1e6)

    def _export_overlap(self, totals: Totals) -> None:
        now = self._clock()
        active, (work, hidden) = totals.active - self._active, self._work
        # A step counts when it is collected, so one that began earlier may exceed the time since.
        self._record.set(m.GPU_ACTIVE_RATIO, min(active / max(now - self._time, 1e-9), 1.0))
        if totals.work > work:
            self._overlap = (totals.hidden - hidden) / (totals.work - work)
        self._record.set(m.OVERLAP_RATIO, self._overlap)
        self._active, self._time, self._work = totals.active, now, (totals.work, totals.hidden)
        self._count(m.ACTIVE_SECONDS, totals.active)
        self._count(m.GAP_SECONDS, totals.gap)
        self._count(m.DECODE_TOKENS, totals.decodes)
        self._count(m.CARRIED_TOKENS, totals.carried)
        for phase in PHASES:
            self._count(m.HOST_PHASE, totals.phases[phase], phase)
        for kind, count in totals.steps.items():
            self._count(m.STEPS, count, kind)

    def _export_engine(self, stats: EngineStats) -> None:
        self._record.set(m.RUNNING, stats.running)
        self._record.set(m.WAITING, stats.waiting)
        self._record.set(m.KV_BLOCKS, stats.blocks_owned, state="used")
        self._record.set(m.KV_BLOCKS, stats.blocks_cached, state="cached")
        self._record.set(m.KV_BLOCKS, stats.blocks_free, state="free")
        self._count(m.PROMPT_TOKENS, stats.prompt_tokens)
        self._count(m.PREFIX_HIT_TOKENS, stats.cached_tokens)
        self._count(m.OUTPUT_TOKENS, stats.output_tokens)
        self._count(m.WASTED_TOKENS, stats.wasted_tokens)
        self._count(m.PREEMPTIONS, stats.preemptions)
        self._count(m.ADMITTED, stats.admitted)
        for reason, count in stats.finished.items():
            self._count(m.FINISHED, count, reason)
        for cause, count in stats.aborted.items():
            self._count(m.ABORTS, count, cause)

    def _export_tapes(self) -> None:
        tapes = self._tapes
        self._record.set(m.TAPES, tapes.open)
        self._record.set(m.TAPE_LAG, tapes.lag())
        self._count(m.TAPE_FRAMES, tapes.frames)
        self._count(m.TAPE_BYTES, tapes.bytes)
        self._count(m.TAPE_RECORDS, tapes.records)

    def _export_step(self, step: StepTimes) -> None:
        self._record.observe(m.STEP_COMPUTE, step.timing.compute)
        self._record.observe(m.HOST_STEP, step.work)
        self._record.observe(m.STEP_REQUESTS, step.requests)
        self._record.observe(m.STEP_TOKENS, step.tokens)
        if not step.after_idle:
            self._record.observe(m.STEP_GAP, step.timing.gap)


def _version() -> str:
    try:
        return importlib.metadata.version("stepahead")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
