"""The simulated autoscaling loop: nothing is lost in it, and the deployed policy or Ray Serve's decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.autoscaling_sim import (
    Cluster,
    Engine,
    Load,
    Nodes,
    _level,
    default,
    deployed,
    simulate,
    wanted,
)

HOUR = Load(seconds=3600, bursts=1, night=1.0)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=9), st.integers(0, 2000))
def test_requests_go_where_the_least_work_is(loads: list[int], n: int) -> None:
    after = list(loads)
    for index, share in _level(loads, n):
        assert share >= 0
        after[index] += share
    assert sum(after) == sum(loads) + n
    took = [new for new, old in zip(after, loads, strict=True) if new > old]
    assert not took or max(took) - min(after) <= 1


def test_every_request_is_counted_once() -> None:
    config, policy = deployed(8)
    for fixed, peak in ((0, 300.0), (1, 300.0), (8, 100.0)):
        out = simulate(config, Engine(), replace(HOUR, peak=peak), Nodes(), 0, fixed, policy)
        assert out.waits.sum() + out.refused + out.queued == out.arrived > 0
        if fixed == 1:
            assert out.refused  # four times what it can do
        if fixed == 8:
            assert out.late == 0
            assert np.isclose(out.gpu_hours, 8)


def test_engines_follow_the_load_within_the_bounds() -> None:
    config, policy = deployed(3)
    state: dict[str, Any] = {}
    busy = {"busy": {0: 1.0}, "queue_s": {0: 0.0}}
    assert wanted(config, 300, 1, 1, state, 0.0, policy, busy) == 2
    overloaded = {"busy": {0: 2.0}, "queue_s": {0: 500.0}}
    assert wanted(config, 5000, 2, 2, state, 60.0, policy, overloaded) == 3
    idle = {"busy": {0: 0.0}, "queue_s": {0: 0.0}}
    kept = [wanted(config, 0, 3, 3, state, 60.0 + t, policy, idle) for t in range(0, 601, 10)]
    assert kept == [3] * 60 + [1]


def test_rays_policy_comes_with_its_delays_and_bounds() -> None:
    target = 0.3 * Engine().rows
    config = default(4, target)
    state: dict[str, Any] = {}
    asked = [wanted(config, 2.5 * target, 1, 1, state, float(now)) for now in range(60)]
    assert asked[: int(config.upscale_delay_s)] == [1] * int(config.upscale_delay_s)
    assert asked[int(config.upscale_delay_s)] == 3
    assert wanted(config, 100 * target, 1, 1, {"x": 0}, 0.0) == 1
    state = {}
    assert {wanted(config, 0.0, 4, 4, state, float(now)) for now in range(600)} == {4}
    assert wanted(config, 0.0, 4, 4, state, 600.0) == 1


def test_a_node_that_is_still_there_is_taken_again() -> None:
    nodes = Nodes(spread=0.0)
    cluster = Cluster(nodes, np.random.default_rng(0), 1)
    cluster.scale(2, 0.0)
    cluster.pass_time(nodes.notice + nodes.start + nodes.load - 1)
    assert len(cluster.ready) == 1
    cluster.pass_time(nodes.notice + nodes.start + nodes.load)
    assert len(cluster.ready) == 2
    cluster.scale(1, 1000.0)
    cluster.pass_time(1001.0)
    assert (len(cluster.ready), len(cluster.idle), cluster.gpus) == (1, 1, 2)
    cluster.scale(2, 1010.0)
    cluster.pass_time(1010.0 + nodes.load)
    assert len(cluster.ready) == 2
    cluster.scale(1, 2000.0)
    cluster.pass_time(2001.0)
    cluster.pass_time(2001.0 + nodes.idle)
    assert cluster.gpus == 1
