"""`python -m dashboards apply`, by the real client over real HTTP, to a Grafana that is not one."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import pytest

from dashboards.__main__ import main
from dashboards.export import DASHBOARDS
from tests.fake_grafana import FakeGrafana

PROMETHEUS = "http://prometheus:9090"
Apply = Callable[..., str]


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Apply:
    """Runs the command; what it printed. Raises `SystemExit` with what it says to failures."""

    def run(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["dashboards", "apply", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        if ended.value.code:
            raise ended.value
        return capsys.readouterr().out

    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    return run


@pytest.fixture
def grafana() -> FakeGrafana:
    return FakeGrafana(reaches={PROMETHEUS})


@pytest.fixture
def url(grafana: FakeGrafana) -> Iterator[str]:
    with grafana.serve() as url:
        yield url.replace("://", "://admin:secret@")


def test_twice_is_as_good_as_once(apply: Apply, grafana: FakeGrafana, url: str) -> None:
    first = apply("--grafana", url, "--prometheus", PROMETHEUS)
    assert first.count("created") == 2 + len(DASHBOARDS)
    assert grafana.dashboards.keys() == {f"stepahead-{name}" for name in DASHBOARDS}
    grafana.writes.clear()
    second = apply("--grafana", url, "--prometheus", PROMETHEUS)
    assert second.count("unchanged") == 2 + len(DASHBOARDS)
    assert grafana.writes == []
    assert {saved["meta"]["version"] for saved in grafana.dashboards.values()} == {1}


def test_dashboards_begin_with_the_data_source(apply: Apply, grafana: FakeGrafana, url: str) -> None:
    apply("--grafana", url, "--prometheus", PROMETHEUS)
    uid = grafana.sources["Prometheus"]["uid"]
    for saved in grafana.dashboards.values():
        [variable] = [v for v in saved["dashboard"]["templating"]["list"] if v["type"] == "datasource"]
        assert variable["current"]["value"] == uid


def test_only_what_differs_is_written(apply: Apply, grafana: FakeGrafana, url: str) -> None:
    apply("--grafana", url, "--prometheus", PROMETHEUS)
    grafana.dashboards["stepahead-fleet"]["dashboard"]["panels"].pop()  # somebody's change by hand
    grafana.dashboards["stepahead-replica"]["dashboard"]["weekStart"] = "monday"  # a default of Grafana's
    grafana.sources["Prometheus"]["url"] = "http://elsewhere:9090"
    grafana.writes.clear()
    out = apply("--grafana", url, "--prometheus", PROMETHEUS)
    assert "data source Prometheus: updated" in out
    assert "dashboard stepahead-fleet: updated" in out
    assert out.count("unchanged") == 1 + len(DASHBOARDS) - 1
    assert grafana.writes == ["PUT /api/datasources/uid/ds1", "POST /api/dashboards/db"]
    assert grafana.sources["Prometheus"]["url"] == PROMETHEUS


def test_other_dashboards_go_along(apply: Apply, grafana: FakeGrafana, url: str, tmp_path: Path) -> None:
    """As those of Ray, for the panels that its own dashboard embeds."""
    other = tmp_path / "serve_grafana_dashboard.json"
    other.write_text(
        json.dumps({"uid": "rayServeDashboard", "title": "Serve", "panels": [], "id": 7, "version": 4})
    )
    for change in ("created", "unchanged"):
        out = apply("--grafana", url, "--prometheus", PROMETHEUS, other)
        assert f"dashboard rayServeDashboard: {change}" in out
    other.write_text("{}")
    with pytest.raises(SystemExit, match="is no dashboard with a uid"):
        apply("--grafana", url, "--prometheus", PROMETHEUS, other)


@pytest.mark.parametrize("prefix", ["", "/grafana"])
def test_a_token_and_a_path(
    apply: Apply, monkeypatch: pytest.MonkeyPatch, grafana: FakeGrafana, prefix: str
) -> None:
    grafana.prefix = prefix
    monkeypatch.setenv("GRAFANA_TOKEN", "secret")
    with grafana.serve() as url:
        assert "created" in apply("--grafana", url, "--prometheus", PROMETHEUS)


def test_a_wrong_password(apply: Apply, grafana: FakeGrafana, url: str) -> None:
    with pytest.raises(SystemExit) as ended:
        apply("--grafana", url.replace("secret", "guess"), "--prometheus", PROMETHEUS)
    text = str(ended.value.code)
    assert "does not accept user admin: wrong password" in text
    assert "guess" not in text
    assert grafana.writes == []


def test_a_password_of_any_letters(apply: Apply, grafana: FakeGrafana, url: str) -> None:
    grafana.password = "a/b#c:ü@"
    there = url.replace("secret", quote(grafana.password, safe=""))
    assert "created" in apply("--grafana", there, "--prometheus", PROMETHEUS)


def test_a_wrong_token_and_none(apply: Apply, grafana: FakeGrafana, url: str) -> None:
    with pytest.raises(SystemExit, match="does not accept the token"):
        apply("--grafana", url, "--prometheus", PROMETHEUS, "--token", "guess")
    with pytest.raises(SystemExit, match="does not accept no user"):
        apply("--grafana", url.replace("admin:secret@", ""), "--prometheus", PROMETHEUS)


def test_no_right_to_write(apply: Apply, grafana: FakeGrafana, url: str) -> None:
    grafana.may_write = False
    with pytest.raises(SystemExit, match="user admin may not change data sources"):
        apply("--grafana", url, "--prometheus", PROMETHEUS)


def test_a_missing_data_source(apply: Apply, grafana: FakeGrafana, url: str) -> None:
    with pytest.raises(SystemExit, match=r"has none named 'Prometheus'\. Give --prometheus URL to make it$"):
        apply("--grafana", url)
    apply("--grafana", url, "--prometheus", PROMETHEUS, "--datasource", "Metrics")
    with pytest.raises(SystemExit, match="or --datasource with one of: Metrics"):
        apply("--grafana", url)
    assert "unchanged" in apply("--grafana", url, "--datasource", "Metrics")
    grafana.sources["Logs"] = {"uid": "l", "name": "Logs", "type": "loki", "url": "http://loki"}
    with pytest.raises(SystemExit, match="'Logs' is of type loki"):
        apply("--grafana", url, "--datasource", "Logs")


def test_a_prometheus_that_grafana_cannot_reach(apply: Apply, grafana: FakeGrafana, url: str) -> None:
    with pytest.raises(SystemExit, match=r"cannot use 'Prometheus': .*nowhere:9090.*connection refused"):
        apply("--grafana", url, "--prometheus", "http://nowhere:9090")
    assert grafana.dashboards == {}


def test_a_host_that_does_not_answer(apply: Apply) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://admin:secret@127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(SystemExit, match=r"^grafana: http://127\.0\.0\.1:\d+ does not answer: ") as ended:
            apply("--grafana", url, "--prometheus", PROMETHEUS)
    assert "secret" not in str(ended.value.code)
    for wrong in ("localhost:3000", "http://admin:secret@localhost:port", "http://admin:secret@[::1"):
        with pytest.raises(SystemExit, match="is no URL such as") as ended:
            apply("--grafana", wrong)
        assert "secret" not in str(ended.value.code)


@pytest.mark.parametrize(
    ("kind", "body"), [("text/html", b"<html>"), ("application/json", b"[]"), ("a/b", b"")]
)
def test_something_else_answers(apply: Apply, kind: str, body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(SystemExit, match="is no Grafana"):
            apply("--grafana", f"http://127.0.0.1:{server.server_port}", "--prometheus", PROMETHEUS)
        thread.join()


def test_a_dashboard_from_a_file_is_left_to_the_file(apply: Apply, grafana: FakeGrafana, url: str) -> None:
    apply("--grafana", url, "--prometheus", PROMETHEUS)
    grafana.dashboards["stepahead-fleet"]["meta"]["provisioned"] = True
    assert "fleet: unchanged" in apply("--grafana", url, "--prometheus", PROMETHEUS)
    grafana.dashboards["stepahead-fleet"]["dashboard"]["panels"].pop()
    with pytest.raises(SystemExit, match="is provisioned from a file"):
        apply("--grafana", url, "--prometheus", PROMETHEUS)
