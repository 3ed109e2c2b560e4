"""Every alert on recorded series, by `promtool test rules`: it fires when it should, and only then."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.alerts import ALERTS, group
from dashboards.promql import (
    APPLICATION_STATUS,
    PROXY_STATUS,
    QUEUED_QUERIES,
    REPLICA_HEALTHY,
    TARGET_REPLICAS,
)
from dashboards.slo import TTFT_SECONDS
from engine import metrics as m
from tests.prometheus import needs_prometheus

pytestmark = needs_prometheus

APP = 'application="stepahead"'
ENGINE = f'{APP},deployment="EngineReplica",replica="a"'
ROUTER = f'{APP},deployment="Router",replica="r"'
TTFT = m.TIME_TO_FIRST_TOKEN.exported


def first_tokens(late: str, every: str) -> dict[str, str]:
    """Counters of first tokens by minute: all of them, and those in time."""
    grows = int(every) - int(late)
    return {
        f'{TTFT}_bucket{{{ROUTER},le="{TTFT_SECONDS}"}}': f"0+{grows}x150",
        f"{TTFT}_count{{{ROUTER}}}": f"0+{every}x150",
    }


def kv(used: int, cached: int, free: int) -> dict[str, str]:
    states = {"used": used, "cached": cached, "free": free}
    return {f'{m.KV_BLOCKS.exported}{{{ENGINE},state="{s}"}}': f"{n}x60" for s, n in states.items()}


def comes_and_goes(replicas: int, wanted: int) -> dict[str, str]:
    """So many replicas one after the other, two minutes each, where some are wanted at once."""
    target = {f'{TARGET_REPLICAS}{{{APP},deployment="EngineReplica"}}': f"{wanted}x60"}
    return target | {
        f'{REPLICA_HEALTHY}{{{APP},deployment="EngineReplica",replica="{i}"}}': "_ " * (2 * i) + "1 1 stale"
        for i in range(replicas)
    }


@dataclass(frozen=True)
class Case:
    name: str
    series: dict[str, str]
    """By minute, in promtool's notation."""
    at: str
    fires: tuple[str, ...] = ()
    """Alerts; the label that tells which of several follows the name: `Alert/replica=a`."""


WAITING, ACTIVE = m.WAITING.exported, m.GPU_ACTIVE_RATIO.exported
CASES = [
    # Not even one series: Ray is down, or nothing scrapes it.
    Case("nothing at all", {}, "20m", ("StepaheadDown",)),
    Case("running", {f"{APPLICATION_STATUS}{{{APP}}}": "6x60"}, "20m"),
    Case("deploy failed", {f"{APPLICATION_STATUS}{{{APP}}}": "6x5 3x60"}, "20m", ("StepaheadDown",)),
    Case("deployed anew", {f"{APPLICATION_STATUS}{{{APP}}}": "6x5 5x20 6x60"}, "20m"),
    Case("a scrape is lost", {f"{APPLICATION_STATUS}{{{APP}}}": "6x5 _x2 6x60"}, "9m"),
    Case(
        "a proxy is unhealthy",
        {f'{PROXY_STATUS}{{node_ip_address="10.0.0.1"}}': "2x5 3x60"},
        "20m",
        ("StepaheadProxyUnhealthy/node_ip_address=10.0.0.1",),
    ),
    Case(
        "one replica of two is missing",
        {
            f'{TARGET_REPLICAS}{{{APP},deployment="EngineReplica"}}': "2x60",
            f"{REPLICA_HEALTHY}{{{ENGINE}}}": "1x60",
        },
        "25m",
        ("StepaheadReplicasMissing/deployment=EngineReplica",),
    ),
    Case(
        "the only one is missing",
        {f'{TARGET_REPLICAS}{{{APP},deployment="EngineReplica"}}': "1x60"},
        "25m",
        ("StepaheadReplicasMissing/deployment=EngineReplica",),
    ),
    Case(
        "it comes within the time that a node takes",
        {
            f'{TARGET_REPLICAS}{{{APP},deployment="EngineReplica"}}': "2x60",
            f"{REPLICA_HEALTHY}{{{ENGINE}}}": "1x60",
            f'{REPLICA_HEALTHY}{{{APP},deployment="EngineReplica",replica="b"}}': "0x15 1x60",
        },
        "25m",
    ),
    Case(
        "a replica starts again and again",
        comes_and_goes(replicas=4, wanted=1),
        "10m",
        ("StepaheadReplicaFlapping/deployment=EngineReplica",),
    ),
    Case("an upgrade replaces each once", comes_and_goes(replicas=8, wanted=4), "18m"),
    Case(
        "calls wait for a replica",
        {f'{QUEUED_QUERIES}{{{APP},deployment="EngineReplica",handle="h"}}': "0x5 3x60"},
        "15m",
        ("StepaheadRequestsWait/deployment=EngineReplica",),
    ),
    Case(
        "idle while requests wait",
        {f"{ACTIVE}{{{ENGINE}}}": "0.2x60", f"{WAITING}{{{ENGINE}}}": "7x60"},
        "20m",
        ("StepaheadGpuIdleWhileRequestsWait/replica=a",),
    ),
    Case(
        "idle, and nothing waits", {f"{ACTIVE}{{{ENGINE}}}": "0x60", f"{WAITING}{{{ENGINE}}}": "0x60"}, "20m"
    ),
    Case(
        "requests wait since the GPU is busy",
        {f"{ACTIVE}{{{ENGINE}}}": "0.99x60", f"{WAITING}{{{ENGINE}}}": "7x60"},
        "20m",
    ),
    Case(
        "one is idle, another one's requests wait",
        {
            f"{ACTIVE}{{{ENGINE}}}": "0x60",
            f'{WAITING}{{{APP},deployment="EngineReplica",replica="b"}}': "7x60",
        },
        "20m",
    ),
    Case(
        "the cache is full and requests wait",
        kv(990, 5, 5) | {f"{WAITING}{{{ENGINE}}}": "7x60"},
        "30m",
        ("StepaheadKvCacheExhausted/replica=a",),
    ),
    Case("full of what may be evicted", kv(500, 500, 0) | {f"{WAITING}{{{ENGINE}}}": "7x60"}, "30m"),
    Case("full, and all of it runs", kv(1000, 0, 0) | {f"{WAITING}{{{ENGINE}}}": "0x60"}, "30m"),
    Case(
        "a fifth of the first tokens is late",
        first_tokens(late="20", every="100"),
        "2h",
        ("StepaheadFirstTokenBudgetBurnsFast", "StepaheadFirstTokenBudgetBurns"),
    ),
    Case(
        "one in ten is late",
        first_tokens(late="10", every="100"),
        "2h",
        ("StepaheadFirstTokenBudgetBurns",),
    ),
    Case("one in a hundred is late", first_tokens(late="1", every="100"), "2h"),
    Case("no traffic", first_tokens(late="0", every="0"), "2h"),
    Case(
        "a short burst of late ones, long ago",
        {
            f'{TTFT}_bucket{{{ROUTER},le="{TTFT_SECONDS}"}}': "0x5 100+100x150",
            f"{TTFT}_count{{{ROUTER}}}": "0+100x5 600+100x150",
        },
        "50m",
    ),
    Case(
        "one answer in twenty is an error",
        {
            f'{m.HTTP_REQUESTS.exported}{{{ROUTER},endpoint="chat",status="200"}}': "0+95x60",
            f'{m.HTTP_REQUESTS.exported}{{{ROUTER},endpoint="chat",status="503"}}': "0+5x60",
        },
        "20m",
        ("StepaheadServerErrors",),
    ),
    Case(
        "clients err",
        {
            f'{m.HTTP_REQUESTS.exported}{{{ROUTER},endpoint="chat",status="200"}}': "0+50x60",
            f'{m.HTTP_REQUESTS.exported}{{{ROUTER},endpoint="chat",status="429"}}': "0+50x60",
        },
        "20m",
    ),
    Case(
        "a Router does not answer frames",
        {f"{m.TAPE_LAG.exported}{{{ENGINE}}}": "0.01x5 3x60"},
        "15m",
        ("StepaheadTapeLag/replica=a",),
    ),
    Case("frames wait for a moment", {f"{m.TAPE_LAG.exported}{{{ENGINE}}}": "0.01x5 3 0.01x60"}, "15m"),
]


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "alerts.yml"
    path.write_text(yaml.safe_dump(group()))
    return path


