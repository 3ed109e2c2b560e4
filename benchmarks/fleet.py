"""The application as it is, started so that every part of it can be measured, told what to do, and killed.

Beside `deployments/app.py` there are: a replica that can also run its engine without anything around it
(`benchmarks/measured.py`), and a choice of replicas that can be steered (`benchmarks/steering.py`).
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import psutil
import ray
from ray import serve

import deployments.app
from benchmarks.measured import MeasuredReplica
from benchmarks.steering import Steering
from deployments.settings import Settings

T = TypeVar("T")

APPLICATION = "fleet"
ANSWER = 10.0
"""Seconds in which a replica, the controller or the metrics endpoint answers a question."""


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
