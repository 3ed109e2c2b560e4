"""*Fleet*: is there enough of everything, and do requests get what was promised?"""

from __future__ import annotations

from typing import Any

from dashboards.panels import Panel, board, distribution, graph, number, spread
from dashboards.promql import (
    DEPLOYMENT,
    DESIRED_REPLICAS,
    PER_REPLICA,
    PROCESSING_QUERIES,
    QUEUED_QUERIES,
    REPLICA_HEALTHY,
    TARGET_REPLICAS,
    quantile,
    rate,
    select,
    share_within,
    total,
)
from dashboards.slo import OBJECTIVE, TTFT_SECONDS
from engine import metrics as m


def fleet(datasource: str | None = None) -> dict[str, Any]:
    """Grafana's JSON; see `panels.board`."""
    rows: dict[str, list[Panel]] = {
        "Now": _now(),
        "Tokens": _tokens(),
        f"Service level: first token within {TTFT_SECONDS:g} s for {OBJECTIVE:.0%} of the choices": _slo(),
        "Replicas and autoscaling": _scaling(),
        "Router": _router(),
        "Tapes": _tapes(),
    }
    description = "All replicas of the applications chosen: load, service level, routing and autoscaling."
    return board("stepahead-fleet", "Fleet", description, rows, datasource)


def _now() -> list[Panel]:
    healthy = f"({total(REPLICA_HEALTHY)} or vector(0))"  # without a replica there is no series
    return [
        number("Replicas healthy", "short", (total(REPLICA_HEALTHY, "deployment"), "{{deployment}}")),
        number(
            "Replicas missing",
            "short",
            (f"clamp_min(sum ({select(TARGET_REPLICAS, scope=DEPLOYMENT)}) - {healthy}, 0)", "missing"),
            help="Wanted by the autoscaler and not healthy (choose all replicas)",
            steps=((None, "green"), (1, "red")),
        ),
        number("Output tokens/s", "short", (rate(m.OUTPUT_TOKENS), "tokens/s")),
        number("Requests running", "short", (total(m.RUNNING), "running"), help=m.RUNNING.help),
        number(
            "Requests waiting",
            "short",
            (total(m.WAITING), "waiting"),
            help=m.WAITING.help,
            steps=((None, "green"), (1, "orange")),
        ),
        number(
            "First token in time",
            "percentunit",
            (share_within(TTFT_SECONDS, m.TIME_TO_FIRST_TOKEN), "{{application}}"),
            help=f"Share of the choices whose first token came within {TTFT_SECONDS:g} s",
            steps=((None, "red"), (OBJECTIVE, "green")),
        ),
    ]


def _tokens() -> list[Panel]:
    return [
        graph(
            "Output tokens/s",
            "short",
            (rate(m.OUTPUT_TOKENS, *PER_REPLICA), "{{replica}}"),
            help=m.OUTPUT_TOKENS.help,
            stacked=True,
        ),
        graph(
            "Prompt tokens/s",
            "short",
            (rate(m.PROMPT_TOKENS), "computed"),
            (rate(m.PREFIX_HIT_TOKENS), "from the prefix cache"),
            help=m.PREFIX_HIT_TOKENS.help,
            stacked=True,
        ),
        graph(
            "Cost of a million output tokens",
            "short",
            (select(m.TOKEN_COST), "{{replica}}"),
            (f"max ({select(m.GPU_COST)})", "one hour of a GPU"),
            help=m.TOKEN_COST.help,
        ),
    ]


def _slo() -> list[Panel]:
    within = share_within(TTFT_SECONDS, m.TIME_TO_FIRST_TOKEN)
    return [
        graph(
            "First token in time",
            "percentunit",
            (within, "{{application}}"),
            help="Below the line, the error budget shrinks",
            top=1,
            target=OBJECTIVE,
        ),
        graph(
            "Burn rate of the error budget",
            "short",
            (f"(1 - ({within})) / {1 - OBJECTIVE:.4g}", "{{application}}"),
            help="1 uses up the budget exactly; the alerts are at 6 and 14.4 over longer times",
            target=1,
        ),
        distribution(
            "Time to first token",
            "s",
            f"sum by (le) (increase({select(m.TIME_TO_FIRST_TOKEN, part='_bucket')}[$__rate_interval]))",
            help=m.TIME_TO_FIRST_TOKEN.help,
        ),
    ]


