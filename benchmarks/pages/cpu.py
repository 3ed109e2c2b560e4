"""The demo model on a CPU beside other systems."""

from __future__ import annotations

from typing import Any


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
