"""Which replica each request goes to, simulated: ours against round robin and Ray Serve's own routers.

    python -m benchmarks.routing_sim --save benchmarks/results/routing.jsonl     # all of it, and the page
    python -m benchmarks.routing_sim --replicas 16 --policy ours "round robin"

Nothing here is a measurement of a cluster. Engines are a rate by batch size and prompt tokens, as measured
on an H200, a queue, rows and a prefix cache; requests arrive whatever became of those before. Our policy
is the deployed code, each Router with what it has seen only; Ray's follow the rules of its source.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from benchmarks.arguments import amount, count, file
from benchmarks.routing_engines import Engine, Job, Shape, Traffic
from benchmarks.routing_policies import POLICIES, PrefixAware, RoundRobin
from deployments.balancer import Balancer
from deployments.load import Load
from deployments.prefix_index import chain_of

HOP = 0.004
"""Seconds from a Router's choice until the replica has the request, and as long until the Router knows."""

SECONDS = {1: 60, 4: 60, 16: 60, 64: 40, 256: 20, 1024: 10}
"""Simulated, by number of replicas."""


def simulate(
    name: str, replicas: int, routers: int, rate: float, seconds: float, seed: int = 0
) -> dict[str, Any]:
    """One policy over one stretch of traffic. Returns what happened."""
    now = [0.0]
    engines = [Engine(f"r{i}", Shape()) for i in range(replicas)]
    kind = POLICIES[name]
    policies: list[RoundRobin] = [kind(engines, now, seed)]
    for router in range(1, routers):
        first = policies[0]
        policies.append(
            first.share(engines, now, seed + router)
            if isinstance(first, PrefixAware)
            else kind(engines, now, seed + router)
        )
    jobs = Traffic(replicas, seconds, rate, seed).jobs
    rng = random.Random(seed)
    owners: list[dict[int, int]] = [{} for _ in engines]  # jobs on an engine by Router
    heap: list[tuple[float, int, str, int, Any]] = [
        (job.at, i, "choose", 0, job) for i, job in enumerate(jobs)
    ]
    heapify(heap)
    tie = len(jobs)

    def push(at: float, what: str, engine: int, job: Job | None = None) -> None:
        nonlocal tie
        tie += 1
        heappush(heap, (at, tie, what, engine, job))

    def begin(i: int) -> None:
        if engines[i].begin(now[0]):
            push(engines[i].running_until or 0.0, "end", i)

    while heap:
        now[0], _, what, i, job = heappop(heap)
        engine = engines[i]
        if what == "choose":
            job.router = rng.randrange(routers)
            push(now[0] + HOP, "arrive", policies[job.router].choose(job), job)
        elif what == "arrive":
            engine.waiting.append(job)
            owners[i][job.router] = owners[i].get(job.router, 0) + 1
            push(now[0] + HOP, "accept", i, job)
            if engine.running_until is None:
                begin(i)
        elif what == "accept":
            policies[job.router].accepted(job, i)
            for router in owners[i]:  # those that have a tape
                if router != job.router:
                    policies[router].learn(i, job, engine.load())
        else:
            ended = engine.end(now[0])
            for done in ended:
                owners[i][done.router] -= 1
                policies[done.router].finished(done, i)
            load = engine.load()
            for router, n in owners[i].items():
                if n:
                    policies[router].observe(i, load)
            for done in ended:
                policies[done.router].observe(i, load)
            begin(i)
    return outcome(name, replicas, routers, rate, engines, jobs)


def outcome(
    name: str, replicas: int, routers: int, rate: float, engines: list[Engine], jobs: list[Job]
) -> dict[str, Any]:
    half = [job for job in jobs if job.at >= jobs[-1].at / 4]  # caches are empty in the beginning
    ttft = np.array([job.ttft for job in half])
    prompt = sum(len(job.prompt) for job in half)
    busy = np.array([engine.busy for engine in engines])
    kinds = {
        f"ttft_p99_{kind}": float(np.quantile([job.ttft for job in half if job.kind == kind], 0.99))
        for kind in sorted({job.kind for job in half})
    }
    return {
        "benchmark": "routing",
        "policy": name,
        "replicas": replicas,
        "routers": routers,
        "rate": rate,
        "requests": len(jobs),
        "ttft_p50": float(np.quantile(ttft, 0.5)),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
        **kinds,
        "hit_rate": sum(job.cached for job in half) / prompt,
        "imbalance": float(busy.max() / busy.mean()),
        "engine_seconds": float(busy.sum()),
    }


