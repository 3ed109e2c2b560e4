"""One cell of a table: the values of several runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any


def cell(values: Iterable[Any], form: str) -> str:
    """Their median, with the spread if there are several; nothing where none is known."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    text = format(statistics.median(known), form)
    if len(known) > 1:
        text += f" ({format(min(known), form)} to {format(max(known), form)})"
    return text
