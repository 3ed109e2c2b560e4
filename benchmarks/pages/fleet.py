"""Several engines on one machine."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.cells import cell

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
