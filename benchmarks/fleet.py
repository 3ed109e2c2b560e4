"""The application as it is, started so that every part of it can be measured, told what to do, and killed.

Beside `deployments/app.py` there are: a replica that can also run its engine without anything around
it; the same one with an engine that only takes its time; and a choice of replicas that follows a file
(`Steering`), so that one start serves for measuring one replica, all of them, and either policy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import ray
from ray import serve
from ray.serve._private.common import ReplicaState
from ray.serve.request_router import PendingRequest, RunningReplica

import deployments.app
import deployments.replica
from benchmarks.latency import window
from benchmarks.paced import PACES, PacedEngine
from benchmarks.targets import Chats, EngineTarget, keep, now, undisturbed
from deployments.replica import EngineReplica
from deployments.routing import TokenRouter
from deployments.settings import Settings
from deployments.submission import Submission
from engine.config import EngineConfig

APPLICATION = "fleet"
CONTROL = "STEPAHEAD_FLEET_CONTROL"
"""Environment variable: the file of the `Steering`."""
PACE = "STEPAHEAD_FLEET_PACE"
"""Environment variable: how much slower than a GPU engines are that only take their time; unset: real ones.

The shape is the name of the model's directory.
"""


@dataclass(frozen=True)
class Steering:
    """What the choice of replicas is to do from now on."""

    replicas: int = 1 << 16
    """Only so many of them get requests."""
    tokens: bool = True
    """As the application chooses; False: as Ray Serve does by default, the shorter of two queues."""

    def apply(self) -> None:
        path = Path(os.environ[CONTROL])
        new = path.with_suffix(".new")
        new.write_text(json.dumps(dataclasses.asdict(self)))
        new.replace(path)

    @classmethod
    def read(cls) -> Steering:
        return cls(**json.loads(Path(os.environ[CONTROL]).read_bytes()))


class SteeredRouter(TokenRouter):
    """`TokenRouter` that does what the `Steering` says."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        steering = Steering.read()
        if pending_request is None or not pending_request.args:
            return await super().choose_replicas(candidate_replicas, pending_request)
        submission = pending_request.args[0]
        if not isinstance(submission, Submission):
            return await super().choose_replicas(candidate_replicas, pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names = sorted(by_name)
        if not steering.tokens:
            open_ = [by_name[name] for name in names[: steering.replicas] if name not in submission.avoid]
            open_ = open_ or candidate_replicas
            return [random.sample(open_, min(2, len(open_)))]
        closed = (*submission.avoid, *names[steering.replicas :])
        steered = msgspec.structs.replace(submission, avoid=closed)
        steered_request = dataclasses.replace(pending_request, args=[steered, *pending_request.args[1:]])
        return await super().choose_replicas(candidate_replicas, steered_request)


class MeasuredReplica(EngineReplica):
    """`EngineReplica`, with or without a device, that says what it is and runs its engine alone."""

    async def __init__(self, *args: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        if pace := os.environ.get(PACE):

            def paced(config: EngineConfig) -> PacedEngine:
                return PacedEngine(config, PACES[Path(config.model).name].slowed(float(pace)))

            vars(deployments.replica)["AsyncEngine"] = paced  # of this process, which is this replica's
        begin = time.perf_counter()
        await super().__init__(*args)
        self._start_s = time.perf_counter() - begin

    async def about(self) -> dict[str, Any]:
        return {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "pid": os.getpid(),
            "start_s": self._start_s,
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "gpus_seen": _visible_gpus(),
            "cores": sorted(os.sched_getaffinity(0)),
        }

    async def bare(self, chats: Chats, ramp: float, seconds: float) -> dict[str, Any]:
        """The engine alone: asked in its own process, without tape, Router and HTTP."""
        begin = now()
        with undisturbed():
            seen = await keep(EngineTarget(self._engine), chats, begin, begin + ramp + seconds)
        found: dict[str, Any] = window(seen, begin + ramp, begin + ramp + seconds)
        return found


def _visible_gpus() -> list[str]:
    import torch

    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


class Fleet:
    """The running application. Ray has to be started, in this process's environment too."""

    def __init__(self, settings: Settings, port: int) -> None:
        vars(deployments.app)["EngineReplica"] = MeasuredReplica
        deployments.app.ROUTER = "benchmarks.fleet.SteeredRouter"
        Steering().apply()
        self.settings, self.port = settings, port
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(deployments.app.build(settings), name=APPLICATION)
        self.engines: Any = serve.get_deployment_handle("MeasuredReplica", APPLICATION)

    def urls(self, ingress: str) -> list[str]:
        """Where clients go: through Serve's ingress of this start, or `direct` to each Router's own port."""
        if ingress != "direct":
            return [f"http://127.0.0.1:{self.port}"]
        client: Any = serve.context._get_global_client()
        groups = ray.get(client._controller.get_target_groups.remote(APPLICATION, from_proxy_manager=True))
        ports = {t.port for group in groups for t in group.targets if group.protocol == "HTTP"}
        return [f"http://127.0.0.1:{port}" for port in sorted(ports - {self.port})]

    async def about(self) -> list[dict[str, Any]]:
        found = await asyncio.to_thread(self.engines.broadcast("about").results)
        return sorted(found, key=lambda each: str(each["replica"]))

    def metrics(self, part: str) -> list[str]:
        """The lines of this node's metrics endpoint whose name contains `part`."""
        node = ray.nodes()[0]  # type: ignore[no-untyped-call]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
        return [line for line in text.splitlines() if part in line.split("{")[0] and line[0] != "#"]

    def running(self) -> int:
        """Replicas that take requests, as Ray Serve sees it."""
        deployment = serve.status().applications[APPLICATION].deployments["MeasuredReplica"]
        return deployment.replica_states.get(ReplicaState.RUNNING, 0)


KINDS = {
    "router": "ServeReplica:fleet:Router",
    "replica": "ServeReplica:fleet:MeasuredReplica",
    "proxy": "ProxyActor",
    "haproxy": "haproxy",
    "controller": "ServeController",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
    "client": "spawn_main",
}
"""What is told apart by the CPU it takes, and what the command lines of its processes contain."""


def processes() -> Iterator[tuple[str, psutil.Process]]:
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        for kind, part in KINDS.items():
            if part in line and "dashboard" not in line:
                yield kind, process
                break


class CpuClock:
    """Cores that each kind of process has used since this was made."""

    def __init__(self) -> None:
        self._begin, self._before = time.perf_counter(), self._read()

    def _read(self) -> dict[int, tuple[str, float]]:
        found = {}
        for kind, process in processes():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            found[process.pid] = kind, times.user + times.system
        return found

    def cores(self) -> dict[str, dict[str, float]]:
        """By kind: `n` processes, `all` their cores together, `most` that of the busiest."""
        seconds, used = time.perf_counter() - self._begin, dict[str, list[float]]()
        for pid, (kind, total) in self._read().items():
            before = self._before.get(pid, (kind, 0.0))[1]
            used.setdefault(kind, []).append((total - before) / seconds)
        return {
            kind: {"n": len(each), "all": round(sum(each), 3), "most": round(max(each), 3)}
            for kind, each in used.items()
        }
