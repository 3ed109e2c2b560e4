"""The engine on one device, against its limits and a peer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from benchmarks.limits import percentages
from benchmarks.pages.cells import cell

Line = dict[str, Any]
Column = tuple[str, str, str]
"""Heading, key (of a phase of the host after a dot), format."""

SPEED: list[Column] = [
    ("ms per step", "ms_per_step", ".2f"),
    ("p99", "ms_per_step_p99", ".2f"),
    ("limit, bytes", "limit_ms", ".2f"),
    ("% of it", "percent_of_limit", ".0f"),
    ("limit, matmuls", "limit_matmul_ms", ".2f"),
    ("% of it", "percent_of_matmul_limit", ".0f"),
    ("tokens/s", "output_tokens_per_s", ",.0f"),
    ("total s", "total_s", ".2f"),
    ("limit s", "limit_total_s", ".2f"),
    ("% of it", "percent_of_total_limit", ".0f"),
    ("stepahead is times as fast", "ratio", ".2f"),
]
TIMES: list[Column] = [
    ("GPU active, events", "gpu_active_events", ".2%"),
    ("kernels", "gpu_active_kernels", ".2%"),
    ("kernels ms per step", "kernel_ms_per_step", ".2f"),
    ("gap p50 µs", "gap_us_p50", ".1f"),
    ("gap p99 µs", "gap_us_p99", ".1f"),
    *(
        (phase, f"host_ms.{phase}", ".3f")
        for phase in ("inbox", "schedule", "prepare", "launch", "commit", "publish")
    ),
    ("host's work", "host_work_ms", ".3f"),
    ("collect", "host_ms.collect", ".2f"),
    ("start s", "start_s", ".1f"),
    ("after weights", "start_after_weights_s", ".1f"),
]


def value(line: Line, key: str) -> Any:
    """None where a line, an old one say, does not have it."""
    name, _, phase = key.partition(".")
    found = line.get(name)
    return found.get(phase) if phase and found else found


def all_true(lines: Sequence[Line], key: str) -> str:
    known = [line[key] for line in lines if line.get(key) is not None]
    return "" if not known else "yes" if all(known) else "no"


def name(line: Line) -> str:
    return line["workload"] if line["peer"] is None else f"{line['workload']}, {line['peer']}"


def engine_page(lines: list[Line]) -> str:
    """A row for each configuration with the spread of its runs, the newest state first."""
    states: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        states[line["date"], line.get("version", "")].append(line | percentages(line))
    ordered = [line for state in reversed(states.values()) for line in state]
    newest = ordered[0]
    speed, times = (partial(table, ordered, columns) for columns in (SPEED, TIMES))
    text = [
        f"# {newest['device']}",
        "",
        "Made by `python -m benchmarks.report` from the lines beside it, which "
        "`python -m benchmarks.engine` wrote. Random weights and prompts, greedy, all requests admitted "
        "at once; a workload's name says shape and requests. Medians of the runs, with their spread.",
        "",
        "ms per step: from one result to the next, of steps that only decode. Limit, bytes: weights, keys "
        "and values at the read bandwidth measured in the same run. Limit, matmuls: the matrix products of "
        "a step, measured bare in the same run, in place of the weights' bytes. Limit s: prompts at the "
        "rate of their products, then decode steps at the limit by matmuls. Other systems ran after it in "
        "the same command on the same prompts: transformers in the same process on the same weights, vLLM "
        "in a process of its own on random weights of its own, overlap standing for its asynchronous "
        "scheduling. The ratio is of tokens/s with the same overlap.",
        "",
        *speed(),
        *(
            f"\n{line['date']}, {name(line)}, overlap {'on' if line['overlap'] else 'off'}: {line['error']}"
            for line in ordered
            if "error" in line
        ),
        "",
        "Where the time goes. GPU active and gap: from events around each step's work on the compute "
        "lane; kernels: from torch.profiler in a run of its own, the share of decode steps in which one "
        "ran, and how much of a step they are. Then the host, ms per step: its work by phase, and "
        "`collect`, its wait for the device. Start: of the engine, and without loading the weights.",
        "",
        *times(),
        "",
        f"torch {newest['torch']}, transformers {newest['transformers']}.",
        "",
    ]
    return "\n".join(text)


def table(lines: list[Line], columns: list[Column]) -> list[str]:
    """In Markdown, without rows in which no column has anything."""
    heads = ["date", "version", "workload", "overlap", "runs", *(head for head, _, _ in columns)]
    heads += ["tokens equal", "tokens checked"] if columns is SPEED else []
    text = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    groups: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        if "error" not in line:
            groups[itemgetter("date", "version", "workload", "overlap", "peer")(line)].append(line)
    for runs in groups.values():
        first = runs[0]
        cells = [cell((value(run, key) for run in runs), form) for _, key, form in columns]
        if not any(cells):
            continue
        cells += (
            [all_true(runs, f"tokens_{what}") for what in ("equal", "checked")] if columns is SPEED else []
        )
        row = [
            first["date"],
            first["version"],
            name(first),
            "on" if first["overlap"] else "off",
            str(len(runs)),
        ]
        text.append("| " + " | ".join([*row, *cells]) + " |")
    return text


SCREEN: list[tuple[str, str, str, int]] = [
    ("ms/step", "ms_per_step", ".3f", 8),
    ("p99", "ms_per_step_p99", ".3f", 8),
    ("%bytes", "percent_of_limit", ".1f", 7),
    ("%matmul", "percent_of_matmul_limit", ".1f", 8),
    ("%total", "percent_of_total_limit", ".1f", 7),
    ("tokens/s", "output_tokens_per_s", ".0f", 9),
    ("total s", "total_s", ".2f", 8),
    ("active", "gpu_active_events", ".4f", 7),
    ("kernels", "gpu_active_kernels", ".4f", 8),
    ("gap us", "gap_us_p50", ".1f", 8),
    ("p99", "gap_us_p99", ".1f", 9),
    ("host ms", "host_work_ms", ".3f", 8),
    ("start s", "start_s", ".1f", 8),
    ("ratio", "ratio", ".2f", 6),
]


def screen(lines: list[Line]) -> list[str]:
    """A table of single runs for a terminal, its heading first."""
    heads = "".join(f"{head:>{width}}" for head, _, _, width in SCREEN)
    rows = [f"{'workload':34}overlap run{heads}  equal checked"]
    for line in lines:
        row = f"{name(line):34}{'on' if line['overlap'] else 'off':7}{line['run']:4}"
        if "error" in line:
            rows.append(f"{row}  {line['error']}")
            continue
        for _, key, form, width in SCREEN:
            found = value(line, key)
            row += f"{'' if found is None else format(found, form):>{width}}"
        rows.append(f"{row}  {all_true([line], 'tokens_equal'):5} {all_true([line], 'tokens_checked')}")
    return rows
