"""Every query of every dashboard, with its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dashboards.export import DASHBOARDS


@dataclass(frozen=True)
class Query:
    dashboard: str
    panel: int
    title: str
    legend: str
    expression: str

    def filled(self, window: str, **variables: str) -> str:
        """The expression as Grafana sends it. A variable that is not given is `.*`, as for All."""
        text = self.expression.replace("$__rate_interval", window)
        return re.sub(r"\$([a-z]+)", lambda found: variables.get(found[1], ".*"), text)

    def __str__(self) -> str:
        return f"{self.dashboard} {self.panel}: {self.title}: {self.legend}"


def queries() -> Iterator[Query]:
    for name, make in DASHBOARDS.items():
        for panel in make()["panels"]:
            for target in panel.get("targets", []):
                yield Query(name, panel["id"], panel["title"], target["legendFormat"], target["expr"])
