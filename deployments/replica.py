"""EngineReplica: one engine, in a process of its own, behind Ray Serve. Token ids in, token ids out."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from ray import serve

from deployments import demo_model
from deployments.affinity import pin_to_gpu
from deployments.autoscaling import replica_stats
from deployments.execution import Executor
from deployments.exporter import Exporter
from deployments.gpu import own_gpu
from deployments.logs import join_serve_logs
from deployments.metrics import ServeRecorder
from deployments.settings import TelemetrySettings
from deployments.submission import Refusal, Submission
from deployments.tracing import otlp_provider, tracer_to
from engine.collector import spare_collector
from engine.config import EngineConfig
from engine.overlap import trace_events
from engine.process import EngineProcess
from engine.stats import EngineStats

logger = logging.getLogger(__name__)


class EngineReplica:
    """What Ray Serve runs on each GPU."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, telemetry: TelemetrySettings
    ) -> None:
        if config.device == "cuda":
            pin_to_gpu(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        join_serve_logs()
        model = await asyncio.to_thread(demo_model.resolve, config.model)
        threads = config.cpu_threads
        if threads is None and config.device == "cpu":  # Ray has set OMP_NUM_THREADS to its `num_cpus`
            threads = len(os.sched_getaffinity(0))
        tracer = tracer_to(otlp_provider("EngineReplica") if telemetry.tracing else None)
        self._engine = self.engine(config.model_copy(update={"model": model, "cpu_threads": threads}))
        await self._engine.start()
        self._engine.failed.add_done_callback(_leave)
        name = serve.get_replica_context().replica_id.unique_id
        self._executor = Executor(self._engine, name, config.model, tracer)
        self._name = name
        self._model = config.model
        self._rows, self._step_tokens = config.max_running_requests, self._engine.max_tokens_per_step
        gpu = own_gpu(self._engine.gpu_uuid) if self._engine.gpu_uuid else None
        record = ServeRecorder(gpu_uuid=gpu.uuid if gpu else "")
        exporter = Exporter(
            self._engine, record, config.model, gpu, self._executor.meter, telemetry.gpu_cost_per_hour
        )
        self._exporting = asyncio.create_task(exporter.run())
        spare_collector()

    def engine(self, config: EngineConfig) -> EngineProcess:
        """The engine, not started."""
        return EngineProcess(config)

    async def submit(self, submission: Submission) -> Refusal | None:
        """Run one attempt at a sequence; its tokens go on the tape of the Router that sent it.

        Returns when it has ended and that Router has all tokens, or says why it came to nothing.
        """
        return await self._executor.run(submission)

    async def context_length(self, model: str) -> int | None:
        """Tokens of prompt and answer together, at most; None if this is not a replica of `model`."""
        return self._engine.context_length if model == self._model else None

    async def stats(self) -> EngineStats:
        return await self._engine.ask_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve asks every few seconds, and gives the means to `TokenPolicy`."""
        return replica_stats(self._executor.load(), self._rows, self._step_tokens)

    async def timeline(self, steps: int) -> tuple[str, list[dict[str, Any]]]:
        """The name of this replica, and what it did in its last steps as events of a Chrome trace."""
        recording = await self._engine.recent(steps)
        return self._name, trace_events(recording, f"EngineReplica {self._name}")

    async def check_health(self) -> None:
        """Ray Serve replaces a replica whose check raises, or takes too long: the loop has to turn."""
        await self._engine.turn()


def _leave(failed: asyncio.Future[str]) -> None:
    """End this process, so that Ray Serve replaces the replica at once, and its requests wait for that.

    A replica that stayed, if only to say that it cannot serve them, would be asked in vain until then.
    """
    logger.error("this replica ends: %s", failed.result())
    os._exit(1)
