"""Puts the choice of `deployments/balancer.py` into Ray Serve: the `RequestRouter` of EngineReplicas.

Ray Serve makes one of these in each process that holds a handle to the EngineReplicas, a Router's
among them; both find the same `Balancer` by the deployment's name. Ray Serve pickles this module by
value, so what has to be the same for both may not be in it: there would be two.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from deployments.balancer import balancer_of
from deployments.submission import Submission


def key_of(submission: Submission) -> Hashable:
    """What a `Balancer` of this process calls a submission."""
    return submission.tape.router, submission.request, submission.attempt


class TokenRouter(FIFOMixin, RequestRouter):
    """Sends each submission where the `Balancer` wants it, any other call to the shorter of two queues.

    FIFO, as calls that belong to one HTTP request share the id by which Serve would match them.
    """

    def initialize_state(self, *, session_affinity: bool = False, **kwargs: Any) -> None:
        """Called by Ray Serve, with the `request_router_kwargs` of the deployment."""
        self._session_affinity = session_affinity
        self._balancer = balancer_of(self._deployment_id)
        self._by_name: dict[str, RunningReplica] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best replica, then two others in case that it is full."""
        if pending_request is not None:  # where all are full, Serve asks again after a while
            pending_request.routing_context.should_backoff = True
        submission = _submission(pending_request)
        if submission is None:
            return [_two(candidate_replicas)]
        try:
            name = self._balancer.place(
                key_of(submission),
                len(submission.prompt) + len(submission.generated),
                submission.prefix(),
                session=submission.scheduling.session if self._session_affinity else "",
                avoid=submission.avoid,
            )
            best = self._by_name[name]
        except LookupError:  # the last one has just died
            return []
        return [[best], _two([each for each in candidate_replicas if each is not best])]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        submission = _submission(pending_request)
        if submission is not None:
            self._balancer.accepted(key_of(submission), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._follow()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._follow()

    def _follow(self) -> None:
        self._by_name = {id.unique_id: replica for id, replica in self.curr_replicas.items()}
        self._balancer.set_replicas(self._by_name)


def _two(replicas: list[RunningReplica]) -> list[RunningReplica]:
    return random.sample(replicas, min(2, len(replicas)))


def _submission(request: PendingRequest | None) -> Submission | None:
    if request is not None and request.args and isinstance(request.args[0], Submission):
        return request.args[0]
    return None
