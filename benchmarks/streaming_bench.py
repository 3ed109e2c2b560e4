"""The running application of the streaming benchmark, and one run of all its streams."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
from ray import serve
from ray.serve.context import _get_global_client

from benchmarks.ports import free_port
from benchmarks.streaming_app import MODEL, build
from deployments import demo_model
from deployments.text import Tokenizer

CONTEXT = 1 << 16
WORDS = 512
PROCESSES = {
    "Router": "StreamingRouter",
    "engine": "PacedReplica",
    "proxy": "ProxyActor",
    "haproxy": "haproxy",
}
"""What is told apart by the CPU it takes, and what the command lines of its processes contain."""


def find_words() -> dict[int, str]:
    """Tokens that are a blank and a word each, so that tokens can be counted in a text."""
    tokenizer = Tokenizer(demo_model.resolve(MODEL))
    found: dict[int, str] = {}
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if text[:1] == b" " and text[1:].isalpha() and len(found) < WORDS:
            found[token] = text.decode()
    return found


class Bench:
    """The application on a Ray of its own."""

    def __init__(self, routers: int, streams: int, seconds: float, haproxy: bool) -> None:
        words = find_words()
        self._words, self._texts = list(words), list(words.values())
        self._streams, self._seconds = streams, seconds
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(self._words, CONTEXT, routers), name="streaming")
        self._engine: Any = serve.get_deployment_handle("PacedReplica", "streaming")
        self.ports = {"proxy": [port]}
        """Of each route."""
        if haproxy:
            client: Any = _get_global_client()
            groups = ray.get(client._controller.get_target_groups.remote("streaming", True))
            direct = [target.port for group in groups for target in group.targets]
            self.ports = {"haproxy": [port], "direct": direct}
            _wait_for_haproxy(len(direct))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()

    def length(self, rate: float) -> int:
        """Tokens in each stream, to take about the seconds of a run at `rate` tokens/s in all."""
        return max(10, int(rate * self._seconds / self._streams))

    def run(self, port: str, path: str, length: int, rate: float | None = None) -> dict[str, Any]:
        """All streams once, by one route. `rate`: tokens/s that the engine makes; None without an engine."""
        if rate is not None:
            self._engine.pace.remote(self._streams / rate, self._streams).result()
        bodies, texts = [], []
        for i in range(self._streams):
            first = self._words[i % WORDS]
            every = [self._texts[(first + k) % len(self._texts)] for k in range(length)]
            texts.append(self._texts[i % WORDS] * length if rate is None else "".join(every))
            fields = {"model": MODEL, "prompt": [first], "max_tokens": length, "stream": True}
            bodies.append(json.dumps(fields))
        job = {"ports": self.ports[port], "path": path, "bodies": bodies, "texts": texts}
        before, began = _cpu_seconds(), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.streaming_clients"],
            input=json.dumps(job),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        used = {name: seconds - before[name] for name, seconds in _cpu_seconds().items()}
        came = json.loads(done.stdout)
        arrivals: list[list[float]] = came["arrivals"]
        emitted: list[float] = [] if rate is None else self._engine.emitted.remote().result()
        start = emitted[0] if emitted else came["began"]
        seconds = max(times[-1] for times in arrivals) - start
        tokens = self._streams * length
        result: dict[str, Any] = {
            "tokens_per_s": tokens / seconds,
            "tokens_per_event": tokens / came["events"],
            "events_per_read": came["events"] / came["reads"],
            "cpu": {"clients": came["cpu_s"] / seconds} | {k: v / seconds for k, v in used.items()},
            "wall_s": time.perf_counter() - began,
        }
        if emitted:
            late = sorted(time - emitted[k] for times in arrivals for k, time in enumerate(times))
            result |= {f"latency_ms_p{q}": 1e3 * late[len(late) * q // 100] for q in (50, 90, 99)}
            result["offered_tokens_per_s"] = tokens / (emitted[-1] - emitted[0])
        return result


def _cpu_seconds() -> dict[str, float]:
    """What the application's processes have used so far, those of all Routers together."""
    used = dict.fromkeys(PROCESSES, 0.0)
    folder = os.path.dirname(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    ours = psutil.Process().children(recursive=True)
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            own = folder in line if "haproxy" in line else process in ours
            times = process.cpu_times()
        except psutil.Error:
            continue
        for name, part in PROCESSES.items():
            if own and part in line:
                used[name] += times.user + times.system
    return used


def _wait_for_haproxy(routers: int) -> None:
    """Return when HAProxy knows all Routers; until then, Serve's own proxy stands in."""
    path = Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    servers: list[list[str]] = []
    for _ in range(300):
        for found in path.parent.glob(f"*/{path.name}"):  # in a folder named after the node
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as admin:
                admin.connect(str(found))
                admin.sendall(b"show stat\n")
                rows = [line.split(",") for line in admin.makefile() if line.count(",") > 20]
                servers = [row for row in rows if row[1] not in ("svname", "FRONTEND", "BACKEND")]
        if sum(row[17].startswith("UP") and row[19] == "1" for row in servers) == routers:
            return
        time.sleep(0.1)
    raise TimeoutError(f"HAProxy does not see {routers} Routers: {servers}")
