"""Alerts as Prometheus rules, from the same names as the dashboards.

`python -m dashboards export` writes them for `rule_files`; the overlays of `cluster/` hold the same as a
PrometheusRule. `tests/test_alerts.py` lets `promtool test rules` run each on recorded series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dashboards.promql import (
    APPLICATION_STATUS,
    PER_REPLICA,
    PROXY_STATUS,
    QUEUED_QUERIES,
    REPLICA_HEALTHY,
    TARGET_REPLICAS,
    share_within,
)
from dashboards.slo import OBJECTIVE, TTFT_SECONDS
from engine import metrics as m

_REPLICA = ", ".join(PER_REPLICA)
_DEPLOYMENT = "application, deployment"


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires while every condition holds, and has for the time `lasting`."""

    name: str
    conditions: tuple[tuple[str, str], ...]
    """Each a value, as an expression that has data also in good times, and the comparison that is bad."""
    lasting: str
    severity: Literal["critical", "warning"]
    summary: str
    do: str
    """What to look at first."""

    @property
    def expression(self) -> str:
        """In PromQL. All values of an alert have the same labels."""
        return "\n  and ".join(f"({value}) {comparison}" for value, comparison in self.conditions)

    def rule(self) -> dict[str, Any]:
        """In the form of Prometheus' rule files."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.do},
        }


def _burn(window: str) -> str:
    """How many times faster than allowed the error budget of the first token shrinks."""
    return (
        f"(1 - {share_within(TTFT_SECONDS, m.TIME_TO_FIRST_TOKEN, window, scope='')}) / {1 - OBJECTIVE:.4g}"
    )


def _kv_share(states: str) -> str:
    blocks = m.KV_BLOCKS.exported
    return f'sum by ({_REPLICA}) ({blocks}{{state=~"{states}"}}) / sum by ({_REPLICA}) ({blocks})'


_WANTED = f"max by ({_DEPLOYMENT}) ({TARGET_REPLICAS})"
_REQUESTS_WAIT = f"min by ({_REPLICA}) (min_over_time({m.WAITING.exported}[5m]))"

ALERTS = (
    Alert(
        "StepaheadDown",
        ((f'max(last_over_time({APPLICATION_STATUS}{{application="stepahead"}}[5m])) or vector(0)', "< 5"),),
        "10m",
        "critical",
        "The application neither runs nor is being deployed.",
        "`serve status`, then the controller's log.",
    ),
    Alert(
        "StepaheadProxyUnhealthy",
        ((f"max by (node_ip_address) ({PROXY_STATUS})", "== 3"),),
        "5m",
        "warning",
        "The HTTP proxy of {{ $labels.node_ip_address }} does not answer.",
        "The proxy's log on that node; its clients go elsewhere only if something in front sends them.",
    ),
    Alert(
        "StepaheadReplicasMissing",
        (
            (
                # Where there is none at all, there is no series either.
                f"{_WANTED} - (sum by ({_DEPLOYMENT}) ({REPLICA_HEALTHY}) or 0 * {_WANTED})",
                "> 0",
            ),
        ),
        "20m",  # a new GPU node, its image and its weights take this long at most
        "warning",
        "{{ $labels.deployment }} has {{ $value }} replicas fewer than the autoscaler wants.",
        "Pending pods, and the log of replicas that fail to start.",
    ),
    Alert(
        "StepaheadReplicaFlapping",
        (
            (
                # A gauge disappears with its replica, so each that was there is counted once. Upgrading all
                # replaces each once, and that is twice the number.
                f"count by ({_DEPLOYMENT}) (count_over_time({REPLICA_HEALTHY}[30m]))"
                f" - 2 * max by ({_DEPLOYMENT}) (max_over_time({TARGET_REPLICAS}[30m]))",
                "> 1",
            ),
        ),
        "0m",
        "warning",
        "Replicas of {{ $labels.deployment }} come and go: more than an upgrade replaces in half an hour.",
        "The log of the replicas that ended (memory, a failed health check); the autoscaler's delays.",
    ),
    Alert(
        "StepaheadRequestsWait",
        ((f"sum by ({_DEPLOYMENT}) ({QUEUED_QUERIES})", "> 0"),),
        "5m",
        "warning",
        "Requests wait for {{ $labels.deployment }}: no replica takes them.",
        "Replicas healthy and wanted; `max_replicas`.",
    ),
    Alert(
        "StepaheadGpuIdleWhileRequestsWait",
        (
            (f"avg by ({_REPLICA}) (avg_over_time({m.GPU_ACTIVE_RATIO.exported}[5m]))", "< 0.5"),
            (_REQUESTS_WAIT, "> 0"),
        ),
        "5m",
        "critical",
        "{{ $labels.replica }} computes {{ $value | humanizePercentage }} of the time while requests wait.",
        "Host's time by phase and the gap before a step, on the dashboard Replica: the host cannot keep "
        "ahead, or a step hangs.",
    ),
    Alert(
        "StepaheadKvCacheExhausted",
        ((_kv_share("free|cached"), "< 0.05"), (_REQUESTS_WAIT, "> 0")),
        "10m",
        "warning",
        "{{ $labels.replica }} has {{ $value | humanizePercentage }} of its key-value blocks left, and "
        "requests wait.",
        "Preemptions; more replicas, a shorter context_length, or fewer max_running_requests.",
    ),
    Alert(
        "StepaheadFirstTokenBudgetBurnsFast",
        ((_burn("5m"), "> 14.4"), (_burn("1h"), "> 14.4")),
        "2m",
        "critical",
        f"Too many first tokens take longer than {TTFT_SECONDS:g} s: in two days a month's budget is gone.",
        "Requests waiting, on the dashboard Fleet: more replicas; else the compute of a step, on Replica.",
    ),
    Alert(
        "StepaheadFirstTokenBudgetBurns",
        ((_burn("30m"), "> 6"), (_burn("6h"), "> 6")),
        "15m",
        "warning",
        f"Too many first tokens take longer than {TTFT_SECONDS:g} s: in five days a month's budget is gone.",
        "As StepaheadFirstTokenBudgetBurnsFast, with more time.",
    ),
    Alert(
        "StepaheadServerErrors",
        (
            (
                f'sum by (application) (rate({m.HTTP_REQUESTS.exported}{{status=~"5.."}}[5m])'
                f" or 0 * rate({m.HTTP_REQUESTS.exported}[5m]))"
                f" / sum by (application) (rate({m.HTTP_REQUESTS.exported}[5m]))",
                "> 0.01",
            ),
        ),
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the answers are errors of the server.",
        "The Routers' logs name the request and the replica.",
    ),
    Alert(
        "StepaheadTapeLag",
        ((f"max by ({_REPLICA}) (min_over_time({m.TAPE_LAG.exported}[1m]))", "> 1"),),
        "1m",
        "warning",
        "A Router takes {{ $value | humanizeDuration }} to answer a frame of {{ $labels.replica }}: its "
        "clients get tokens late.",
        "CPU of the Routers: one Python process each; more `routers`.",
    ),
)


def group() -> dict[str, Any]:
    """All of them, in the form of Prometheus' rule files."""
    return {"groups": [{"name": "stepahead", "rules": [alert.rule() for alert in ALERTS]}]}
