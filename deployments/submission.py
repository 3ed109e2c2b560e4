"""What a Router sends to an EngineReplica, and the answer where no token comes of it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from deployments.tape import Address
from engine.request import SamplingParams


class Submission(msgspec.Struct, frozen=True):
    """One attempt at one sequence."""

    model: str
    """As the settings name it. A replica of another model refuses: in an upgrade, both run for a while."""
    tape: Address
    """Where its tokens go."""
    request: int
    """Unique among the requests of that Router."""
    attempt: int
    """Counts up from 0 with each replica that was tried."""
    prompt: list[int]
    sampling: SamplingParams
    """With the seed drawn, so that every attempt samples alike."""
    generated: list[int] = []
    """Tokens that earlier attempts have produced."""
    promised: bool = False
    """An earlier attempt was accepted: it is not refused for lack of room."""
    avoid: tuple[str, ...] = ()
    """Replicas that have refused it, to be chosen only where there is no other."""


Reason: TypeAlias = Literal["invalid", "full", "unavailable", "other model", "moved", "lost", "failed"]
"""`invalid`: the request, in `field`. `full`: no room to wait. `unavailable`: no engine to run it.
`other model`: the replica serves another one. `moved`: the Router has asked for it back. `lost`: the
replica, its engine or the tape is gone. `failed`: the engine broke on it. After all but the first and
the last, another replica may serve it."""


class Refusal(msgspec.Struct, frozen=True):
    """Why an attempt ended without a finish reason."""

    reason: Reason
    message: str
    field: str | None = None
    replica: str | None = None
    """Who refuses, if it is a replica."""
