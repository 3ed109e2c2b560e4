"""Traffic as it comes."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.cells import cell

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
