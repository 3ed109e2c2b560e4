"""How many replicas are wanted, over time: the policy alone, with a clock that the test moves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingConfig

from deployments.app import _scale
from deployments.autoscaling import EXPECTED_OUTPUT, TokenPolicy, replica_stats
from deployments.load import Load
from deployments.settings import Settings

COLD, HOLD = 100.0, 200.0


@dataclass
class Controller:
    """What Ray Serve's controller does with a policy."""

    policy: TokenPolicy = field(
        default_factory=lambda: TokenPolicy(utilisation=0.5, ttft_s=1.0, cold_start_s=COLD, hold_s=HOLD)
    )
    now: float = 0.0
    replicas: int = 1
    state: dict[str, Any] = field(default_factory=dict)

    def ask(self, busy: float | None, queue: float = 0.0, queued: float = 0.0) -> int:
        """`busy` and `queue`, of all replicas together; None where none has reported."""
        metrics = {} if busy is None else {"busy": {"r": busy}, "queue_s": {"r": queue}}
        context: Any = SimpleNamespace(
            policy_state=self.state,
            current_time=self.now,
            aggregated_metrics=metrics,
            current_num_replicas=self.replicas,
            target_num_replicas=self.replicas,
            total_queued_requests=queued,
            config=SimpleNamespace(target_ongoing_requests=10.0),
        )
        wanted, self.state = self.policy(context)
        return wanted

    def steady(self, seconds: float, busy: float, queue: float = 0.0) -> list[int]:
        answers = []
        for _ in range(int(seconds / 5)):
            self.now += 5
            answers.append(self.ask(busy, queue))
        return answers


def test_steady_demand_is_served_at_the_utilisation_that_is_asked_for() -> None:
    for busy, replicas in ((0.0, 0), (0.3, 1), (0.5, 1), (0.6, 2), (1.5, 3), (4.0, 8)):
        assert set(Controller().steady(500, busy)) == {replicas}


def test_growth_is_expected_to_go_on_while_a_replica_starts() -> None:
    controller = Controller(replicas=4)
    controller.steady(COLD, 1.0)
    assert controller.ask(2.0) == 2 * (2 + 1)
    assert max(controller.steady(2 * COLD, 2.0)[-5:]) == 6  # held
    assert controller.steady(HOLD + COLD, 2.0)[-1] == 4


def test_a_queue_counts_by_what_it_grows_and_by_what_will_be_left_of_it() -> None:
    controller = Controller(replicas=2)
    controller.steady(COLD, 1.0)
    assert controller.ask(1.0, queue=1.9) == 2  # within what is allowed
    busy = Controller(replicas=2)
    busy.steady(COLD, 2.0)
    before = busy.ask(2.0)
    busy.now += 10
    assert busy.ask(2.0, queue=20.0) > before + 2  # two more would keep up with it
    lasting = Controller(replicas=2)
    assert lasting.steady(1000, 2.0, queue=150.0)[-1] == 6  # 148 s of work in 100 s: two more than the four
    draining = Controller(replicas=4)
    assert draining.steady(1000, 2.0, queue=150.0)[-1] == 4  # gone before another could help


def test_no_replica_goes_that_was_needed_a_while_ago() -> None:
    controller = Controller()
    controller.steady(COLD, 0.4)
    wanted = []
    for _ in range(10):  # bursts with lulls shorter than `hold_s`
        wanted += controller.steady(50, 1.4)
        wanted += controller.steady(HOLD / 2, 0.1)
    after_the_first = wanted[15:]
    assert min(after_the_first) >= 3
    assert sum(a != b for a, b in pairwise(after_the_first)) <= 2
    assert controller.steady(2 * HOLD, 0.1)[-1] == 1


def test_without_statistics_waiting_requests_decide_and_running_replicas_stay() -> None:
    assert Controller(replicas=0).ask(None, queued=0.0) == 0
    assert Controller(replicas=0).ask(None, queued=1.0) == 1
    assert Controller(replicas=0).ask(None, queued=25.0) == 3
    assert Controller(replicas=2).ask(None, queued=25.0) == 2


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1e6), st.integers(0, 20)), max_size=60))
def test_its_state_stays_small_and_its_answers_whole(reports: list[tuple[float, float, int]]) -> None:
    controller = Controller()
    for busy, queue, replicas in reports:
        controller.now += 10
        controller.replicas = replicas
        wanted = controller.ask(busy, queue)
        assert isinstance(wanted, int)
        assert wanted >= 0
        peaks = controller.state["peaks"]
        assert peaks == sorted(peaks, key=lambda peak: -peak[1])
        assert len(controller.state["history"]) <= 21


def stats(running: int, waiting: int = 0, prefill: int = 0, speed: float = 1000.0) -> dict[str, float]:
    return replica_stats(Load(prefill, running, waiting, 100, speed), rows=100, step_tokens=512)


def test_a_replica_reports_how_much_of_its_throughput_is_in_use() -> None:
    assert stats(0, speed=0.0) == {"busy": 0.0, "queue_s": 0.0}
    shares = [stats(n)["busy"] for n in range(101)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert shares[30] == pytest.approx(0.3 * 1.6 / 0.9)  # rows in use make the others dearer
    assert stats(1, waiting=1)["busy"] == 1.0
    assert stats(1, prefill=513)["busy"] == 1.0
    assert stats(100, waiting=5, prefill=1000)["queue_s"] == pytest.approx(
        (1000 + 5 * EXPECTED_OUTPUT) / 1000
    )
    # With half of the rows it would take less than the present speed says.
    assert stats(50, prefill=1000)["queue_s"] < 1.0


def test_the_application_scales_by_it_and_its_controller_needs_nothing_of_ours(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"model": "m", "replicas": 0, "max_replicas": 5, "autoscaling": {"cold_start_s": 33}}
    )
    config: AutoscalingConfig = _scale(settings, settings.engine_config(gpu=False))["autoscaling_config"]
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 1, 5)
    assert config.policy.policy_kwargs["cold_start_s"] == 33
    program = """
import pickle, sys, types
policy = pickle.loads(sys.stdin.buffer.read())(cold_start_s=33)
context = types.SimpleNamespace(policy_state={}, current_time=0.0, current_num_replicas=1)
context.aggregated_metrics = {"busy": {"r": 1.0}, "queue_s": {}}
print(policy(context)[0], "deployments" in sys.modules)
"""
    carried = subprocess.run(
        [sys.executable, "-I", "-c", program],
        input=config.policy.get_serialized_policy_def(),
        capture_output=True,
        check=True,
        cwd=tmp_path,
    )
    assert carried.stdout.split() == [b"2", b"False"]
