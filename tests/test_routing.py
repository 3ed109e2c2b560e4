"""The choice inside Ray Serve's own routing: its tasks, queues and retries, with replicas that only count."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest

from deployments import app
from deployments.balancer import Balancer, balancer_of
from deployments.prefix_index import BLOCK
from deployments.routing import TokenRouter, key_of
from deployments.submission import SchedulingParams, Submission
from deployments.tape import Address
from engine.request import SamplingParams

ROUTER = Address("router", "127.0.0.1", 1, b"secret")


class Replica:
    """What Serve's routing needs of a replica."""

    max_ongoing_requests = 100
    node_id = availability_zone = None

    def __init__(self, deployment: DeploymentID, name: str) -> None:
        self.replica_id = ReplicaID(name, deployment)
        self.ongoing = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.ongoing


class World:
    def __init__(self, router: TokenRouter, replicas: dict[str, Replica]) -> None:
        self.router = router
        self.replicas = replicas
        self.balancer: Balancer = balancer_of(router._deployment_id)

    async def send(self, argument: Any, id: str = "one HTTP request") -> str:
        """Where Serve's routing puts a call."""
        metadata = RequestMetadata(request_id=id, internal_request_id=id)
        pending = PendingRequest(args=[argument], kwargs={}, metadata=metadata)
        async with asyncio.timeout(20):
            replica: Any = await self.router._choose_replica_for_request(pending)
        name: str = replica.replica_id.unique_id
        self.router.on_request_routed(pending, replica.replica_id, None)  # type: ignore[arg-type]
        return name


@pytest_asyncio.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    deployment = DeploymentID(name=request.node.name, app_name="app")
    router = TokenRouter(  # type: ignore[no-untyped-call]
        deployment, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    router.initialize_state(session_affinity=True)
    replicas = {name: Replica(deployment, name) for name in "abc"}
    router.update_replicas(list(replicas.values()))  # type: ignore[arg-type]
    yield World(router, replicas)


def submission(number: int, text: int = 0, tokens: int = 10 * BLOCK, **more: Any) -> Submission:
    return Submission("demo", ROUTER, number, 0, [text] * tokens, SamplingParams(), **more)


async def test_choices_of_one_http_request_are_routed_apart_from_each_other_and_to_one_replica(
    world: World,
) -> None:
    names = await asyncio.gather(*(world.send(submission(number)) for number in range(8)))
    assert len(set(names)) == 1
    others = await asyncio.gather(*(world.send(submission(100 + n, text=1 + n)) for n in range(2)))
    assert set(names) | set(others) == set("abc")


async def test_resumed_tokens_belong_to_the_prefix_and_models_are_kept_apart(world: World) -> None:
    long = submission(1, tokens=40 * BLOCK)
    name = await world.send(long)
    world.balancer.finished(key_of(long))
    resumed = Submission(
        "demo", ROUTER, 2, 1, long.prompt[: 20 * BLOCK], long.sampling, generated=long.prompt[20 * BLOCK :]
    )
    assert resumed.prefix() == long.prefix()
    assert await world.send(resumed) == name
    salted = SchedulingParams(cache_salt=b"mine")
    assert not set(submission(3, scheduling=salted).prefix()) & set(long.prefix())
    assert not set(Submission("other", ROUTER, 3, 0, long.prompt, long.sampling).prefix()) & set(
        long.prefix()
    )


async def test_sessions_and_replicas_to_avoid_reach_the_balancer(world: World) -> None:
    names = set()
    for number in range(8):
        of_ann = submission(number, text=number, scheduling=SchedulingParams(session="ann"))
        names.add(await world.send(of_ann))
        world.balancer.finished(key_of(of_ann))
    assert len(names) == 1
    assert await world.send(submission(9, 1, avoid=tuple(names))) not in names


async def test_sessions_are_no_reason_unless_asked_for(world: World) -> None:
    world.router.initialize_state()
    world.router.update_replicas(list(world.replicas.values()))  # type: ignore[arg-type]
    names = set()
    for number in range(30):
        of_ann = submission(number, text=number, scheduling=SchedulingParams(session="ann"))
        names.add(await world.send(of_ann))
        world.balancer.finished(key_of(of_ann))
    assert names == set("abc")


async def test_other_calls_go_anywhere_and_are_no_load(world: World) -> None:
    names = Counter([await world.send("demo", str(number)) for number in range(60)])
    assert set(names) == set("abc")
    assert world.balancer.loads() == dict.fromkeys("abc", 0)


async def test_a_full_replica_is_passed_over(world: World) -> None:
    name = await world.send(submission(1))
    world.replicas[name].ongoing = 100
    world.router.on_new_queue_len_info(world.replicas[name].replica_id, 100)
    elsewhere = await world.send(submission(2))
    assert elsewhere != name
    assert world.balancer.loads()[elsewhere] > 0


async def test_where_all_are_full_it_waits_before_it_asks_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def backoff(attempt: int) -> None:
        attempts.append(attempt)
        if attempt == 2:
            world.replicas["b"].ongoing = 0

    attempts: list[int] = []
    monkeypatch.setattr(world.router, "_backoff", backoff)
    await world.send(submission(0))  # by now Serve has asked all of them
    for replica in world.replicas.values():
        replica.ongoing = 100
        world.router.on_new_queue_len_info(replica.replica_id, 100)
    assert await world.send(submission(1)) == "b"
    assert attempts == [0, 1, 2]


async def test_of_whom_a_call_may_go_to_each_is_asked_once(world: World) -> None:
    replicas: list[Any] = list(world.replicas.values())
    for number in range(20):
        pending = PendingRequest(
            args=[submission(number)], kwargs={}, metadata=RequestMetadata(str(number), str(number))
        )
        [best], others = await world.router.choose_replicas(replicas, pending)
        assert {best, *others} == set(replicas) and len(others) == 2


async def test_replicas_that_die_or_leave_take_nothing_more(world: World) -> None:
    seen: list[frozenset[str]] = []
    world.balancer.on_replicas(seen.append)
    name = await world.send(submission(1))
    world.router.on_replica_actor_died(world.replicas.pop(name).replica_id)
    second = await world.send(submission(2))
    assert second != name
    world.replicas.pop(second)
    world.router.update_replicas(list(world.replicas.values()))  # type: ignore[arg-type]
    assert await world.send(submission(3)) in world.replicas
    assert [len(each) for each in seen] == [2, 1]


def test_a_routers_process_has_one_balancer(tmp_path: Path) -> None:
    """What Serve unpickles there asks the same `Balancer` that the Router tells what it learns."""
    pickled = tmp_path / "router"
    config = RequestRouterConfig(request_router_class=app.ROUTER)
    pickled.write_bytes(config._serialized_request_router_cls)
    code = f"""
import pathlib
from ray import cloudpickle
from deployments.balancer import balancer_of
router = cloudpickle.loads(pathlib.Path({str(pickled)!r}).read_bytes())
assert router.initialize_state.__globals__["balancer_of"] is balancer_of
"""
    subprocess.run([sys.executable, "-c", code], check=True)
