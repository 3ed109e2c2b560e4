"""What is promised to clients, for dashboards and alerts alike. Change it here."""

from __future__ import annotations

TTFT_SECONDS = 1.0
"""A choice's first token comes within this time; one of the bounds of the metric's buckets."""
OBJECTIVE = 0.99
"""For this share of the choices."""
