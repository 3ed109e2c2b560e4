"""Queries in PromQL, built from the metrics' own descriptions so that no name is written twice."""

from __future__ import annotations

from engine.metrics import Metric

# Of Ray itself, which has no table to import them from.
REPLICA_HEALTHY = "ray_serve_deployment_replica_healthy"
TARGET_REPLICAS = "ray_serve_autoscaling_target_replicas"
DESIRED_REPLICAS = "ray_serve_autoscaling_desired_replicas"
APPLICATION_STATUS = "ray_serve_application_status"
PROXY_STATUS = "ray_serve_proxy_status"
QUEUED_QUERIES = "ray_serve_deployment_queued_queries"
PROCESSING_QUERIES = "ray_serve_replica_processing_queries"
HTTP_LATENCY_MS = "ray_serve_http_request_latency_ms"
HTTP_REQUESTS = "ray_serve_num_http_requests_total"
NODE_GPU_UTILIZATION = "ray_node_gpus_utilization"
NODE_GPU_TEMPERATURE = "ray_node_gpu_temperature_celsius"
NODE_CPU_UTILIZATION = "ray_node_cpu_utilization"
NODE_MEMORY_USED = "ray_node_mem_used"

Series = Metric | str
"""A metric of ours, or the name of one of Ray's."""

APPLICATION = 'application=~"$application"'
DEPLOYMENT = APPLICATION + ',deployment=~"$deployment"'
REPLICA = DEPLOYMENT + ',replica=~"$replica"'
"""Selectors by the dashboards' variables."""
WINDOW = "$__rate_interval"
PER_REPLICA = ("application", "deployment", "replica")


def name_of(series: Series) -> str:
    return series if isinstance(series, str) else series.exported


def select(series: Series, *matchers: str, scope: str = REPLICA, part: str = "") -> str:
    """The series that the variables and `matchers` choose; `part` is `_bucket`, `_count` or `_sum`."""
    inside = ",".join([scope, *matchers]).strip(",")
    return f"{name_of(series)}{part}{{{inside}}}"


def total(series: Series, *by: str, scope: str = REPLICA, matchers: tuple[str, ...] = ()) -> str:
    """Sum of a gauge over all labels but `by`."""
    return f"sum{_by(by)} ({select(series, *matchers, scope=scope)})"


def rate(series: Series, *by: str, scope: str = REPLICA, matchers: tuple[str, ...] = ()) -> str:
    """A counter's growth in a second, summed over all labels but `by`."""
    return f"sum{_by(by)} (rate({select(series, *matchers, scope=scope)}[{WINDOW}]))"


def share(part: str, whole: str) -> str:
    """Of two rates with the same labels. A counter that never counted does not exist, which means none."""
    return f"({part} or 0 * {whole}) / {whole}"


def quantile(q: float, series: Series, *by: str, scope: str = REPLICA) -> str:
    """The q-quantile of a histogram. NaN while nothing is observed, which Grafana draws as a gap."""
    buckets = select(series, scope=scope, part="_bucket")
    return f"histogram_quantile({q:g}, sum{_by((*by, 'le'))} (rate({buckets}[{WINDOW}])))"


def share_within(bound: float, histogram: Metric, window: str = WINDOW, scope: str = REPLICA) -> str:
    """Share of the observations that are at most `bound`, one of the histogram's own, by application.

    Raises `ValueError` for another bound, which no bucket counts.
    """
    if bound not in histogram.buckets:
        raise ValueError(f"{bound} is no bucket of {histogram.name}: {histogram.buckets}")
    within = select(histogram, f'le="{float(bound)}"', scope=scope, part="_bucket")
    every = select(histogram, scope=scope, part="_count")
    return f"sum by (application) (rate({within}[{window}])) / sum by (application) (rate({every}[{window}]))"


def on_gpu_of(replica: Metric, node_gpu: str) -> str:
    """A reading by Ray of each node's GPUs, for each replica on the GPU in question.

    `replica` is a gauge that is always 1 and has a label `gpu_uuid`. Several replicas may share a GPU, so
    its reading is the side of the join that is single.
    """
    by_uuid = f'label_replace({node_gpu}, "gpu_uuid", "$1", "GpuUuid", "(.+)")'
    own = select(replica, 'gpu_uuid!=""')
    return (
        f"max{_by((*PER_REPLICA, 'gpu_uuid'))} ({own})"
        f" * on (gpu_uuid) group_left () max by (gpu_uuid) ({by_uuid})"
    )


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
