"""How much a replica has to do: it goes with every frame of a tape, so Routers choose by what is true now."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from engine.stats import EngineStats

SMOOTHING = 2.0
"""Seconds of work after which a change of speed is known to about two thirds."""

_SHORTEST = 0.05  # seconds; a speed over less is noise
_FRESH = 4e-3  # seconds for which a reading holds: the frames of one step, to all Routers, share one


class Load(msgspec.Struct, frozen=True, array_like=True):
    """One replica at one moment."""

    prefill_tokens: int
    """Of running and waiting requests, left to compute before each of them decodes."""
    running: int
    """Requests that have a row: computed in every step."""
    waiting: int
    """Requests that have none yet."""
    free_blocks: int
    """Blocks of the cache for new requests, those included that are only kept for their prefix."""
    tokens_per_s: float
    """Prompt and output tokens computed per second while there was work; 0 as long as that is not known."""


class LoadMeter:
    """Reads the load of an engine, and how fast it works."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats
        self._time = 0.0
        self._tokens = 0
        self._busy = False
        self._speed = 0.0
        self._read = -math.inf
        self._load = Load(0, 0, 0, 0, 0.0)

    def read(self, anew: bool = False) -> Load:
        """As it was up to 4 ms ago, or `anew`: for whoever may hear of nothing more for long."""
        now = time.monotonic()
        if anew or now - self._read >= _FRESH:
            stats = self._stats()
            tokens = stats.prompt_tokens + stats.output_tokens
            self._measure(tokens, bool(stats.running or stats.waiting), now)
            self._load = Load(
                stats.prefill_tokens,
                stats.running,
                stats.waiting,
                stats.blocks_free + stats.blocks_cached,
                self._speed,
            )
            self._read = now
        return self._load

    def _measure(self, tokens: int, busy: bool, now: float) -> None:
        seconds = now - self._time
        if self._busy and seconds < _SHORTEST:
            if busy:
                return
        elif self._busy:
            speed = (tokens - self._tokens) / seconds
            weight = 1 - math.exp(-seconds / SMOOTHING) if self._speed else 1
            self._speed += weight * (speed - self._speed)
        self._time, self._tokens, self._busy = now, tokens, busy
