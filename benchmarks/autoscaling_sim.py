"""A day's traffic through the whole autoscaling loop, simulated second by second.

    python -m benchmarks.autoscaling_sim            # the settings as deployed, and each changed alone
    python -m benchmarks.autoscaling_sim --days 3   # other random days too, for the spread

requests -> the policy -> replicas wanted -> pods pending -> a node starts, pulls and loads -> ready.
The policy is the deployed one, beside Ray Serve's default, which is Serve's own code; the engine is a rate
(ms per step by batch size, as measured on an H200), its queue and its rows; nodes take their time to come
and stay idle before they go.
Nothing here is a measurement of a cluster.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from ray.serve.autoscaling_policy import (
    _apply_delay_logic,
    _apply_scaling_factors,
    replica_queue_length_autoscaling_policy,
)
from ray.serve.config import AutoscalingConfig

from benchmarks.arguments import count
from deployments.app import _scale
from deployments.autoscaling import TokenPolicy, replica_stats
from deployments.load import Load as EngineLoad
from deployments.settings import Settings

DAY = 86_400
SLO = 1.0
"""Seconds that a request may wait before its prompt is computed."""


@dataclass(frozen=True)
class Load:
    """Llama-8B shape, 512 tokens in and 256 out on the average."""

    peak: float = 330.0
    """Requests a second at the busiest hour, without bursts."""
    night: float = 0.08
    """Share of the peak at the quietest hour."""
    bursts: int = 6
    burst: float = 1.6
    """Times the traffic of the hour, for ten minutes."""
    seconds: int = DAY
    prompt: int = 512
    output: float = 256.0
    """Tokens of an answer, mean of an exponential distribution."""


@dataclass(frozen=True)
class Nodes:
    """Times in seconds."""

    notice: float = 10.0
    """Until Ray's autoscaler sees what is pending and the pod exists."""
    start: float = 180.0
    """Median of a node's start and its image; lognormal."""
    spread: float = 0.35
    load: float = 105.0
    """Weights, compilation, capture: on a node that is there already, this is all."""
    idle: float = 300.0
    """`idleTimeoutSeconds`"""


@dataclass(frozen=True)
class Engine:
    rows: int = 256
    waiting: int = 4096
    step_ms: tuple[float, float] = (4.9, 0.031)
    """A step of b requests takes first + second * b: 5.9 at 32, 12.9 at 256."""

    def step(self, running: int) -> float:
        """Milliseconds."""
        return self.step_ms[0] + self.step_ms[1] * running

    def completions(self, running: int, output: float) -> float:
        """Probability that a running request ends within a second."""
        return 1 - math.exp(-1000 / (self.step(running) * output)) if running else 0.0


@dataclass
class Replica:
    running: int = 0
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    """(second of arrival, requests)"""

    @property
    def queued(self) -> int:
        return sum(n for _, n in self.queue)


@dataclass
class Outcome:
    gpu_hours: float
    waits: np.ndarray[Any, Any]
    """Requests by seconds waited."""
    refused: int
    changes: int
    """Times that the number wanted changed its direction."""
    arrived: int = 0
    queued: int = 0
    """Requests that still wait in the end."""

    def quantile(self, q: float) -> int:
        return int(np.searchsorted(np.cumsum(self.waits), q * self.waits.sum()))

    @property
    def late(self) -> float:
        """Share of requests that waited for longer than `SLO`, or were refused."""
        late = self.waits[int(SLO) + 1 :].sum() + self.refused
        return float(late / (self.waits.sum() + self.refused))


