"""Debian's Prometheus for tests: `apt-get install prometheus` has the server and promtool."""

from __future__ import annotations

import shutil

import pytest

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool are absent: apt-get install prometheus (.ci/run does so, as root)",
)
