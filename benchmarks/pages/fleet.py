"""Several engines on one machine."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.cells import cell

Line = dict[str, Any]

FLEET: list[tuple[str, str, str]] = [
    ("streams", "streams", "d"),
    ("tokens/s", "output_tokens_per_s", ",.0f"),
    ("scaling", "scaling", ".2f"),
    ("HTTP costs", "http_cost", ".1%"),
    *((f"TTFT p{q} ms", f"ttft_ms_p{q}", ",.1f") for q in (50, 99)),
    *((f"gap p{q} ms", f"itl_ms_p{q}", ",.1f") for q in (50, 99)),
    *((f"step p{q} ms", f"step_ms_p{q}", ",.2f") for q in (50, 99)),
    ("GPU idle before a step p99 µs", "step_gap_us_p99", ",.0f"),
    ("failed", "failed", "d"),
    ("stuck", "stuck", "d"),
    ("cache hits", "cache_hit_rate", ".1%"),
]


def cores(line: Line) -> str:
    """Of each kind of process: all together, and the busiest where there are several."""
    cells = []
    for kind, used in line.get("cpu", {}).items():
        most = f" (most {used['most']:.2f})" if used["n"] > 1 else ""
        if used["all"] >= 0.005:
            cells.append(f"{kind} {used['all']:.2f}{most}")
    return ", ".join(cells)


def utilization(line: Line) -> str:
    """Of each replica's GPU, out of the lines of the metrics endpoint."""
    lines = [each for each in line.get("gpu_utilization", []) if "_gpu_utilization{" in each]
    return ", ".join(f"{float(each.rpartition(' ')[2]):.0%}" for each in lines)


def fleet_page(lines: list[Line]) -> str:
    text = [
        f"# Several engines on one machine: {', '.join(dict.fromkeys(x['device'] for x in lines))}",
        "",
        *dict.fromkeys(f"**{x['note']}**\n" for x in lines if x.get("note")),
    ]
    if paced := sorted({x["engine"] for x in lines if x["engine"] != "GPU"}):
        text += [
            f"**No GPU computed anything** where the engine is called paced ({'; '.join(paced)}, as "
            "measured on one): it computes no tokens and takes its time. Scheduler, tape, Routers, HTTP, "
            "Ray Serve and clients are the real ones, and share the cores named below.",
            "",
        ]
    text += [
        "Made by `python -m benchmarks.report` from the lines beside it, which the commands below wrote: as "
        "many streams for each replica as it has rows, all busy; weights are random, but the demo model's. "
        "Bare: engines asked in their own processes, without tape, Router and HTTP. HTTP costs: tokens/s "
        "below those of as many bare engines. Step, and the time in which the GPU had work and waited "
        "for it: of the slowest replica, by its engine's own clock. Stuck: sent before the window, and "
        "without a token when it ended. Cores: those that each kind of process used.",
        "",
        *(started(x) for x in lines if x["phase"] == "about" and "each" in x),
        "",
    ]
    names = ["date", "version", "engine", "shape", "phase", "replicas", "Routers", "ingress", "policy"]
    heads = [*names, *(name for name, _, _ in FLEET), "GPUs busy", "cores"]
    text += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for x in lines:
        if "output_tokens_per_s" not in x:
            continue
        row = [x["date"], x["version"], x["engine"].split(":")[0], x["shape"], x["phase"]]
        row += [str(x["replicas"]), str(x["router_replicas"]), x["ingress"] or "", x.get("policy", "")]
        cells = [cell([x.get(key)], form) for _, key, form in FLEET]
        text.append("| " + " | ".join([*row, *cells, utilization(x), cores(x)]) + " |")
    text += [*needed(lines)]
    for x in lines:
        if x["phase"] == "kill" and "error" not in x:
            text += ["", _death(x)]
        if "error" in x:
            text += ["", f"{x['shape']}, {x['phase']}: {x['error']}"]
    return "\n".join([*text, ""])


def started(x: Line) -> str:
    """What was started, and where each replica found itself."""
    text = (
        f"- {x['date']}, {x['shape']}: `{x['command']}`, up after {x['start_s']:.0f} s on {x['cores']} cores"
    )
    for each in x["each"]:
        if each["gpus_seen"]:
            here = len(each["cores"])
            near = "unknown" if each["cores_near_gpu"] is None else str(len(each["cores_near_gpu"]))
            text += (
                f"; replica {each['replica']} sees {', '.join(each['gpus_seen'])} (CUDA_VISIBLE_DEVICES "
                f"{each['cuda_visible_devices']}), runs on {here} cores, near its GPU: {near}"
            )
    return text


def needed(lines: list[Line]) -> list[str]:
    """How many Routers engines at full speed need, by the CPU that a token took in them."""
    names = ["date", "shape", "replicas", "Routers", "ingress", "bare tokens/s of one at an H200's pace"]
    names += ["µs of a Router per token", "Routers kept fully busy by so many replicas"]
    text = [
        "",
        "Routers needed, if a token takes as much of one as it did here, requests included. Of a paced "
        "engine it takes more than of a GPU: the fewer tokens come at once, the more each costs.",
        "",
        "| " + " | ".join(names) + " |",
        "|" + "---|" * len(names),
    ]
    rows, bare = [], dict[tuple[str, str, Any], float]()
    for x in lines:
        key = x["date"], x["shape"], x.get("pace")
        if x["phase"] == "bare" and x["replicas"] == 1 and "output_tokens_per_s" in x:
            bare[key] = x["output_tokens_per_s"] * (x.get("pace") or 1)
        elif x["phase"] == "http" and "cpu_us_per_token" in x and key in bare:
            each = x["cpu_us_per_token"]["router"]
            row = [x["date"], x["shape"], str(x["replicas"]), str(x["router_replicas"]), x["ingress"]]
            row += [f"{bare[key]:,.0f}", f"{each:.0f}", f"{bare[key] * x['replicas'] * each / 1e6:.1f}"]
            rows.append("| " + " | ".join(row) + " |")
    return [*text, *rows] if rows else []


def _death(x: dict[str, Any]) -> str:
    before, after = x["before"], x["after"]
    seconds = x["recovery_s"]
    back = "had not come when time was over" if seconds is None else f"took requests after {seconds:.1f} s"
    return (
        f"{x['date']}, {x['version']}, {x['shape']}, {x['engine']}: one of {x['replicas']} replicas killed "
        f"under {x['streams']} streams: {x['failed']} of {x['requests']} requests failed; "
        f"{x['alive_at_death']} were being answered, whose longest pause was "
        f"{x['stall_ms_p50']:,.0f} ms in the median and "
        f"{x['stall_ms_max']:,.0f} ms at most; p99 gap {before['itl_ms_p99']:,.1f} ms before, "
        f"{after['itl_ms_p99']:,.1f} ms after; a new replica {back}."
    )
