"""Debian's Prometheus for tests: `apt-get install prometheus` has the server and promtool."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from engine.metrics import Metric
from tests.http_server import QuietHandler, serving

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool are absent: apt-get install prometheus (.ci/run does so, as root)",
)


@dataclass
class Prometheus:
    """A running server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series with a value now; none of them NaN. Raises `AssertionError` with what Prometheus says."""
        answer = httpx.post(f"{self.url}/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{answer.get('error')}: {expression}"
        result = answer["data"]["result"]
        return [series for series in result if series["value"][1] != "NaN"]

    def labels(self, series: str, label: str) -> set[str]:
        """As Grafana's `label_values`."""
        answer = httpx.get(f"{self.url}/api/v1/label/{label}/values", params={"match[]": series}).json()
        return set(answer["data"])

    def targets(self) -> list[dict[str, Any]]:
        active: list[dict[str, Any]] = httpx.get(f"{self.url}/api/v1/targets").json()["data"]["activeTargets"]
        return active


@contextmanager
def prometheus(folder: Path, port: int, discovery: Path, recorded: str, rules: Path) -> Iterator[Prometheus]:
    """A server that scrapes what Ray's service-discovery file names, each second, and `recorded` as well."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": "ray", "file_sd_configs": [{"files": [str(discovery)], "refresh_interval": "1s"}]},
            {"job_name": "recorded", "static_configs": [{"targets": [recorded]}]},
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            while True:
                assert process.poll() is None, (folder / "prometheus.log").read_text()
                try:
                    if httpx.get(f"{server.url}/-/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            process.wait()


APPLICATION = "recorded"
GPU = "GPU-00000000-0000-0000-0000-000000000001"


@contextmanager
def recording(metrics: list[Metric], node: dict[str, float]) -> Iterator[str]:
    """An exporter of series that a machine without a GPU does not have, in the form that Ray gives them.

    Its application is `APPLICATION`, its only GPU `GPU`; `node` has readings of Ray's by name. Counters grow
    at each scrape.
    """
    scrapes = 0

    def text() -> str:
        serve = {"application": APPLICATION, "deployment": "EngineReplica", "replica": "a"}
        lines = []
        for metric in metrics:
            own = dict.fromkeys(metric.labels, "x")
            own |= {"gpu_uuid": GPU} if metric.owner == "engine" else {"deployment": "Router", "replica": "r"}
            assert metric.kind != "histogram", "to be written when one is needed"
            value = float(scrapes) if metric.kind == "counter" else 1.0
            lines += [f"# TYPE {metric.exported} {metric.kind}", _sample(metric.exported, serve | own, value)]
        for name, value in node.items():
            labels = {"ip": "10.0.0.1", "GpuIndex": "0", "GpuDeviceName": "NVIDIA H200", "GpuUuid": GPU}
            lines += [f"# TYPE {name} gauge", _sample(name, labels, value)]
        return "\n".join(lines) + "\n"

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            nonlocal scrapes
            scrapes += 1
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text().encode())

    with serving(Handler) as address:
        yield address


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value}"
