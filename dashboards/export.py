"""Dashboards and alerts as files: for Grafana's and Prometheus' own provisioning, and for Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from dashboards.alerts import group
from dashboards.fleet import fleet
from dashboards.replica import replica
from dashboards.requests import requests

DASHBOARDS = {"fleet": fleet, "replica": replica, "requests": requests}
"""What makes each of them; its uid is `stepahead-` and this name."""


def write_dashboards(folder: Path) -> list[Path]:
    """One JSON file each; what Grafana's default data source of type prometheus has is shown."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in DASHBOARDS.items():
        path = folder / f"stepahead-{name}.json"
        path.write_text(json.dumps(make(), indent=1) + "\n")
        written.append(path)
    return written


def write_alerts(folder: Path) -> Path:
    """A rule file for Prometheus."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "alerts.yml"
    path.write_text(yaml.safe_dump(group(), sort_keys=False, width=110))
    return path
