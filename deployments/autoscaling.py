"""How many replicas there should be: the policy that Ray Serve's controller asks.

Ray Serve's default divides the requests under way by a target. It takes a queue for load, so that by the
time new replicas have come it has asked for far too many, and then for too few. Here demand is what the
replicas' engines are busy with, and what their queues grow by; it is forecast for when a replica that is
asked for now is ready; what is queued counts only as far as it will be there still; and no replica goes
that was needed a while ago.

The controller gets this module by value and does not have the others: it imports nothing of ours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from deployments.load import Load

FIXED = 0.6
"""A decode step's time without any request, as a share of what requests in all rows add to it.

An 8B model on an H200: 4.9 ms of 4.9 + 7.9. It says how much faster a half full engine would be with all
rows in use; the closer it is to that, the less the number matters.
"""

EXPECTED_OUTPUT = 256
"""Tokens that a waiting request is expected to generate."""


def replica_stats(load: Load, rows: int, step_tokens: int) -> dict[str, float]:
    """What a replica reports: `busy`, the share of its throughput in use; `queue_s`, seconds of queued work.

    `rows` are the requests that run at once, `step_tokens` the most tokens of one step.
    """
    share = min(load.running / rows, 1.0)
    busy = share * (1 + FIXED) / (share + FIXED)
    fastest = load.tokens_per_s / busy if busy else 0.0
    if load.waiting or load.prefill_tokens > step_tokens:
        busy = 1.0
    queued = load.prefill_tokens + EXPECTED_OUTPUT * load.waiting
    return {"busy": busy, "queue_s": queued / fastest if fastest else 0.0}


class TokenPolicy:
    """Replicas wanted, from what they report. Ray Serve makes one, and keeps its state between calls.

    `utilisation`: share of the replicas' throughput that is meant to be in use. `ttft_s`: seconds of
    queued work that a replica may have. `cold_start_s`: from asking for a replica until it is ready.
    `hold_s`: how long a replica is kept that is not needed any more.
    """

    def __init__(
        self,
        utilisation: float = 0.6,
        ttft_s: float = 1.0,
        cold_start_s: float = 300.0,
        hold_s: float = 600.0,
    ) -> None:
        self._utilisation = utilisation
        self._ttft = ttft_s
        self._cold_start = cold_start_s
        self._hold = hold_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Ray Serve's interface: (replicas, state). Bounds and delays of the configuration come on top."""
        state: dict[str, Any] = dict(context.policy_state)
        now: float = context.current_time or 0.0
        metrics: dict[str, dict[Any, float]] = context.aggregated_metrics or {}
        busy = metrics.get("busy", {})
        if busy:
            queue = sum(metrics.get("queue_s", {}).values())
            # A replica that has just come, and has not reported yet, is taken to be idle.
            wanted = self._wanted(sum(busy.values()), queue, max(context.current_num_replicas, 1), now, state)
        else:
            wanted = self._without_statistics(context)
        # What was wanted within the last `hold_s` and more than all that came later.
        peaks = [
            (at, count) for at, count in state.get("peaks", []) if at > now - self._hold and count > wanted
        ]
        state["peaks"] = [*peaks, (now, wanted)]
        return max(wanted, *(count for _, count in peaks), 0), state

    def _wanted(self, busy: float, queue: float, replicas: int, now: float, state: dict[str, Any]) -> int:
        pace = self._cold_start / 20
        history: list[tuple[float, float, float]] = [
            past for past in state.get("history", []) if past[0] > now - self._cold_start
        ]
        excess = max(queue - self._ttft * replicas, 0.0)  # seconds of queued work beyond what is allowed
        demand = busy
        if history:
            then, _, earlier = history[-1]
            demand += max(excess - earlier, 0.0) / max(now - then, pace)
        if not history or now - history[-1][0] >= pace:
            history.append((now, demand, excess))
        state["history"] = history
        # What it has grown by while a replica starts, it will grow by again.
        ahead = demand + max(demand - history[0][1], 0.0)
        left = max(
            excess - max(replicas - demand, 0.0) * self._cold_start, 0.0
        )  # when a new replica is ready
        return math.ceil(ahead / self._utilisation + left / self._cold_start - 1e-9)

    def _without_statistics(self, context: AutoscalingContext) -> int:
        """With no replica there is nothing but requests that wait for one."""
        if context.current_num_replicas:
            return context.target_num_replicas
        config: Any = context.config
        queued = context.total_queued_requests or 0.0
        return math.ceil(queued / float(config.target_ongoing_requests))
