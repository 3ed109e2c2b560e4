"""What an engine tells of itself."""

from __future__ import annotations

import random
from typing import NamedTuple, TypeVar

import msgspec

from engine.timeline import StepTimes, Totals

T = TypeVar("T")


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. Blocks leave out the scratch block; totals count from the start."""

    running: int
    waiting: int
    """Those included that have just been submitted."""
    prefill_tokens: int
    """Of running and waiting requests, known and not computed yet."""
    rows_free: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    wasted_tokens: int
    preemptions: int
    admitted: int
    finished: dict[str, int]
    aborted: dict[str, int] = {}
    """Those that finished with `abort`, by cause."""


class Reading(NamedTuple):
    """All that is exported, as it was at one moment."""

    stats: EngineStats
    totals: Totals
    queue_times: list[float]
    """Seconds that requests waited for their first row; of each wait once, if at all."""
    steps: list[StepTimes]
    last: int
    """The last step there was: the one to ask after next time."""


def sample(items: list[T], most: int) -> list[T]:
    """At most so many of them, by lot."""
    return items if len(items) <= most else random.sample(items, most)