def _scaling() -> list[Panel]:
    return [
        graph(
            "Replicas",
            "short",
            (total(REPLICA_HEALTHY, "deployment"), "{{deployment}} healthy"),
            (
                f"max by (deployment) ({select(TARGET_REPLICAS, scope=DEPLOYMENT)})",
                "{{deployment}} wanted",
            ),
            (
                f"max by (deployment) ({select(DESIRED_REPLICAS, scope=DEPLOYMENT)})",
                "{{deployment}} wanted before delays and limits",
            ),
            help="As the autoscaler sees it. The last only where replicas scale with the load",
        ),
        graph(
            "Rows in use",
            "percentunit",
            (f"{total(m.RUNNING, *PER_REPLICA)} / {total(m.RUNNING_LIMIT, *PER_REPLICA)}", "{{replica}}"),
            help="Running requests over the engine's max_running_requests, which the autoscaler looks at",
            top=1,
        ),
        graph(
            "Calls under way",
            "short",
            (total(PROCESSING_QUERIES, "deployment"), "{{deployment}} at replicas"),
            (
                f"sum by (deployment) ({select(QUEUED_QUERIES, scope=DEPLOYMENT)})",
                "{{deployment}} waiting for a replica",
            ),
            help="As Ray Serve counts them",
        ),
    ]


def _router() -> list[Panel]:
    return [
        graph(
            "Choices of a replica by reason",
            "ops",
            (rate(m.ROUTER_DECISIONS, "reason"), "{{reason}}"),
            help=m.ROUTER_DECISIONS.help,
            stacked=True,
        ),
        spread("Score of the replica chosen", "short", m.ROUTER_SCORE),
        spread("Time to choose", "s", m.ROUTER_SECONDS),
        graph(
            "Resumptions",
            "ops",
            (rate(m.RESUMPTIONS, "cause"), "{{cause}}"),
            help=m.RESUMPTIONS.help,
            stacked=True,
        ),
        graph(
            "Choices under way by Router",
            "short",
            (
                f"sum by (replica) ({select(m.SEQUENCES_STARTED)})"
                f" - sum by (replica) ({select(m.SEQUENCES_FINISHED)})",
                "{{replica}}",
            ),
            help="Begun and not ended",
        ),
        graph(
            "Output tokens/s for each running request",
            "short",
            (f"{rate(m.OUTPUT_TOKENS)} / clamp_min({total(m.RUNNING)}, 1)", "tokens/s"),
            help="What a client sees of the speed",
        ),
    ]


def _tapes() -> list[Panel]:
    return [
        graph("Open", "short", (total(m.TAPES, *PER_REPLICA), "{{replica}}"), help=m.TAPES.help, width=4),
        graph(
            "Frames/s",
            "ops",
            (rate(m.TAPE_FRAMES, *PER_REPLICA), "{{replica}}"),
            help=m.TAPE_FRAMES.help,
            width=5,
        ),
        graph(
            "Records in a frame",
            "short",
            (
                f"{rate(m.TAPE_RECORDS, *PER_REPLICA)} / {rate(m.TAPE_FRAMES, *PER_REPLICA)}",
                "{{replica}}",
            ),
            help="More than the batch size means that steps merge, since Routers answer slowly",
            width=5,
        ),
        graph(
            "Bytes/s",
            "Bps",
            (rate(m.TAPE_BYTES, *PER_REPLICA), "{{replica}}"),
            help=m.TAPE_BYTES.help,
            width=5,
        ),
        graph(
            "Lag",
            "s",
            (f"max by ({', '.join(PER_REPLICA)}) ({select(m.TAPE_LAG)})", "{{replica}}"),
            (quantile(0.99, m.TAPE_ROUND_TRIP), "round trip p99"),
            help=m.TAPE_LAG.help,
            width=5,
        ),
    ]
