"""What a Router sends to an EngineReplica, and the answer where no token comes of it."""

from __future__ import annotations

from typing import Any, Literal, Self, TypeAlias

import msgspec

from deployments.prefix_index import chain_of
from deployments.tape import Address
from deployments.tracing import Carrier
from engine.request import SamplingParams


class SchedulingParams(msgspec.Struct, frozen=True):
    """When a sequence is computed and until when; all but `session` is as in `engine.request.Request`."""

    priority: int = 0
    client: str = ""
    cache_salt: bytes = b""
    timeout: float | None = None
    queue_timeout: float | None = None
    session: str = ""
    """Whose next request finds most of its prompt where this one went, if it has a name; for Routers."""

    def for_engine(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name != "session"}

    def after(self, seconds: float, began: bool) -> Self:
        """What is left of its times. One that `began` has left the queue behind."""
        return msgspec.structs.replace(
            self,
            timeout=None if self.timeout is None else self.timeout - seconds,
            queue_timeout=None if began or self.queue_timeout is None else self.queue_timeout - seconds,
        )

    @property
    def over(self) -> bool:
        return any(left is not None and left <= 0 for left in (self.timeout, self.queue_timeout))


ANY_TIME = SchedulingParams()


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
    scheduling: SchedulingParams = ANY_TIME
    """Its times count from now: clocks of two machines differ."""
    generated: list[int] = []
    """Tokens that earlier attempts have produced."""
    promised: bool = False
    """An earlier attempt was accepted: it is not refused for lack of room."""
    avoid: tuple[str, ...] = ()
    """Replicas that have refused it, to be chosen only where there is no other."""
    lost: int = 0
    """Replicas that it has lost in a row without a token from any."""
    trace: Carrier = {}
    """What its spans on the replica are children of."""

    def prefix(self) -> list[int]:
        """The hashes of what is to be computed before it decodes, for a `PrefixIndex`."""
        identity = self.model.encode() + b"\0" + self.scheduling.cache_salt
        return chain_of(self.prompt + self.generated, identity)


Reason: TypeAlias = Literal[
    "invalid", "full", "unavailable", "other model", "moved", "lost", "failed", "timeout"
]
"""`invalid`: the request, in `field`. `full`: no room to wait. `unavailable`: no engine to run it.
`other model`: the replica serves another one. `moved`: the Router has asked for it back. `lost`: the
replica, its engine or the tape is gone. `failed`: the engine broke on it. `timeout`: its time was over
before it had a token. After all but `invalid`, `failed` and `timeout`, another replica may serve it."""


class Refusal(msgspec.Struct, frozen=True):
    """Why an attempt ended without a finish reason."""

    reason: Reason
    message: str
    field: str | None = None
    replica: str | None = None
    """Who refuses, if it is a replica."""
    retry_after: float | None = None
    """Seconds after which there should be room, where that is known."""
