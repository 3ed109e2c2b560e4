"""Metrics in memory, held to what Ray Serve would refuse."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeAlias

from engine.metrics import Metric

Labels: TypeAlias = tuple[str, ...]
"""Values, in the order of the metric's labels."""


class MemoryRecorder:
    def __init__(self) -> None:
        self.counters: dict[Metric, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self.gauges: dict[Metric, dict[Labels, float]] = defaultdict(dict)
        self.histograms: dict[Metric, list[float]] = defaultdict(list)

    @property
    def metrics(self) -> set[Metric]:
        return {*self.counters, *self.gauges, *self.histograms}

    def add(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        assert metric.kind == "counter"
        assert amount >= 0, f"{metric.name} falls by {-amount}"
        self.counters[metric][self._labels(metric, labels)] += amount

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        assert metric.kind == "gauge"
        self.gauges[metric][self._labels(metric, labels)] = value

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        assert metric.kind == "histogram"
        self._labels(metric, labels)
        self.histograms[metric].append(value)

    @staticmethod
    def _labels(metric: Metric, labels: dict[str, str]) -> Labels:
        assert set(labels) == set(metric.labels), metric.name
        assert all(isinstance(value, str) for value in labels.values()), metric.name
        return tuple(labels[name] for name in metric.labels)
