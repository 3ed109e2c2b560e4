"""Which replicas get requests, and by which policy, as a file says: so one start serves for measuring all.

What Routers import to choose replicas; it stays as small as what it stands in for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
from ray.serve.request_router import PendingRequest, RunningReplica

from deployments.routing import TokenRouter
from deployments.submission import Submission

CONTROL = "STEPAHEAD_FLEET_CONTROL"
"""Environment variable: the file of the `Steering`."""


@dataclass(frozen=True)
class Steering:
    """What the choice of replicas is to do from now on."""

    replicas: int = 1 << 16
    """Only so many of them get requests, the first by their names."""
    tokens: bool = True
    """As the application chooses; False: as Ray Serve does by default, the shorter of two queues."""

    def apply(self) -> None:
        path = Path(os.environ[CONTROL])
        new = path.with_suffix(".new")
        new.write_text(json.dumps(dataclasses.asdict(self)))
        new.replace(path)

    @classmethod
    def read(cls) -> Steering:
        return cls(**json.loads(Path(os.environ[CONTROL]).read_bytes()))


class SteeredRouter(TokenRouter):
    """`TokenRouter` that does what the `Steering` says."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        steering = Steering.read()
        if pending_request is None or not pending_request.args:
            return await super().choose_replicas(candidate_replicas, pending_request)
        submission = pending_request.args[0]
        if not isinstance(submission, Submission):
            return await super().choose_replicas(candidate_replicas, pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names = sorted(by_name)
        open_ = [by_name[name] for name in names[: steering.replicas] if name not in submission.avoid]
        open_ = open_ or candidate_replicas
        if not steering.tokens:
            return [random.sample(open_, min(2, len(open_)))]
        closed = (*submission.avoid, *names[steering.replicas :])
        steered = msgspec.structs.replace(submission, avoid=closed)
        steered_request = dataclasses.replace(pending_request, args=[steered, *pending_request.args[1:]])
        ranks = await super().choose_replicas(candidate_replicas, steered_request)
        return [found for rank in ranks if (found := [each for each in rank if each in open_])]
