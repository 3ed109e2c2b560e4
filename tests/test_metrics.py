"""Every metric is well named, and the page that lists them is the one that the table gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.metrics import METRICS, SERVE_LABELS, Metric, page

BASE_UNITS = {"bytes": "_bytes", "joules": "_joules", "seconds": "_seconds", "watts": "_watts"}


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_names_follow_the_rules_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"stepahead(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    if metric.unit in BASE_UNITS:
        assert BASE_UNITS[metric.unit] in metric.name
    assert not re.search(r"_(ms|us|mib|gib|kb|percent|count|sum|bucket)(_|$)", metric.name)
    assert re.fullmatch(r"[A-Z][^|\n]*[^.|\n]", metric.help), "one sentence without its period"
    assert len(set(metric.all_labels)) == len(metric.all_labels)
    assert set(SERVE_LABELS) <= set(metric.all_labels)
    assert all(
        re.fullmatch(r"[a-z]+(_[a-z]+)*", label) and label not in {"le", "quantile"}
        for label in metric.labels
    )


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_histograms_and_only_they_have_buckets(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert all(bound > 0 for bound in metric.buckets), "Ray refuses others"


def test_the_page_is_current() -> None:
    shown = (Path(__file__).parent.parent / "docs/metrics.md").read_text()
    assert shown == page(), "python -m engine.metrics > docs/metrics.md"
