"""Every query of every dashboard and alert, by Debian's Prometheus, against the running application."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from typer.testing import CliRunner

from benchmarks.ports import free_port
from dashboards import promql
from dashboards.__main__ import app
from dashboards.alerts import ALERTS
from dashboards.export import DASHBOARDS, write_alerts, write_dashboards
from deployments.app import build
from deployments.settings import Settings, TelemetrySettings
from engine.metrics import (
    ENGINE_INFO,
    HTTP_REQUESTS,
    METRICS,
    PREEMPTIONS,
    RESUMPTIONS,
    SEQUENCES_FINISHED,
)
from tests.fake_grafana import FakeGrafana
from tests.panel_queries import queries
from tests.prometheus import APPLICATION as RECORDED
from tests.prometheus import GPU, Prometheus, needs_prometheus, prometheus, recording

pytestmark = [
    needs_prometheus,
    pytest.mark.slow,
    # Ray leaves its log files and its pipes to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

ABSENT = {
    metric.exported: "NVML reads GPUs, and there is none" for metric in METRICS.values() if metric.gpu_only
} | {
    promql.NODE_GPU_UTILIZATION: "Ray reads GPUs, and there is none",
    promql.NODE_GPU_TEMPERATURE: "Ray reads GPUs, and there is none",
    RESUMPTIONS.exported: "no replica is lost here",
    PREEMPTIONS.exported: "the cache has room for all requests",
}
"""What this application does not export, and why: checked on recorded series instead."""
WINDOW = "20s"


@dataclass
class Live:
    prometheus: Prometheus
    grafana: FakeGrafana
    grafana_url: str
    ray_url: str
    output: Path
    """Ray's `RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR`."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Ray with its dashboard, the application, Prometheus, a Grafana that stores only, and traffic."""
    folder = tmp_path_factory.mktemp("live")
    ports = {name: free_port() for name in ("prometheus", "dashboard", "http")}
    about = " ".join(query.expression for query in queries() if absent(query.expression))
    gone = [metric for metric in METRICS.values() if re.search(rf"\b{metric.exported}\b", about)]
    node = {name: 42.0 for name in ABSENT if not name.startswith("ray_stepahead")}
    grafana = FakeGrafana(reaches={f"http://127.0.0.1:{ports['prometheus']}"})
    with ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True))
        grafana_url = stack.enter_context(grafana.serve())
        recorded = stack.enter_context(recording(gone, node))
        discovery = Path(temporary, "prom_metrics_service_discovery.json")
        server = stack.enter_context(
            prometheus(folder, ports["prometheus"], discovery, recorded, write_alerts(folder))
        )
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("RAY_GRAFANA_HOST", grafana_url)
        environment.setenv("RAY_PROMETHEUS_HOST", server.url)
        environment.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", str(folder / "boards"))
        ray.init(
            num_cpus=3,
            include_dashboard=True,
            dashboard_port=ports["dashboard"],
            _temp_dir=temporary,
            _system_config={"metrics_report_interval_ms": 1000},
            log_to_driver=False,
        )
        try:
            serve.start(http_options={"port": ports["http"]})
            # Between one and two engines, since a fixed number is not autoscaling's business.
            settings = Settings(max_replicas=2, telemetry=TelemetrySettings(gpu_cost_per_hour=2))
            serve.run(build(settings), name="stepahead")
            traffic = Traffic(f"http://127.0.0.1:{ports['http']}")
            ray_url = f"http://127.0.0.1:{ports['dashboard']}"
            try:
                yield Live(server, grafana, grafana_url, ray_url, folder / "boards")
            finally:
                traffic.stop()
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()


def wanted() -> dict[str, str]:
    """Expressions by place, for the live application or, if about what it lacks, the recorded one."""
    found = {
        str(query): query.filled(WINDOW, application=RECORDED if absent(query.expression) else "stepahead")
        for query in queries()
    }
    for alert in ALERTS:
        found |= {f"{alert.name}: {value}": value for value, _ in alert.conditions}
    return found


def absent(expression: str) -> set[str]:
    return set(re.findall(r"\bray_\w+", expression)) & ABSENT.keys()


