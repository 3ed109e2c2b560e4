"""Records the metrics of `engine/metrics.py` through `ray.serve.metrics`."""

from __future__ import annotations

from typing import Any, Protocol

from ray.serve import metrics

from engine.metrics import Metric


class Recorder(Protocol):
    """Where the metrics of one process go. Labels are given by name, all that the metric has."""

    def add(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Raise a counter; nothing happens for an amount of 0."""

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """A gauge must be set again about every second, or it disappears."""

    def observe(self, metric: Metric, value: float, **labels: str) -> None: ...


class ServeRecorder:
    """A metric exists from when it is first recorded: what is absent is not there at all.

    `labels` go with each metric; those of Serve are added by Serve. Recording takes about 2 µs.
    """

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self._counters: dict[Metric, metrics.Counter] = {}
        self._gauges: dict[Metric, metrics.Gauge] = {}
        self._histograms: dict[Metric, metrics.Histogram] = {}

    def add(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        if amount:
            if metric not in self._counters:
                self._counters[metric] = metrics.Counter(metric.name, metric.help, self._keys(metric))
            self._counters[metric].inc(amount, self._labels | labels)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        if metric not in self._gauges:
            self._gauges[metric] = metrics.Gauge(metric.name, metric.help, self._keys(metric))
        self._gauges[metric].set(value, self._labels | labels)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        if metric not in self._histograms:
            self._histograms[metric] = metrics.Histogram(
                metric.name, metric.help, list(metric.buckets), self._keys(metric)
            )
        self._histograms[metric].observe(value, self._labels | labels)

    def _keys(self, metric: Metric) -> Any:  # Serve's annotation says a tuple of one
        return (*self._labels, *metric.labels)