def decision_cost(replicas: int, tokens: int = 2048, tries: int = 2000) -> dict[str, Any]:
    """Microseconds of one decision of ours, for prompts half of which many replicas have cached."""
    rng = random.Random(0)
    balancer = Balancer(rng=random.Random(1))
    names = [f"r{i}" for i in range(replicas)]
    balancer.set_replicas(names)
    shared = [rng.randrange(50_000) for _ in range(tokens // 2)]

    def prompt() -> list[int]:
        return shared + [rng.randrange(50_000) for _ in range(tokens - tokens // 2)]

    for i in range(4 * replicas):  # so that every replica has the shared half
        balancer.observe(names[i % replicas], Load(rng.randrange(4000), 20, 0, 1000, 20_000.0))
        balancer.place(i, tokens, chain_of(prompt()))
    hashing, deciding = [], []
    for i in range(tries):
        ids = prompt()
        balancer.observe(names[i % replicas], Load(rng.randrange(4000), 20, 0, 1000, 20_000.0))
        begin = time.thread_time()
        prefix = chain_of(ids)
        between = time.thread_time()
        balancer.place(-i - 1, tokens, prefix)
        hashing.append(between - begin)
        deciding.append(time.thread_time() - between)
    # What else the machine does makes batches of them slower: the best batch's median.
    p50, hashed = (
        1e6 * np.median(np.reshape(times, (10, -1)), axis=1).min() for times in (deciding, hashing)
    )
    p99 = 1e6 * np.quantile(deciding, 0.99)
    return {
        "benchmark": "routing decision",
        "replicas": replicas,
        "prompt": tokens,
        "us_p50": float(p50),
        "us_p99": float(p99),
        "us_hashing": float(hashed),
    }


def page(lines: list[dict[str, Any]]) -> str:
    text = [
        "# Choice of replica, simulated",
        "",
        "`python -m benchmarks.routing_sim --save benchmarks/results/routing.jsonl` made this page. "
        + " ".join((__doc__ or "").split("\n\n")[2].split()),
        "Columns of kinds are their p99 of TTFT; hit rate is of prompt tokens; the last column compares the",
        "busy seconds of engines. Rate 1 is about 2.6 requests a second and replica.",
        "",
        "| replicas | Routers | rate | policy | TTFT p50, s | p99, s | agents | chats | bursts | hit rate | "
        "busiest / mean |",
        "| --: | --: | --: | --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for line in lines:
        if line["benchmark"] == "routing":
            text.append(
                f"| {line['replicas']:,} | {line['routers']} | {line['rate']:g} | {line['policy']} "
                f"| {line['ttft_p50']:.2f} | {line['ttft_p99']:.2f} | {line['ttft_p99_agent']:.2f} "
                f"| {line['ttft_p99_chat']:.2f} | {line['ttft_p99_burst']:.2f} | {line['hit_rate']:.1%} "
                f"| {line['imbalance']:.2f} |"
            )
    text += [
        "",
        "What a decision of ours costs, for prompts of 2,048 tokens (medians; p99 of all):",
        "",
        "| replicas | decision p50, µs | p99, µs | hashing the prompt, µs |",
        "| --: | --: | --: | --: |",
    ]
    for line in lines:
        if line["benchmark"] == "routing decision":
            text.append(
                f"| {line['replicas']:,} | {line['us_p50']:.0f} | {line['us_p99']:.0f} "
                f"| {line['us_hashing']:.0f} |"
            )
    return "\n".join(text) + "\n"


def lines(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for replicas in args.replicas:
        yield decision_cost(replicas)
    for replicas in args.replicas:
        for rate in args.rate:
            for policy in args.policy:
                yield simulate(
                    policy, replicas, args.routers, rate, args.seconds or SECONDS.get(replicas, 20), args.seed
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=count, nargs="+", default=sorted(SECONDS))
    parser.add_argument("--routers", type=count, default=4)
    parser.add_argument("--rate", type=amount, nargs="+", default=[1.0])
    parser.add_argument("--seconds", type=amount, help="simulated; by number of replicas unless given")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=file, help="JSON lines; the page gets the same name with .md")
    args = parser.parse_args()
    made = []
    for line in lines(args):
        print(json.dumps(line), flush=True)
        made.append(line)
    if args.save:
        args.save.write_text("".join(json.dumps(line) + "\n" for line in made))
        args.save.with_suffix(".md").write_text(page(made))


if __name__ == "__main__":
    main()