class Traffic:
    """Clients of every kind, until it is stopped: whole, streaming, wrong, and gone before the end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        chat = {"model": "demo", "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 12}
        with httpx.Client(base_url=f"{self._url}/v1", timeout=60) as client:
            while not self._stopping.is_set():
                client.post("/chat/completions", json=chat | {"n": 3}).raise_for_status()
                client.post("/chat/completions", json=chat | {"stream": True}).raise_for_status()
                ends = chat | {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 60}
                client.post("/chat/completions", json=ends).raise_for_status()  # by a stop token, learnt late
                client.post("/completions", json={"model": "demo", "prompt": "One, two", "max_tokens": 8})
                assert client.post("/chat/completions", json={"model": "demo"}).status_code == 400
                endless = chat | {"stream": True, "max_tokens": 300, "ignore_eos": True}
                with client.stream("POST", "/chat/completions", json=endless) as answer:
                    next(answer.iter_bytes())
                with suppress(httpx.ReadTimeout):  # before it has a status
                    client.post("/chat/completions", json=endless | {"stream": False}, timeout=0.5)


def test_every_query_returns_data(live: Live) -> None:
    """Parsed by Prometheus, and with at least one value that is a number."""
    left = wanted()
    values: dict[str, list[Any]] = {}
    deadline = time.monotonic() + 90
    while left and time.monotonic() < deadline:
        for place, expression in list(left.items()):
            if found := live.prometheus.query(expression):
                values[place] = found
                del left[place]
    assert sorted(left) == [], "no data"
    assert not [place for place, found in values.items() if any("Inf" in s["value"][1] for s in found)]


def test_what_is_listed_as_absent_is_absent(live: Live) -> None:
    for name, reason in ABSENT.items():
        assert live.prometheus.query(f'{name}{{job="ray"}}') == [], f"there is some: {reason}?"


def test_a_gpu_reading_of_ray_finds_its_replica(live: Live) -> None:
    joined = promql.on_gpu_of(ENGINE_INFO, promql.NODE_GPU_UTILIZATION)
    [query] = [query for query in queries() if query.expression == joined]
    [series] = live.prometheus.query(query.filled(WINDOW, application=RECORDED))
    assert (series["metric"]["replica"], series["metric"]["gpu_uuid"]) == ("a", GPU)
    assert float(series["value"][1]) == 42


def test_variables_have_values(live: Live) -> None:
    for board in DASHBOARDS.values():
        for variable in board()["templating"]["list"]:
            if variable["type"] == "query":
                series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
                found = live.prometheus.labels(re.sub(r"\$\w+", ".*", series), label)
                assert found, variable["query"]
                expected = {"application": {"stepahead"}, "deployment": {"Router", "EngineReplica"}}
                assert expected.get(label, found) <= found


def test_who_leaves_is_nobodys_error(live: Live) -> None:
    """Streams are left all the time: those end as aborts, and no answer counts as an error of the server."""
    ended = live.prometheus.query(f"sum by (reason) ({SEQUENCES_FINISHED.exported})")
    assert {series["metric"]["reason"] for series in ended} == {"stop", "length", "abort"}
    answers = live.prometheus.query(f"sum by (status) ({HTTP_REQUESTS.exported})")
    assert {series["metric"]["status"] for series in answers} <= {"200", "400", "499"}


def test_no_alert_fires(live: Live) -> None:
    firing = live.prometheus.query('ALERTS{alertstate="firing"}')
    assert [series["metric"]["alertname"] for series in firing] == []


def test_rays_dashboard_finds_prometheus_and_grafana(live: Live) -> None:
    """As docs/monitoring.md says; and every dashboard whose panels it embeds is one that `apply` uploads."""
    assert httpx.get(f"{live.ray_url}/api/prometheus_health").json()["result"] is True
    health = httpx.get(f"{live.ray_url}/api/grafana_health").json()
    assert health["result"] is True, health
    assert health["data"]["grafanaHost"] == live.grafana_url
    assert health["data"]["dashboardDatasource"] == "Prometheus"

    own = write_dashboards(live.output)  # beside Ray's, for Grafana's file provider
    rays = sorted(set(live.output.glob("*.json")) - set(own))
    url = live.grafana_url.replace("://", "://admin:secret@")
    done = CliRunner().invoke(
        app, ["apply", "--grafana", url, "--prometheus", live.prometheus.url, *map(str, rays)]
    )
    assert done.exit_code == 0, done.output
    uids = set(health["data"]["dashboardUids"].values())
    assert uids <= live.grafana.dashboards.keys()
    assert {f"stepahead-{name}" for name in DASHBOARDS} <= live.grafana.dashboards.keys()
