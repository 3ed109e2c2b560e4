"""Tokens on their way to clients."""

from __future__ import annotations

import statistics
from typing import Any


def streaming_page(lines: list[dict[str, Any]]) -> str:
    first = lines[-1]
    text = [
        "# Streaming",
        "",
        "Made by `python -m benchmarks.report` from the lines beside it, which "
        f"`python -m benchmarks.streaming` wrote. {first['streams']} streams of one token a step from an "
        f"engine that only counts, {first['cores']} cores for engine, Routers, proxies and clients together. "
        "Tokens/s, medians of the rounds. tape: the highest rate that arrived in full; events: the most that "
        "came over the tape, as tokens of a stream that wait together become one; ingress: written by the "
        "Router from tokens made on the spot, an event each; items: one Ray Serve stream item per token. "
        "Latency (from the engine's step to the client) and CPU (cores, of all Routers together) are those "
        "at half of the tape's rate. At most 1.3 times the ingress's rate was offered. Other work shared the "
        "cores, more in some runs than in others: compare within a row.",
        "",
        "| date | route | Routers | rounds | tape | events | ingress | items | tape / ingress "
        "| events / ingress | tape / items | ms p50 | ms p99 | Routers' CPU | clients' CPU "
        "| µs of a Router per token |",
        "|" + "---|" * 16,
    ]
    for x in lines:
        ratio = f"{x['ratio']:.2f} ({x['ratio_min']:.2f} to {x['ratio_max']:.2f})"
        half = [run["half"]["cpu"] for run in x["runs"]]
        row = [x["date"], x["route"], str(x["routers"]), str(len(x["runs"]))]
        speeds = ("tape_tokens_per_s", "tape_events_per_s", "ingress_tokens_per_s", "item_tokens_per_s")
        row += [f"{x[speed]:,.0f}" for speed in speeds]
        row += [ratio, f"{x['event_ratio']:.2f}", f"{x['times_items']:.1f}"]
        row += [f"{x[f'latency_ms_{q}']:.1f}" for q in ("p50", "p99")]
        row += [f"{statistics.median(cpu[name] for cpu in half):.2f}" for name in ("Router", "clients")]
        row.append(f"{x['router_us_per_token']:.0f}")
        text.append("| " + " | ".join(row) + " |")
    return "\n".join([*text, ""])
