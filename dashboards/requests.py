"""*Requests*: what clients see of it: how fast, how much, and how it ended."""

from __future__ import annotations

from typing import Any

from dashboards.panels import Panel, board, distribution, graph, number
from dashboards.promql import (
    APPLICATION,
    HTTP_LATENCY_MS,
    HTTP_REQUESTS,
    WINDOW,
    quantile,
    rate,
    select,
    share,
)
from dashboards.slo import TTFT_SECONDS
from engine import metrics as m
from engine.metrics import Metric


def requests(datasource: str | None = None) -> dict[str, Any]:
    """Grafana's JSON; see `panels.board`."""
    rows: dict[str, list[Panel]] = {
        "Now": _now(),
        "Latency": _latency(),
        "Answers": _answers(),
        "Sizes": _sizes(),
        "Ray Serve's own view": _serve(),
    }
    description = "Requests as clients see them: latency, errors, finish reasons, sizes."
    return board("stepahead-requests", "Requests", description, rows, datasource)


ERRORS = 'status=~"5.."'


def _now() -> list[Panel]:
    errors, every = rate(m.HTTP_REQUESTS, matchers=(ERRORS,)), rate(m.HTTP_REQUESTS)
    return [
        number("Requests/s", "reqps", (every, "requests/s"), help=m.HTTP_REQUESTS.help),
        number(
            "Errors of the server",
            "percentunit",
            (share(errors, every), "errors"),
            help="Answers with status 5xx over all answers",
            steps=((None, "green"), (0.01, "red")),
        ),
        number(
            "Time to first token, p99",
            "s",
            (quantile(0.99, m.TIME_TO_FIRST_TOKEN), "p99"),
            steps=((None, "green"), (TTFT_SECONDS, "red")),
        ),
        number("Between tokens, p99", "s", (quantile(0.99, m.INTER_TOKEN_SECONDS), "p99")),
        number("Whole request, p99", "s", (quantile(0.99, m.REQUEST_SECONDS), "p99")),
        number("Choices/s", "ops", (rate(m.SEQUENCES_STARTED), "choices/s"), help=m.SEQUENCES_STARTED.help),
    ]


def _quantiles(title: str, unit: str, histogram: Metric, width: int = 8) -> Panel:
    queries = [(quantile(q, histogram), f"p{100 * q:g}") for q in (0.5, 0.9, 0.99)]
    return graph(title, unit, *queries, help=histogram.help, width=width)


def _heat(title: str, histogram: Metric) -> Panel:
    buckets = select(histogram, part="_bucket")
    return distribution(title, "s", f"sum by (le) (increase({buckets}[{WINDOW}]))", help=histogram.help)


def _latency() -> list[Panel]:
    return [
        _quantiles("Time to first token", "s", m.TIME_TO_FIRST_TOKEN),
        _quantiles("Between tokens", "s", m.INTER_TOKEN_SECONDS),
        _quantiles("Whole request", "s", m.REQUEST_SECONDS),
        _heat("Time to first token", m.TIME_TO_FIRST_TOKEN),
        _heat("Between tokens", m.INTER_TOKEN_SECONDS),
        _heat("Time in the engine's queue", m.QUEUE),
    ]


def _answers() -> list[Panel]:
    return [
        graph(
            "Answers by status",
            "reqps",
            (rate(m.HTTP_REQUESTS, "status"), "{{status}}"),
            help=m.HTTP_REQUESTS.help,
            stacked=True,
        ),
        graph(
            "Answers by endpoint",
            "reqps",
            (rate(m.HTTP_REQUESTS, "endpoint"), "{{endpoint}}"),
            help=m.HTTP_REQUESTS.help,
            stacked=True,
        ),
        graph(
            "How choices ended",
            "ops",
            (rate(m.SEQUENCES_FINISHED, "reason"), "{{reason}}"),
            help=m.SEQUENCES_FINISHED.help,
            stacked=True,
        ),
        graph(
            "How attempts ended, in the engines",
            "ops",
            (rate(m.FINISHED, "reason"), "{{reason}}"),
            help=m.FINISHED.help,
            stacked=True,
        ),
        graph(
            "Aborts by cause",
            "ops",
            (rate(m.ABORTS, "cause"), "{{cause}}"),
            help=m.ABORTS.help,
            stacked=True,
        ),
        graph(
            "Resumptions by cause",
            "ops",
            (rate(m.RESUMPTIONS, "cause"), "{{cause}}"),
            help=m.RESUMPTIONS.help,
            stacked=True,
        ),
    ]


def _sizes() -> list[Panel]:
    return [
        _quantiles("Prompt, tokens", "short", m.PROMPT_LENGTH, width=12),
        _quantiles("Answer, tokens", "short", m.OUTPUT_LENGTH, width=12),
    ]


def _serve() -> list[Panel]:
    return [
        graph(
            "HTTP at the proxies by status",
            "reqps",
            (rate(HTTP_REQUESTS, "status_code", scope=APPLICATION), "{{status_code}}"),
            help="All routes, health checks included; the proxies know no replica",
            stacked=True,
            width=12,
        ),
        graph(
            "Latency at the proxies",
            "ms",
            (quantile(0.5, HTTP_LATENCY_MS, scope=APPLICATION), "p50"),
            (quantile(0.99, HTTP_LATENCY_MS, scope=APPLICATION), "p99"),
            help="Until the answer has ended; the widest buckets are a minute and more",
            width=12,
        ),
    ]