def traffic(load: Load, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Requests in each second of a day that is quiet at 3 and busy at 15 o'clock."""
    hours = np.arange(load.seconds) / 3600
    rate = load.night + (1 - load.night) * (0.5 - 0.5 * np.cos((hours - 3) / 24 * 2 * np.pi)) ** 1.5
    for begin in rng.uniform(0, load.seconds - 600, load.bursts).astype(int):
        rate[begin : begin + 600] *= load.burst
    return rng.poisson(rate * load.peak)


def wanted(
    config: AutoscalingConfig,
    total: float,
    current: int,
    target: int,
    state: dict[str, Any],
    now: float,
    policy: TokenPolicy | None = None,
    metrics: dict[str, dict[int, float]] | None = None,
) -> int:
    """What Ray Serve wants now: its own policy or another, its factors, its delays and its bounds."""
    context: Any = SimpleNamespace(
        current_num_replicas=current,
        target_num_replicas=target,
        total_num_requests=total,
        total_queued_requests=0.0,
        aggregated_metrics=metrics,
        current_time=now,
        config=config,
        policy_state=state,
    )
    if policy is None:
        desired, _ = replica_queue_length_autoscaling_policy(context)
    else:
        desired, updated = policy(context)
        state.update(updated)
    scaled = _apply_scaling_factors(desired, current, config)
    bounded = min(max(scaled, config.min_replicas), config.max_replicas or scaled)
    decided, updated = _apply_delay_logic(bounded, target, config, state, _now=now)
    state.update(updated)
    return int(decided)


class Cluster:
    """Replicas in their nodes, from pending to idle."""

    def __init__(self, nodes: Nodes, rng: np.random.Generator, replicas: int) -> None:
        self.nodes, self.rng = nodes, rng
        self.ready = [Replica() for _ in range(replicas)]
        self.starting: list[float] = []
        """When each becomes ready."""
        self.idle: list[float] = []
        """When each node without a replica goes."""
        self.draining: list[Replica] = []

    @property
    def gpus(self) -> int:
        return len(self.ready) + len(self.starting) + len(self.idle) + len(self.draining)

    def scale(self, target: int, now: float) -> None:
        nodes = self.nodes
        while len(self.ready) + len(self.starting) < target:
            if self.idle:
                self.idle.pop()
                self.starting.append(now + nodes.load)
            else:
                start = nodes.start * math.exp(nodes.spread * self.rng.standard_normal())
                self.starting.append(now + nodes.notice + start + nodes.load)
        while len(self.ready) + len(self.starting) > target:
            if self.starting:  # what is not there yet goes first, as in Serve
                self.starting.remove(max(self.starting))
                self.idle.append(now + nodes.idle)
            else:
                least = min(self.ready, key=lambda replica: replica.running + replica.queued)
                self.ready.remove(least)
                self.draining.append(least)

    def pass_time(self, now: float) -> None:
        self.ready += [Replica() for at in self.starting if at <= now]
        self.starting = [at for at in self.starting if at > now]
        self.idle = [at for at in self.idle if at > now]
        done = [replica for replica in self.draining if not replica.running and not replica.queue]
        self.draining = [replica for replica in self.draining if replica not in done]
        self.idle += [now + self.nodes.idle] * len(done)


def simulate(
    config: AutoscalingConfig,
    engine: Engine,
    load: Load,
    nodes: Nodes,
    seed: int = 0,
    fixed: int = 0,
    policy: TokenPolicy | None = None,
) -> Outcome:
    """One day. `fixed` replicas all day in place of the autoscaler, where not 0; Serve's default `policy`."""
    rng = np.random.default_rng(seed)
    arrivals = traffic(load, rng)
    target = fixed or config.min_replicas
    cluster = Cluster(nodes, rng, target)
    state: dict[str, Any] = {}
    recent: deque[int] = deque(maxlen=int(config.look_back_period_s))
    reports: deque[dict[str, float]] = deque(maxlen=int(config.look_back_period_s))
    out = Outcome(0.0, np.zeros(3600, np.int64), 0, 0)
    direction = 0
    for now in range(load.seconds):
        cluster.pass_time(now)
        _arrive(cluster.ready, int(arrivals[now]), now, engine, out)
        for replica in (*cluster.ready, *cluster.draining):
            _compute(replica, now, engine, load, rng, out)
        recent.append(sum(replica.running + replica.queued for replica in cluster.ready))
        if policy is not None and not fixed:
            reports.append(_report(cluster.ready, engine, load))
        if not fixed:
            before = target
            metrics = {
                name: {0: float(np.mean([r[name] for r in reports]))}
                for name in ("busy", "queue_s")
                if reports
            }
            target = wanted(
                config, float(np.mean(recent)), len(cluster.ready), target, state, now, policy, metrics
            )
            if target != before:
                out.changes += (target > before) != (direction > 0)
                direction = target - before
            cluster.scale(target, now)
        out.gpu_hours += cluster.gpus / 3600
    out.arrived = int(arrivals.sum())
    out.queued = sum(replica.queued for replica in (*cluster.ready, *cluster.draining))
    return out


def _report(ready: list[Replica], engine: Engine, load: Load) -> dict[str, float]:
    """What all replicas report, summed."""
    total = {"busy": 0.0, "queue_s": 0.0}
    for replica in ready:
        running, waiting = replica.running, replica.queued
        speed = 1000 * running / engine.step(running)
        # Of an engine that decodes: prompts are computed beside it, at no cost here.
        seen = EngineLoad(load.prompt * waiting, running, waiting, 0, speed)
        for name, value in replica_stats(seen, engine.rows, 8192).items():
            total[name] += value
    return total


def _arrive(ready: list[Replica], n: int, now: int, engine: Engine, out: Outcome) -> None:
    """Each second's requests to the replicas with the least work, level by level."""
    for replica, share in _level([replica.running + replica.queued for replica in ready], n):
        taken = min(share, engine.rows + engine.waiting - ready[replica].running - ready[replica].queued)
        out.refused += share - taken
        if taken:
            ready[replica].queue.append((now, taken))


def _level(loads: list[int], n: int) -> Iterator[tuple[int, int]]:
    """Pour n over the least loaded; yields (index, share)."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    total = 0
    for k in range(1, len(order) + 1):
        total += loads[order[k - 1]]
        level = (total + n) / k
        if k == len(order) or level <= loads[order[k]]:
            shares = [max(int(level) - loads[i], 0) for i in order[:k]]
            for j in range(n - sum(shares)):
                shares[j % k] += 1
            yield from zip(order[:k], shares, strict=True)
            return


def _compute(
    replica: Replica, now: int, engine: Engine, load: Load, rng: np.random.Generator, out: Outcome
) -> None:
    """One second of an engine: rows that become free are taken at once, several times a second."""
    while replica.queue and replica.running < engine.rows:
        arrived, n = replica.queue.popleft()
        taken = min(n, engine.rows - replica.running)
        replica.running += taken
        out.waits[min(now - arrived, len(out.waits) - 1)] += taken
        if n > taken:
            replica.queue.appendleft((arrived, n - taken))
    replica.running -= int(rng.binomial(replica.running, engine.completions(replica.running, load.output)))


def deployed(replicas: int) -> tuple[AutoscalingConfig, TokenPolicy]:
    """The autoscaling of the application, from one engine to `replicas`."""
    settings = Settings(model="m", accelerator="gpu", max_replicas=replicas)
    config: AutoscalingConfig = _scale(settings, settings.engine_config(gpu=True))["autoscaling_config"]
    return config, TokenPolicy(**config.policy.policy_kwargs)


def default(replicas: int, target: float) -> AutoscalingConfig:
    """Ray Serve's own policy and delays."""
    return AutoscalingConfig(min_replicas=1, max_replicas=replicas, target_ongoing_requests=target)


Variant: TypeAlias = tuple[str, AutoscalingConfig, TokenPolicy | None, Nodes]


def variants(replicas: int, nodes: Nodes) -> Iterator[Variant]:
    """The settings as they are, each changed alone, and Ray Serve's policy by its target."""
    config, policy = deployed(replicas)
    kwargs = config.policy.policy_kwargs
    yield "as deployed", config, policy, nodes
    changes: dict[str, tuple[float, ...]] = {
        "utilisation": (0.45, 0.5, 0.6, 0.65),
        "cold_start_s": (60, 600),
        "hold_s": (60, 300, 1200),
        "ttft_s": (0, 10),
    }
    for name, values in changes.items():
        for value in values:
            yield f"{name} {value:g}", config, TokenPolicy(**kwargs | {name: value}), nodes
    for idle in (60, 900):
        yield f"idleTimeoutSeconds {idle}", config, policy, replace(nodes, idle=float(idle))
    yield "Serve's default, target 2 requests", default(replicas, 2), None, nodes
    for share in (0.2, 0.25, 0.3, 0.4, 0.5):
        yield f"Serve's, target {share:g} of the rows", default(replicas, share * Engine().rows), None, nodes


DAYS = {
    "ordinary": Load(),
    "bursty": Load(peak=180.0, bursts=12, burst=1.8),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", type=count, default=1, help="random days for each row")
    parser.add_argument("--replicas", type=count, default=8, help="at most")
    parser.add_argument("--load", choices=DAYS, default="ordinary")
    parser.add_argument("--brief", action="store_true", help="as deployed and Ray Serve's only")
    args = parser.parse_args()
    load, engine, nodes = DAYS[args.load], Engine(), Nodes()
    config, policy = deployed(args.replicas)
    print(f"{args.load}: {load.peak:g}/s, {load.bursts} bursts of {load.burst:g} times; {args.days} day(s)\n")
    print("| settings | GPU-hours | wait p50, s | p99, s | late, % | refused | turns |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    rows = [(*variant, 0) for variant in variants(args.replicas, nodes)]
    if args.brief:
        rows = [row for row in rows if "Serve" in row[0] or row[0] == "as deployed"]
    rows.append((f"{args.replicas} replicas, always", config, policy, nodes, args.replicas))
    for name, each, asked, other, fixed in rows:
        days = [simulate(each, engine, load, other, day, fixed, asked) for day in range(args.days)]
        late = [100 * day.late for day in days]
        spread = f" ± {np.std(late):.2f}" if len(days) > 1 else ""
        print(
            f"| {name} | {np.mean([day.gpu_hours for day in days]):.0f} "
            f"| {max(day.quantile(0.5) for day in days)} | {max(day.quantile(0.99) for day in days)} "
            f"| {np.mean(late):.2f}{spread} | {sum(day.refused for day in days):,} "
            f"| {np.mean([day.changes for day in days]):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
