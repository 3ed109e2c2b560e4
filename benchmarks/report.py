"""Make the page of a file of results: `python -m benchmarks.report benchmarks/results/h200.jsonl`.

Writes the same name with .md. A configuration's row shows the median of its runs, with the spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLUMNS: list[tuple[str, str, str]] = [
    ("ms per step", "ms_per_step", ".2f"),
    ("p99", "ms_per_step_p99", ".2f"),
    ("limit", "limit_ms", ".2f"),
    ("tokens/s", "output_tokens_per_s", ",.0f"),
    ("total s", "total_s", ".2f"),
    ("GPU active", "gpu_active_events", ".2%"),
    ("gap p50 us", "gap_us_p50", ".1f"),
    ("gap p99 us", "gap_us_p99", ".1f"),
]


def cell(values: Iterable[Any], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    text = format(statistics.median(known), form)
    if len(known) > 1:
        text += f" ({format(min(known), form)} to {format(max(known), form)})"
    return text


def page(lines: list[dict[str, Any]]) -> str:
    first = lines[-1]
    text = [
        f"# {first['device']}",
        "",
        "Made by `python -m benchmarks.report` from the lines beside it, which "
        "`python -m benchmarks.engine` wrote. Random weights and prompts, greedy. "
        "ms per step: from one result to the next, of steps that only decode. "
        "Limit: weights, keys and values at the read bandwidth measured in the same run. "
        "GPU active and gap: from events around each step's work on the compute lane.",
        "",
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["date"], line.get("version", ""), line["workload"], line["overlap"], line["peer"]].append(
            line
        )
    text.append(
        "| date | version | workload | overlap | runs | "
        + " | ".join(c[0] for c in COLUMNS)
        + " | tokens equal |"
    )
    text.append("|" + "---|" * (len(COLUMNS) + 6))
    for (date, version, workload, overlap, peer), runs in groups.items():
        name = workload if peer is None else f"{workload}, {peer}"
        cells = [cell((run.get(key) for run in runs), form) for _, key, form in COLUMNS]
        equal = "yes" if all(run["tokens_equal"] for run in runs) else "no"
        row = [date, version, name, "on" if overlap else "off", str(len(runs)), *cells, equal]
        text.append("| " + " | ".join(row) + " |")
    text += ["", f"torch {first['torch']}, transformers {first['transformers']}.", ""]
    return "\n".join(text)


def cpu_page(lines: list[dict[str, Any]]) -> str:
    first = lines[0]
    text = [
        "# The demo model on a CPU",
        "",
        f"Made by `python -m benchmarks.report` from the lines beside it, which `python -m benchmarks.cpu "
        f"--output {first['output']} --rounds {first['rounds']}` wrote: float32, greedy, {first['threads']} "
        "threads, the same tokens from all, rounds that alternate between the systems: compare within a run.",
        "",
        "| date | requests | system | tokens/s, median (least to most) | stepahead is |",
        "|---|---|---|---|---|",
    ]
    for x in lines:
        speed = f"{x['output_tokens_per_s']:.1f} ({x['min']:.1f} to {x['max']:.1f})"
        ratio = "" if x["system"] == "stepahead" else f"{x['stepahead_is_times_faster']:.2f} times as fast"
        text.append(f"| {x['date']} | {x['requests']} | {x['system']} | {speed} | {ratio} |")
    text += ["", f"torch {first['torch']}, transformers {first['transformers']}.", ""]
    return "\n".join(text)


TRAFFIC: list[tuple[str, str, str]] = [
    ("requests", "requests", "d"),
    ("refused", "refused", "d"),
    ("tokens/s", "output_tokens_per_s", ",.0f"),
    *((f"TTFT p{q} ms", f"ttft_ms_p{q}", ",.1f") for q in (50, 90, 99)),
    *((f"gap p{q} ms", f"itl_ms_p{q}", ",.1f") for q in (50, 90, 99)),
    ("good", "good_share", ".1%"),
    ("cache hits", "cache_hit_rate", ".1%"),
    ("preemptions", "preemptions", "d"),
    ("ratio", "ratio", ".2f"),
    ("wanted", "ratio_target", ""),
]


def traffic_table(lines: list[dict[str, Any]]) -> list[str]:
    """A row for each part of a scenario, in Markdown."""
    names = ["date", "version", "scenario", "part", "shape", "overlap", "tokens per step"]
    text = ["| " + " | ".join([*names, *(name for name, _, _ in TRAFFIC)]) + " |"]
    text.append("|" + "---|" * (len(names) + len(TRAFFIC)))
    for x in lines:
        overlap = {True: "on", False: "off"}.get(x.get("overlap"), "")  # type: ignore[arg-type]
        row = [x["date"], x["version"], x["scenario"], x["part"], x["shape"], overlap]
        row.append(str(x.get("max_tokens_per_step", "")))
        text.append("| " + " | ".join(row + [cell([x.get(key)], form) for _, key, form in TRAFFIC]) + " |")
    return text


def traffic_page(lines: list[dict[str, Any]]) -> str:
    first = lines[-1]
    text = [
        f"# Traffic on {first['device']}",
        "",
        "Made by `python -m benchmarks.report` from the lines beside it, which "
        "`python -m benchmarks.traffic` wrote: an open loop, random weights and prompts, greedy. "
        "TTFT counts from when a request was due. Gap: from tokens to the next tokens of a request; in "
        "long-beside-chats those of the chats that end while a long prompt prefills, and ratio is their "
        "p99 over the p99 of those without. In shared-prefix ratio is cold TTFT p50 over shared. Good: "
        f"share of all requests with a TTFT up to {first.get('ttft_target_ms', 500):.0f} ms and 99 % of "
        f"their gaps up to {first.get('itl_target_ms', 50):.0f} ms. Cache hits: share of prompt tokens.",
        "",
        *traffic_table(lines),
        "",
    ]
    return "\n".join(text)


FLEET: list[tuple[str, str, str]] = [
    ("streams", "streams", "d"),
    ("tokens/s", "output_tokens_per_s", ",.0f"),
    ("scaling", "scaling", ".2f"),
    ("HTTP costs", "http_cost", ".1%"),
    *((f"TTFT p{q} ms", f"ttft_ms_p{q}", ",.1f") for q in (50, 99)),
    *((f"gap p{q} ms", f"itl_ms_p{q}", ",.1f") for q in (50, 99)),
    ("failed", "failed", "d"),
    ("cache hits", "cache_hit_rate", ".1%"),
]


def cores(line: dict[str, Any]) -> str:
    """Of each kind of process: all together, and the busiest where there are several."""
    cells = []
    for kind, used in line.get("cpu", {}).items():
        most = f" (most {used['most']:.2f})" if used["n"] > 1 else ""
        if used["all"] >= 0.005:
            cells.append(f"{kind} {used['all']:.2f}{most}")
    return ", ".join(cells)


def fleet_page(lines: list[dict[str, Any]]) -> str:
    text = [
        f"# Several engines on one machine: {', '.join(dict.fromkeys(x['device'] for x in lines))}",
        "",
        "Made by `python -m benchmarks.report` from the lines beside it, which `python -m scripts.multi_gpu` "
        "wrote: random weights, as many streams for each replica as it has rows, all busy. Bare: the engine "
        "asked in its own process, without tape, Router and HTTP. HTTP costs: tokens/s below bare times "
        "replicas. Cores: how many each kind of process used.",
        "",
    ]
    if paced := sorted({x["engine"] for x in lines if x["engine"] != "GPU"}):
        text += [f"**No GPU** where the engine is called paced ({'; '.join(paced)}).", ""]
    names = ["date", "version", "engine", "shape", "phase", "replicas", "Routers", "ingress", "policy"]
    text.append("| " + " | ".join([*names, *(name for name, _, _ in FLEET), "cores"]) + " |")
    text.append("|" + "---|" * (len(names) + len(FLEET) + 1))
    for x in lines:
        if "output_tokens_per_s" not in x:
            continue
        row = [x["date"], x["version"], x["engine"].split(":")[0], x["shape"], x["phase"]]
        row += [str(x["replicas"]), str(x["router_replicas"]), x["ingress"] or "", x.get("policy", "")]
        cells = [cell([x.get(key)], form) for _, key, form in FLEET]
        text.append("| " + " | ".join([*row, *cells, cores(x)]) + " |")
    for x in lines:
        if x["phase"] == "kill" and "error" not in x:
            text += ["", _death(x)]
        if "error" in x:
            text += ["", f"{x['shape']}, {x['phase']}: {x['error']}"]
    return "\n".join([*text, ""])


def _death(x: dict[str, Any]) -> str:
    before, after = x["before"], x["after"]
    back = "not while it was watched" if x["recovery_s"] is None else f"after {x['recovery_s']:.1f} s"
    return (
        f"{x['date']}, {x['shape']}, {x['engine']}: one of {x['replicas']} replicas killed under "
        f"{x['streams']} streams: {x['failed']} of {x['requests']} requests failed; {x['alive_at_death']} "
        f"were being answered, whose longest pause was {x['stall_ms_p50']:,.0f} ms in the median and "
        f"{x['stall_ms_max']:,.0f} ms at most; p99 gap {before['itl_ms_p99']:,.1f} ms before, "
        f"{after['itl_ms_p99']:,.1f} ms after; a new replica took requests {back}."
    )


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


def make(lines: list[dict[str, Any]]) -> str:
    for key, kind in (
        ("system", cpu_page),
        ("scenario", traffic_page),
        ("phase", fleet_page),
        ("route", streaming_page),
    ):
        if key in lines[0]:
            return kind(lines)
    return page(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    results: Path = parser.parse_args().results
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    results.with_suffix(".md").write_text(make(lines))


if __name__ == "__main__":
    main()
