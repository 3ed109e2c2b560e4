"""What a Router sends to an EngineReplica, and the answer where no token comes of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from deployments.tape import Address
from engine.request import SamplingParams


class Submission(msgspec.Struct, frozen=True):
    """One attempt at one sequence."""

    tape: Address
    """Where its tokens go."""
    request: int
    """Unique among the requests of that Router."""
    attempt: int
    """Counts up from 0 with each replica that was lost."""
    prompt: list[int]
    sampling: SamplingParams
    """With the seed drawn, so that every attempt samples alike."""
    generated: list[int] = []
    """Tokens that earlier attempts have produced."""


class Refusal(msgspec.Struct, frozen=True):
    """Why an attempt ended without a finish reason."""

    reason: Literal["invalid", "full", "unavailable", "failed", "lost"]
    """`invalid`: the request, in `field`. `full`: no room to wait. `unavailable`: no engine to
    run it. `failed`: the engine broke on it. `lost`: the replica or the tape is gone; another
    attempt may succeed."""
    message: str
    field: str | None = None
