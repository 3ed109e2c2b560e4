"""The application as it is, started so that every part of it can be measured, told what to do, and killed.

Beside `deployments/app.py` there are: a replica that can also run its engine without anything around
it; the same one with an engine that only takes its time; and a choice of replicas that can be steered
(`benchmarks/steering.py`).
"""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pynvml
import ray
from ray import serve

import deployments.app
from benchmarks.latency import window
from benchmarks.lone import LoneEngine, LonePacedEngine
from benchmarks.paced import PACES
from benchmarks.steering import Steering
from benchmarks.targets import Chats, Seen
from deployments.replica import EngineReplica
from deployments.settings import Settings
from engine.config import EngineConfig
from engine.process import EngineProcess

T = TypeVar("T")

APPLICATION = "fleet"
PACE = "STEPAHEAD_FLEET_PACE"
"""Environment variable: how much slower than a GPU engines are that only take their time; unset: real ones.

The shape is the name of the model's directory.
"""
ANSWER = 10.0
"""Seconds in which a replica, the controller or the metrics endpoint answers a question."""


class MeasuredReplica(EngineReplica):
    """`EngineReplica`, with or without a device, that says what it is and runs its engine alone."""

    async def __init__(self, *args: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        begin = time.perf_counter()
        await super().__init__(*args)
        self._start_s = time.perf_counter() - begin

    def engine(self, config: EngineConfig) -> EngineProcess:
        if pace := os.environ.get(PACE):
            return EngineProcess(
                config, partial(LonePacedEngine, pace=PACES[Path(config.model).name].slowed(float(pace)))
            )
        return EngineProcess(config, LoneEngine)

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


def in_time(call: Callable[[], T], seconds: float) -> T:
    """What `call` returns. Raises `TimeoutError` after `seconds`; then it goes on in a thread of its own."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(max(0.0, seconds))


class Fleet:
    """The running application. Ray has to be started, in this process's environment too."""

    def __init__(self, settings: Settings, port: int, within: float) -> None:
        """Raises `RuntimeError`, or `TimeoutError` after `within` seconds, with what Ray Serve says of it."""
        vars(deployments.app)["EngineReplica"] = MeasuredReplica
        deployments.app.ROUTER = "benchmarks.steering.SteeredRouter"
        Steering().apply()
        self.settings, self.port = settings, port
        application = deployments.app.build(settings)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            in_time(lambda: serve.run(application, name=APPLICATION), within)
        except (RuntimeError, TimeoutError) as error:
            raise type(error)(f"{error} {in_time(_complaints, ANSWER)}") from error
        self.engines: Any = serve.get_deployment_handle("MeasuredReplica", APPLICATION)

    def urls(self, ingress: str) -> list[str]:
        """Where clients go: through Serve's ingress of this start, or `direct` to each Router's own port."""
        if ingress != "direct":
            return [f"http://127.0.0.1:{self.port}"]
        client: Any = serve.context._get_global_client()
        asked = client._controller.get_target_groups.remote(APPLICATION, from_proxy_manager=True)
        groups = ray.get(asked, timeout=ANSWER)
        ports = {t.port for group in groups for t in group.targets if group.protocol == "HTTP"}
        return [f"http://127.0.0.1:{port}" for port in sorted(ports - {self.port})]

    async def ask(self, question: str, *args: Any, within: float = ANSWER) -> list[Any]:
        """What the replicas that live answer."""
        asked = self.engines.broadcast(question, *args)
        found = await asked.results_async(timeout_s=within, return_exceptions=True)
        return [each for each in found if not isinstance(each, BaseException) and each is not None]

    async def about(self) -> list[dict[str, Any]]:
        return sorted(await self.ask("about"), key=lambda each: str(each["replica"]))

    def metrics(self, *parts: str) -> list[str]:
        """The lines of this node's metrics endpoint whose name contains all `parts`."""
        node = ray.nodes()[0]  # type: ignore[no-untyped-call]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=ANSWER) as answer:
            lines: list[str] = answer.read().decode().splitlines()
        return [x for x in lines if x[:1] != "#" and all(part in x.split("{")[0] for part in parts)]


def _complaints() -> str:
    found = serve.status().applications[APPLICATION].deployments
    return " ".join(f"{name} {each.status}: {each.message[-1500:]}" for name, each in found.items())


KINDS = {
    "router": "ServeReplica:fleet:Router",
    "replica": "ServeReplica:fleet:MeasuredReplica",
    "engine": "engine.worker",
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
