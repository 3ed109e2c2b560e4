"""Every metric that stepahead exports: name, type, unit, labels, buckets and what it means.

Here only their description; `deployments/metrics.py` records them through `ray.serve.metrics`. Ray
exports a name with the prefix `ray_`; Serve adds the labels `application`, `deployment` and
`replica`. A gauge that is not set again disappears after two of Ray's report intervals (20 s by
default), so each is set about once a second, also when idle. Ray rebuilds the sum of a histogram
from bucket midpoints: what needs an exact mean has a counter of its own.

    python -m engine.metrics > docs/metrics.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Owner = Literal["engine", "router"]

SERVE_LABELS = ("application", "deployment", "replica")
"""Added by Ray Serve to each metric."""
ENGINE_LABELS = ("gpu_uuid",)
"""On each metric of an EngineReplica: the UUID of its GPU, or of its MIG slice; empty on a CPU."""

# Upper bounds, in seconds, of what people wait for: from a cached prompt on a small model to a long queue.
LATENCY = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
INTER_TOKEN = (
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.2,
    0.4,
    1,
)
WHOLE = (0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 240, 480, 960, 1920)
STEP = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)
SHORT = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels` are its own, beside those of Serve and, for an engine's, `ENGINE_LABELS`."""

    name: str
    kind: Kind
    unit: str
    help: str
    owner: Owner
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, the last (infinity) left out."""
    gpu_only: bool = False
    """Absent on a CPU, and where NVML does not give it."""

    @property
    def exported(self) -> str:
        """Its name in Prometheus; a histogram has `_bucket`, `_count` and `_sum` of it."""
        return f"ray_{self.name}"

    @property
    def all_labels(self) -> tuple[str, ...]:
        return SERVE_LABELS + (ENGINE_LABELS if self.owner == "engine" else ()) + self.labels


METRICS: dict[str, Metric] = {}
"""By name, in the order in which docs/metrics.md lists them."""


def _define(owner: Owner, kind: Kind, name: str, unit: str, help: str, **more: object) -> Metric:
    metric = Metric(f"stepahead_{name}", kind, unit, help, owner, **more)  # type: ignore[arg-type]
    assert metric.name not in METRICS
    METRICS[metric.name] = metric
    return metric


def _counter(name: str, unit: str, help: str, *labels: str, owner: Owner = "engine") -> Metric:
    return _define(owner, "counter", f"{name}_total", unit, help, labels=labels)


def _gauge(name: str, unit: str, help: str, *labels: str) -> Metric:
    return _define("engine", "gauge", name, unit, help, labels=labels)


def _gpu(kind: Kind, name: str, unit: str, help: str, *labels: str) -> Metric:
    return _define("engine", kind, name, unit, help, labels=labels, gpu_only=True)


def _histogram(
    name: str, unit: str, help: str, buckets: tuple[float, ...], *labels: str, owner: Owner = "engine"
) -> Metric:
    return _define(owner, "histogram", name, unit, help, buckets=buckets, labels=labels)


# What the replica runs on, from NVML

ENGINE_INFO = _gauge(
    "engine_info",
    "1",
    "Always 1: what the engine runs. `mig` is true where the GPU is a MIG slice",
    "model",
    "accelerator",
    "mig",
    "overlap",
    "version",
)
GPU_UTILIZATION = _gpu(
    "gauge",
    "gpu_utilization",
    "ratio",
    "Share of NVML's last sample in which a kernel ran (not on a MIG slice)",
)
GPU_MEMORY_USED = _gpu("gauge", "gpu_memory_used_bytes", "bytes", "Memory in use on the replica's own GPU")
GPU_MEMORY_TOTAL = _gpu("gauge", "gpu_memory_total_bytes", "bytes", "Memory of the replica's own GPU")
GPU_POWER = _gpu("gauge", "gpu_power_watts", "watts", "Power draw of the replica's own GPU")
GPU_ENERGY = _gpu(
    "counter", "gpu_energy_joules_total", "joules", "Energy that the GPU has used since the replica started"
)
TOKENS_PER_JOULE = _gpu(
    "gauge", "tokens_per_joule", "tokens per joule", "Output tokens for each joule over the last minute"
)
GPU_COST = _gauge(
    "gpu_cost_per_hour", "currency per hour", "The setting `gpu_cost_per_hour`, where it is set"
)
TOKEN_COST = _gauge(
    "cost_per_million_tokens",
    "currency per million tokens",
    "GPU cost of a million output tokens at the last minute's rate, where `gpu_cost_per_hour` is set and "
    "there was any output",
)

# The overlap, from the engine's own timed events on every step; on a CPU the device is the compute lane

GPU_ACTIVE_RATIO = _gauge(
    "gpu_active_ratio",
    "ratio",
    "Share of the last second or so in which the device computed a step; 0 when idle",
)
OVERLAP_RATIO = _gauge(
    "overlap_ratio",
    "ratio",
    "Share of the host's work on steps that took place while the device computed, in the last busy second",
)
ACTIVE_SECONDS = _counter("gpu_active_seconds", "seconds", "Time in which the device computed steps")
GAP_SECONDS = _counter(
    "gpu_gap_seconds",
    "seconds",
    "Time between the end of a step's compute and the beginning of the next one's, while there was work",
)
STEP_GAP = _histogram(
    "step_gap_seconds", "seconds", "The gap before a step, where the engine was not idle before it", SHORT
)
STEP_COMPUTE = _histogram("step_compute_seconds", "seconds", "Begin to end of a step's compute", STEP)
HOST_STEP = _histogram("host_step_seconds", "seconds", "The host's work on a step, waiting left out", SHORT)
HOST_PHASE = _counter(
    "host_phase_seconds",
    "seconds",
    "The engine thread's time by phase: inbox, schedule, prepare, launch, collect (waiting for the device), "
    "commit, publish, idle (waiting for requests)",
    "phase",
)

# Steps and tokens

STEPS = _counter("steps", "steps", "Steps by kind: decode (only), prefill (only) or mixed", "kind")
STEP_REQUESTS = _histogram("step_requests", "requests", "Batch size: requests in a step", REQUESTS)
STEP_TOKENS = _histogram("step_tokens", "tokens", "Tokens in a step, prompt chunks included", TOKENS)
PROMPT_TOKENS = _counter(
    "prompt_tokens", "tokens", "Prompt tokens computed, recomputation after preemption included"
)
PREFIX_HIT_TOKENS = _counter(
    "prefix_hit_tokens", "tokens", "Prompt tokens found in the prefix cache, and not computed"
)
OUTPUT_TOKENS = _counter("output_tokens", "tokens", "Tokens generated")
DECODE_TOKENS = _counter("decode_tokens", "tokens", "Tokens computed in decoding: one per request and step")
CARRIED_TOKENS = _counter(
    "carried_tokens",
    "tokens",
    "Decode tokens whose input the device took from the step before, since the host did not know it yet",
)
WASTED_TOKENS = _counter(
    "wasted_tokens", "tokens", "Tokens computed for requests that had ended meanwhile, and dropped"
)
PREEMPTIONS = _counter("preemptions", "preemptions", "Requests that lost their blocks and are computed again")

# Requests in the engine

RUNNING = _gauge("requests_running", "requests", "Requests that own a row and blocks")
WAITING = _gauge(
    "requests_waiting", "requests", "Requests that wait for a row or blocks, preempted ones included"
)
RUNNING_LIMIT = _gauge("requests_running_limit", "requests", "The engine's max_running_requests")
KV_BLOCKS = _gauge(
    "kv_blocks",
    "blocks",
    "Blocks of the key-value cache by state: used, cached (kept for an equal prefix) or free; they add up",
    "state",
)
KV_BLOCK_SIZE = _gauge("kv_block_tokens", "tokens", "Tokens in a block of the key-value cache")
ADMITTED = _counter("requests_admitted", "requests", "Attempts at a sequence that the engine has accepted")
FINISHED = _counter(
    "requests_finished",
    "requests",
    "Accepted attempts by how they ended, each in exactly one: stop, length, timeout, abort or error",
    "reason",
)
ABORTS = _counter(
    "requests_aborted",
    "requests",
    "Aborted attempts by cause: cancelled (by the Router: client gone, stop string), unwanted (the tape's "
    "answer says so), moved (to another replica), tape_lost, reader_failed, stopped (the engine stops)",
    "cause",
)
QUEUE = _histogram(
    "queue_seconds", "seconds", "From an attempt's arrival at the engine to its first row", LATENCY
)

# The tape, as the replica sees it

TAPES = _gauge("tapes", "tapes", "Open tapes: Routers that this replica sends tokens to")
TAPE_FRAMES = _counter("tape_frames", "frames", "Frames sent on tapes")
TAPE_BYTES = _counter("tape_bytes", "bytes", "Bytes of these frames")
TAPE_RECORDS = _counter("tape_records", "records", "Records in these frames: one per request with news")
TAPE_ROUND_TRIP = _histogram(
    "tape_round_trip_seconds", "seconds", "From sending a frame to the Router's answer to it", SHORT
)
TAPE_LAG = _gauge(
    "tape_lag_seconds", "seconds", "Age of the oldest frame without an answer; 0 if there is none"
)

# Requests as clients see them, by the Router

HTTP_REQUESTS = _counter(
    "http_requests",
    "requests",
    "Answers to completion requests by endpoint and status; a stream counts by the status it began with",
    "endpoint",
    "status",
    owner="router",
)
SEQUENCES_STARTED = _counter("sequences_started", "sequences", "Choices begun", owner="router")
SEQUENCES_FINISHED = _counter(
    "sequences_finished",
    "sequences",
    "Choices by how they ended, each in exactly one: stop, length, timeout, abort (the client left), or why "
    "they came to nothing: invalid, full, unavailable, other model, moved, lost, failed",
    "reason",
    owner="router",
)
RESUMPTIONS = _counter(
    "resumptions",
    "attempts",
    "Attempts after the first, by why the one before was lost",
    "cause",
    owner="router",
)
TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    "seconds",
    "From the HTTP request's arrival to a choice's first token",
    LATENCY,
    owner="router",
)
INTER_TOKEN_SECONDS = _histogram(
    "inter_token_seconds",
    "seconds",
    "Between a token and the one before it, as they reach the Router; of every 16th token of a choice",
    INTER_TOKEN,
    owner="router",
)
REQUEST_SECONDS = _histogram(
    "request_seconds",
    "seconds",
    "From the HTTP request's arrival to a choice's end, where it ended with stop or length",
    WHOLE,
    owner="router",
)
PROMPT_LENGTH = _histogram(
    "prompt_length_tokens", "tokens", "Tokens of a choice's prompt", TOKENS, owner="router"
)
OUTPUT_LENGTH = _histogram(
    "output_length_tokens",
    "tokens",
    "Tokens of a choice that ended with stop or length",
    TOKENS,
    owner="router",
)
ROUTER_DECISIONS = _counter(
    "router_decisions",
    "decisions",
    "Choices of a replica by what decided: prefix (cached tokens), load, affinity (session) or only (one)",
    "reason",
    owner="router",
)
ROUTER_SCORE = _histogram(
    "router_score_tokens",
    "tokens",
    "Score of the replica chosen: tokens to compute before the request's first one, without cached ones",
    TOKENS,
    owner="router",
)
ROUTER_SECONDS = _histogram("router_decision_seconds", "seconds", "Time to choose", SHORT, owner="router")


_INTRODUCTION = """\
# Metrics

