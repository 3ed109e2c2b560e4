"""How many tokens a second the Routers stream: `python -m benchmarks.streaming --json`.

An engine that only counts gives each of 64 requests one token a step; 64 clients read them as
server-sent events and check every text. The same Router processes stream in three ways: over the
tape; with each token as one item of a Ray Serve stream; and, with no engine at all, tokens made on
the spot, which is what the ingress alone can write.

Routes from client to Router: `proxy` is Ray Serve's default, where each piece passes Serve's proxy
and a Ray stream; `haproxy` has HAProxy in front of HTTP servers in the Routers; `direct` asks those
servers themselves. `threads` is Serve's default of two threads in each Router, one for its own
event loop and one for the application's; without it the application shares Serve's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from benchmarks.arguments import count, file

STREAMS = 64
FRACTIONS = (0.4, 0.7, 0.85, 1.0, 1.3)
"""Rates at which the engine makes tokens, of what the ingress alone wrote in the same round."""
SECONDS = 1.5
_HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # nobody is left when it ends
}
_ONE_THREAD = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
SETUPS: dict[str, dict[str, str]] = {
    "haproxy": _HAPROXY | _ONE_THREAD,
    "haproxy, threads": _HAPROXY,
    "proxy": _ONE_THREAD,
    "proxy, threads": {},
}
"""Environments of Ray Serve; the one with HAProxy also gives the direct route."""


def measure_round(bench: Any, port: str) -> dict[str, Any]:
    """The three ways one after the other, by one route."""
    ingress = bench.run(port, "/local", bench.length(15_000))
    items = bench.run(port, "/items", bench.length(1_500), rate=15_000)
    tape = [
        bench.run(port, "/v1/completions", bench.length(rate), rate=rate)
        for rate in (fraction * ingress["tokens_per_s"] for fraction in FRACTIONS)
    ]
    kept = [run for run in tape if run["tokens_per_s"] > 0.9 * run["offered_tokens_per_s"]]
    best = max((run["tokens_per_s"] for run in kept), default=0.0)
    events = max(run["tokens_per_s"] / run["tokens_per_event"] for run in tape)
    rate = max(best, ingress["tokens_per_s"] * FRACTIONS[0]) / 2
    half = bench.run(port, "/v1/completions", bench.length(rate), rate=rate)
    return {
        "ingress": ingress,
        "items": items,
        "tape": tape,
        "half": half,
        "ingress_tokens_per_s": ingress["tokens_per_s"],
        "item_tokens_per_s": items["tokens_per_s"],
        "tape_tokens_per_s": best,
        "tape_events_per_s": events,
        "ratio": best / ingress["tokens_per_s"],
        "event_ratio": events / ingress["tokens_per_s"],
        "times_items": best / items["tokens_per_s"],
        "router_us_per_token": 1e6 * half["cpu"]["Router"] / half["tokens_per_s"],
        **{name: half[name] for name in ("latency_ms_p50", "latency_ms_p90", "latency_ms_p99")},
    }


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every figure, the median over the rounds; the single runs of all rounds beside it."""
    figures = {key: value for key, value in rounds[0].items() if isinstance(value, int | float)}
    found: dict[str, Any] = {key: statistics.median(each[key] for each in rounds) for key in figures}
    found["ratio_min"] = min(each["ratio"] for each in rounds)
    found["ratio_max"] = max(each["ratio"] for each in rounds)
    return found | {"runs": rounds}


@contextmanager
def environment(setup: str) -> Iterator[dict[str, str]]:
    """What a process that measures `setup` gets; HAProxy's files are its own."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        files = {
            f"RAY_SERVE_HAPROXY_{name}": f"{folder}/{file}"
            for name, file in {
                "CONFIG_FILE_LOC": "haproxy.cfg",
                "SOCKET_PATH": "admin.sock",
                "METRICS_SOCKET_PATH": "metrics.sock",
                "SERVER_STATE_BASE": "",
                "SERVER_STATE_FILE": "state",
            }.items()
        }
        ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
        yield os.environ | {"OMP_NUM_THREADS": "1"} | files | ray | SETUPS[setup]


def child(setup: str, routers: int, rounds: int) -> None:
    """In a process of its own: Serve reads its environment when it is imported."""
    from benchmarks.streaming_bench import Bench

    with Bench(routers, STREAMS, SECONDS, "HA_PROXY" in "".join(SETUPS[setup])) as bench:
        found: dict[str, list[dict[str, Any]]] = {port: [] for port in bench.ports}
        for _ in range(rounds):
            for port in found:
                found[port].append(measure_round(bench, port))
        for port, runs in found.items():
            name = f"{port}, threads" if setup.endswith("threads") else port
            print(json.dumps({"route": name, "routers": routers} | median_of(runs)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the last line is the first set-up's figures")
    parser.add_argument("--setup", choices=SETUPS, nargs="*", default=["haproxy"])
    parser.add_argument("--routers", type=count, default=1)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--out", type=file, help="append the JSON lines to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.setup[0], args.routers, args.rounds)
    lines: list[dict[str, Any]] = []
    for setup in args.setup:
        command = [sys.executable, "-m", "benchmarks.streaming", "--child", "--setup", setup]
        command += ["--routers", str(args.routers), "--rounds", str(args.rounds)]
        with environment(setup) as env:
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        lines += [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"route"')]
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    lines = [
        {"date": date, "cores": len(os.sched_getaffinity(0)), "streams": STREAMS} | line for line in lines
    ]
    if args.out:
        with args.out.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
    columns = "tape_tokens_per_s tape_events_per_s ingress_tokens_per_s item_tokens_per_s".split()
    print(
        f"{'route':18} {'tape':>8} {'events':>8} {'ingress':>8} {'items':>8}  ratio  × items  ms p50    p99"
    )
    for x in lines:
        speeds = " ".join(f"{x[column]:8,.0f}" for column in columns)
        late = f"{x['latency_ms_p50']:7.2f} {x['latency_ms_p99']:6.2f}"
        print(f"{x['route']:18} {speeds} {x['ratio']:6.2f} {x['times_items']:6.1f} {late}")
    if args.json:
        print(json.dumps({key: value for key, value in lines[0].items() if key != "runs"}))


if __name__ == "__main__":
    main()
