"""Writes the manifests of one deployment: the overlay as it is in the repository, with its own patches."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from cluster import memory
from cluster.serve import for_cluster
from cluster.settings import Cluster
from cluster.shape import ModelShape
from dashboards.alerts import group
from dashboards.export import write_dashboards

HERE = Path(__file__).parent
BASES: dict[str, list[str]] = {"cpu-demo": [], "gpu": [], "gpu-ha": ["gpu"]}
"""Overlays that an overlay stands on."""

ROUTERS_PER_POD = 4
"""A Router asks Ray for half a core, and its pods have two."""
DEMO_GIB = 1
OURS = "# Written by `python -m cluster render`, which replaces base/, overlays/ and dashboards/ beside it.\n"
"""Begins the kustomization.yaml of a folder that may be written anew: others keep a base/ of their own."""
_GROUP = "/spec/rayClusterConfig/workerGroupSpecs"

Patch = list[dict[str, Any]]


def render(cluster: Cluster, shape: ModelShape, out: Path, dashboards: list[Path] | None = None) -> None:
    """Write manifests to `out`, for `kubectl apply -k`. An existing `out` must be empty or one of ours.

    Grafana's dashboards are among them, as ConfigMaps: our own, and the files `dashboards` (JSON).

    Raises `ValueError` if the model does not fit on the GPU, before anything is written.
    """
    patches = {"application.yaml": application(cluster, shape), "storage.yaml": storage(shape)}
    top = out / "kustomization.yaml"
    if out.exists() and any(out.iterdir()) and not (top.exists() and top.read_text().startswith(OURS)):
        raise ValueError(f"out: {out} has other files in it")
    for folder in ("base", "overlays", "dashboards"):
        shutil.rmtree(out / folder, ignore_errors=True)
    shutil.copytree(HERE / "base", out / "base")
    for overlay in [cluster.overlay, *BASES[cluster.overlay]]:
        shutil.copytree(HERE / "overlays" / overlay, out / "overlays" / overlay)
    for name, patch in patches.items():
        (out / "overlays" / cluster.overlay / name).write_text(dump(patch))
    top.write_text(OURS + dump(_top(cluster, dashboards or [], out)))


def application(cluster: Cluster, shape: ModelShape) -> Patch:
    """The patch of the RayService (JSON patch) that holds all that follows from the settings."""
    engine = cluster.args.engine_config(gpu=cluster.on_gpus)
    low, high = cluster.replicas
    if cluster.on_gpus:
        memory.check(shape, engine, cluster.gpu)
        weights = shape.parameters * shape.stored_bytes
        cpus, gib = 4, 8 + math.ceil(weights / memory.GIB)  # files being read count as the pod's memory
    else:
        cpus, gib = 2, math.ceil(4 * shape.parameters / memory.GIB + engine.cpu_cache_gib) + 3
    pod = f"{_GROUP}/0/template/spec"
    resources = f"{pod}/containers/0/resources"
    values = {
        "/spec/serveConfigV2": for_cluster(cluster.args).text(),
        f"{_GROUP}/0/replicas": low,
        f"{_GROUP}/0/minReplicas": low,
        f"{_GROUP}/0/maxReplicas": high,
        # Room for the engine, and for the Routers should they come before the pods that are theirs: an
        # engine that finds no core would wait for ever.
        f"{_GROUP}/0/rayStartParams/num-cpus": str(1 + math.ceil(cluster.routers / 2)),
        f"{pod}/initContainers/0/env/0/value": cluster.model,
        f"{resources}/requests/cpu": str(cpus),
        f"{resources}/limits/cpu": str(2 * cpus),
        f"{resources}/requests/memory": f"{gib}Gi",
        f"{resources}/limits/memory": f"{gib}Gi",
    }
    if cluster.on_gpus:
        pods = max(math.ceil(cluster.routers / ROUTERS_PER_POD), 2 if cluster.overlay == "gpu-ha" else 1)
        values |= {
            f"{_GROUP}/1/replicas": pods,
            f"{_GROUP}/1/minReplicas": pods,
            f"{_GROUP}/1/maxReplicas": pods,
            f"{_GROUP}/1/template/spec/initContainers/0/env/0/value": cluster.model,
        }
    return [{"op": "replace", "path": path, "value": value} for path, value in values.items()]


def storage(shape: ModelShape) -> Patch:
    """The patch of the volume: two versions of the weights, and the demo model's files."""
    size = 2 * shape.parameters * shape.stored_bytes / memory.GIB + DEMO_GIB
    return [{"op": "replace", "path": "/spec/resources/requests/storage", "value": f"{math.ceil(size)}Gi"}]


def alerts() -> dict[str, Any]:
    """The alerts for the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "stepahead"},
        "spec": group(),
    }


def _top(cluster: Cluster, dashboards: list[Path], out: Path) -> dict[str, Any]:
    boards = write_dashboards(out / "dashboards")
    for path in dashboards:
        key = re.sub(r"[^\w.-]", "-", path.name, flags=re.ASCII)  # as a ConfigMap allows
        boards.append(Path(shutil.copy(path, out / "dashboards" / key)))
    top: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"overlays/{cluster.overlay}"],
        "configMapGenerator": [
            {
                "name": f"dashboard-{re.sub(r'[^a-z0-9]+', '-', path.stem.lower()).strip('-')}",
                "namespace": "stepahead",
                "files": [f"dashboards/{path.name}"],
            }
            for path in boards
        ],
        # By this label Grafana's sidecar knows them.
        "generatorOptions": {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}},
    }
    if cluster.image != "stepahead":
        top["images"] = [{"name": "stepahead", "newName": cluster.image}]
    return top


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml is untyped
    """Writes a text of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dump(data: Any) -> str:
    """As YAML, in order."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=110)
    return text