Made by `python -m engine.metrics > docs/metrics.md` from the table in
[`engine/metrics.py`](../engine/metrics.py); do not edit.

The names are those in Prometheus, with Ray's prefix. Ray Serve adds the labels `application`,
`deployment` and `replica` to each; those of an EngineReplica also have `gpu_uuid`, the `GpuUuid` of
Ray's own `ray_node_gpus_*`. What concerns a GPU is absent on a CPU. A histogram has `_bucket`,
`_count` and `_sum`; Ray rebuilds the sum from the middles of the buckets, so take means from
counters, and from histograms quantiles only: of steps and tapes they hold samples where there are
very many. A gauge that is not refreshed disappears after two of Ray's report intervals (20 s unless
`metrics_report_interval_ms` is set); stepahead refreshes its own every second, also when idle.

Replicas wanted and healthy are Ray Serve's own: `ray_serve_autoscaling_target_replicas`,
`ray_serve_autoscaling_desired_replicas`, `ray_serve_deployment_replica_healthy`.
"""


def page() -> str:
    """docs/metrics.md."""
    lines = [_INTRODUCTION]
    for owner, title in (("engine", "EngineReplica"), ("router", "Router")):
        lines += [
            f"## Of each {title}",
            "",
            "| metric | type | unit | labels | meaning |",
            "|---|---|---|---|---|",
        ]
        for m in METRICS.values():
            if m.owner == owner:
                labels = ", ".join(f"`{label}`" for label in m.labels)
                where = ". GPU only" if m.gpu_only else ""
                lines.append(f"| `{m.exported}` | {m.kind} | {m.unit} | {labels} | {m.help}{where} |")
        lines.append("")
    lines += ["## Buckets", "", "| histogram | upper bounds |", "|---|---|"]
    lines += [
        f"| `{m.exported}` | {', '.join(f'{b:g}' for b in m.buckets)} |"
        for m in METRICS.values()
        if m.buckets
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
