"""*Replica*: what one GPU does, and whether the host keeps ahead of it."""

from __future__ import annotations

from typing import Any

from dashboards.panels import Panel, board, graph, number, spread
from dashboards.promql import (
    NODE_CPU_UTILIZATION,
    NODE_GPU_TEMPERATURE,
    NODE_GPU_UTILIZATION,
    NODE_MEMORY_USED,
    PER_REPLICA,
    on_gpu_of,
    rate,
    select,
    share,
    total,
)
from engine import metrics as m

NOT_USED = 'state!="used"'
NOT_IDLE = 'phase!="idle"'


def replica(datasource: str | None = None) -> dict[str, Any]:
    """Grafana's JSON; see `panels.board`."""
    rows: dict[str, list[Panel]] = {
        "Now": _now(),
        "GPU": _gpu(),
        "Overlap: is the CPU one step ahead?": _overlap(),
        "Anatomy of a step": _step(),
        "Requests in the engine": _requests(),
        "Key-value cache": _cache(),
        "Node": _node(),
    }
    description = "Engines one by one: GPU, overlap of host and device, steps, requests, cache."
    return board("stepahead-replica", "Replica", description, rows, datasource)


def _now() -> list[Panel]:
    active = f"avg ({select(m.GPU_ACTIVE_RATIO)})"
    return [
        number(
            "Engine",
            "short",
            (
                f"sum by (model, accelerator, mig, overlap, version) ({select(m.ENGINE_INFO)})",
                "{{model}} on {{accelerator}}, overlap {{overlap}}, MIG {{mig}}, {{version}}",
            ),
            help=m.ENGINE_INFO.help,
            width=8,
        ),
        number("Device active", "percentunit", (active, "active"), help=m.GPU_ACTIVE_RATIO.help),
        number("Host's work overlapped", "percentunit", (f"avg ({select(m.OVERLAP_RATIO)})", "overlapped")),
        number("Output tokens/s", "short", (rate(m.OUTPUT_TOKENS), "tokens/s")),
        number("Steps/s", "short", (rate(m.STEPS), "steps/s")),
    ]


def _gpu() -> list[Panel]:
    gpu = (*PER_REPLICA, "gpu_uuid")
    legend = "{{replica}} on {{gpu_uuid}}"
    return [
        graph(
            "GPU utilisation by replica",
            "percentunit",
            (f"max by ({', '.join(gpu)}) ({select(m.GPU_UTILIZATION)})", legend),
            help=m.GPU_UTILIZATION.help,
            top=1,
        ),
        graph(
            "GPU utilisation by Ray's node agent, of the GPU that the replica has",
            "percent",
            (on_gpu_of(m.ENGINE_INFO, NODE_GPU_UTILIZATION), legend),
            help="Ray's own reading, by GPU and without a replica, joined on the GPU's UUID",
            top=100,
        ),
        graph(
            "Device active, from the engine's own events",
            "percentunit",
            (f"max by ({', '.join(gpu)}) ({select(m.GPU_ACTIVE_RATIO)})", legend),
            help=m.GPU_ACTIVE_RATIO.help,
            top=1,
        ),
        graph(
            "GPU memory",
            "bytes",
            (f"max by ({', '.join(gpu)}) ({select(m.GPU_MEMORY_USED)})", "{{replica}} used"),
            (f"max by ({', '.join(gpu)}) ({select(m.GPU_MEMORY_TOTAL)})", "{{replica}} of"),
            help=m.GPU_MEMORY_USED.help,
        ),
        graph(
            "Power and temperature",
            "watt",
            (f"max by ({', '.join(gpu)}) ({select(m.GPU_POWER)})", "{{replica}} W"),
            (on_gpu_of(m.ENGINE_INFO, NODE_GPU_TEMPERATURE), "{{replica}} °C"),
            help=m.GPU_POWER.help,
        ),
        graph(
            "Output tokens for each joule",
            "short",
            (f"max by ({', '.join(gpu)}) ({select(m.TOKENS_PER_JOULE)})", "{{replica}} last minute"),
            (
                f"{rate(m.OUTPUT_TOKENS, *PER_REPLICA)} / {rate(m.GPU_ENERGY, *PER_REPLICA)}",
                "{{replica}}",
            ),
            help=m.TOKENS_PER_JOULE.help,
        ),
    ]