def promtool(rules: Path, cases: list[Case]) -> subprocess.CompletedProcess[str]:
    """What fires of all alerts on the series of each case, by itself, against what should."""
    tests = [
        {
            "name": case.name,
            "interval": "1m",
            "input_series": [{"series": s, "values": v} for s, v in (alive(case) | case.series).items()],
            "promql_expr_test": [
                {
                    "expr": f'max by (alertname, {label}) (ALERTS{{alertstate="firing"}})',
                    "eval_time": case.at,
                    "exp_samples": [{"labels": labels(alert, label), "value": 1} for alert in case.fires],
                }
                for label in ("deployment", "replica", "node_ip_address")
            ],
        }
        for case in cases
    ]
    path = rules.with_name("tests.yml")
    path.write_text(yaml.safe_dump({"rule_files": [rules.name], "evaluation_interval": "1m", "tests": tests}))
    return subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)


def labels(alert: str, label: str) -> str:
    name, _, which = alert.partition("/")
    of_it = {"deployment": "EngineReplica"} if which.startswith("replica") else {}
    of_it |= dict([which.split("=")]) if which else {}
    return f'{{alertname="{name}"' + (f',{label}="{of_it[label]}"}}' if label in of_it else "}")


def alive(case: Case) -> dict[str, str]:
    """The application runs, where a case is not about that."""
    about = not case.series or any(name.startswith(APPLICATION_STATUS) for name in case.series)
    return {} if about else {f"{APPLICATION_STATUS}{{{APP}}}": "6x150"}


def test_alerts_fire_when_they_should_and_only_then(rules: Path) -> None:
    done = promtool(rules, CASES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case() -> None:
    fired = {alert.partition("/")[0] for case in CASES for alert in case.fires}
    assert fired == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("never", [True, False])
def test_cases_notice_alerts_that_never_fire_or_always(never: bool, tmp_path: Path) -> None:
    changed = group()
    for rule in changed["groups"][0]["rules"]:
        rule.update({"expr": "vector(1) > 1" if never else "vector(1)", "for": "0m"})
    path = tmp_path / "alerts.yml"
    path.write_text(yaml.safe_dump(changed))
    done = promtool(path, [case for case in CASES if bool(case.fires) == never])
    assert done.returncode == 1
    assert [alert.name for alert in ALERTS if f'"{alert.name}"' not in done.stdout + done.stderr] == []


def test_rules_are_well_formed(rules: Path) -> None:
    done = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout
    text: Any = rules.read_text()
    rules.with_name("broken.yml").write_text(text.replace("humanizePercentage", "humanisePercentage"))
    broken = ["promtool", "check", "rules", str(rules.with_name("broken.yml"))]
    assert subprocess.run(broken, capture_output=True).returncode == 1