def _overlap() -> list[Panel]:
    active, gap = rate(m.ACTIVE_SECONDS, *PER_REPLICA), rate(m.GAP_SECONDS, *PER_REPLICA)
    return [
        graph(
            "Device waits between steps, of the time with work",
            "percentunit",
            (share(gap, f"({active} + ({gap} or 0 * {active}))"), "{{replica}}"),
            help=m.GAP_SECONDS.help,
        ),
        spread("Gap before a step", "s", m.STEP_GAP),
        graph(
            "Host's work that the device's hides",
            "percentunit",
            (f"max by ({', '.join(PER_REPLICA)}) ({select(m.OVERLAP_RATIO)})", "{{replica}}"),
            help=m.OVERLAP_RATIO.help,
            top=1,
        ),
        graph(
            "Decode tokens carried over on the device",
            "percentunit",
            (
                share(rate(m.CARRIED_TOKENS, *PER_REPLICA), rate(m.DECODE_TOKENS, *PER_REPLICA)),
                "{{replica}}",
            ),
            help=m.CARRIED_TOKENS.help,
            top=1,
            width=12,
        ),
        graph(
            "Tokens computed in vain",
            "percentunit",
            (
                share(rate(m.WASTED_TOKENS, *PER_REPLICA), rate(m.OUTPUT_TOKENS, *PER_REPLICA)),
                "{{replica}}",
            ),
            help=f"{m.WASTED_TOKENS.help}; over tokens generated",
            width=12,
        ),
    ]


def _step() -> list[Panel]:
    return [
        spread("Compute of a step", "s", m.STEP_COMPUTE),
        spread("Host's work on a step", "s", m.HOST_STEP),
        graph(
            "Host's time for a step by phase",
            "s",
            (
                f"{rate(m.HOST_PHASE, 'phase', matchers=(NOT_IDLE,))}"
                f" / on () group_left () ({rate(m.STEPS)} > 0)",
                "{{phase}}",
            ),
            help=m.HOST_PHASE.help,
            stacked=True,
        ),
        graph("Steps/s by kind", "ops", (rate(m.STEPS, "kind"), "{{kind}}"), help=m.STEPS.help, stacked=True),
        spread("Requests in a step", "short", m.STEP_REQUESTS, 0.95),
        spread("Tokens in a step", "short", m.STEP_TOKENS, 0.95),
    ]


def _requests() -> list[Panel]:
    return [
        graph(
            "Requests",
            "short",
            (total(m.RUNNING), "running"),
            (total(m.WAITING), "waiting"),
            (total(m.RUNNING_LIMIT), "may run"),
            help=m.WAITING.help,
        ),
        spread("Time in the queue", "s", m.QUEUE),
        graph(
            "Accepted, preempted, aborted",
            "ops",
            (rate(m.ADMITTED), "accepted"),
            (rate(m.PREEMPTIONS), "preempted"),
            (rate(m.ABORTS, "cause"), "aborted: {{cause}}"),
            help=m.ABORTS.help,
        ),
    ]


def _cache() -> list[Panel]:
    hits, computed = rate(m.PREFIX_HIT_TOKENS, *PER_REPLICA), rate(m.PROMPT_TOKENS, *PER_REPLICA)
    return [
        graph(
            "Blocks by state",
            "short",
            (total(m.KV_BLOCKS, "state"), "{{state}}"),
            help=m.KV_BLOCKS.help,
            stacked=True,
        ),
        graph(
            "Room for tokens",
            "short",
            (
                f"{total(m.KV_BLOCKS, *PER_REPLICA, matchers=(NOT_USED,))}"
                f" * {total(m.KV_BLOCK_SIZE, *PER_REPLICA)}",
                "{{replica}}",
            ),
            help="Tokens that find a block, if need be one that is kept for an equal prefix",
        ),
        graph(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            (share(hits, f"({computed} + ({hits} or 0 * {computed}))"), "{{replica}}"),
            help=m.PREFIX_HIT_TOKENS.help,
            top=1,
        ),
    ]


def _node() -> list[Panel]:
    return [
        graph(
            "CPU of the nodes",
            "percent",
            (f"max by (ip) ({NODE_CPU_UTILIZATION})", "{{ip}}"),
            help="Ray's own reading, of all nodes",
            top=100,
            width=12,
        ),
        graph(
            "Memory of the nodes",
            "bytes",
            (f"max by (ip) ({NODE_MEMORY_USED})", "{{ip}}"),
            help="Ray's own reading, of all nodes",
            width=12,
        ),
    ]
