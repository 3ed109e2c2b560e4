"""The simulated cluster that replica choices are compared on: nothing is lost, and what it shows is there."""

from __future__ import annotations

import pytest

from benchmarks.routing_engines import Engine, Job, Shape, Spans
from benchmarks.routing_policies import POLICIES
from benchmarks.routing_sim import decision_cost, page, simulate
from deployments.prefix_index import BLOCK, chain_of


def test_prompts_that_do_not_exist_slice_like_lists() -> None:
    spans = Spans([(7, 2 * BLOCK), (9, 100)])
    tokens = [t for start in range(0, len(spans), BLOCK) for t in spans[start : start + BLOCK]]
    assert len(tokens) == len(spans) == 2 * BLOCK + 100
    assert chain_of(spans) == chain_of(tokens)
    assert chain_of(spans)[:2] == chain_of(Spans([(7, 2 * BLOCK), (8, 100)]))[:2]


def run(engine: Engine) -> list[Job]:
    now, ended = 0.0, []
    while engine.begin(now):
        now = engine.running_until or now
        ended += engine.end(now)
    return ended


def test_an_engine_takes_the_time_that_its_steps_take_and_finds_prefixes() -> None:
    shape = Shape(rows=2)
    engine = Engine("r", shape)
    jobs = [Job(0.0, Spans([(1, 640), (2 + n, 360)]), 10, "chat") for n in range(3)]
    engine.waiting.extend(jobs)
    assert sorted(map(id, run(engine))) == sorted(map(id, jobs))
    assert [job.cached for job in jobs] == [0, 640, 640]
    first = shape.step + shape.token * (1000 + 360)
    assert jobs[0].ttft == jobs[1].ttft == pytest.approx(first)
    assert jobs[2].ttft > first + 9 * shape.step  # no row before one of the two has ended
    assert (engine.owned, engine.ongoing) == (0, 0)
    again = Job(0.0, jobs[0].prompt, 1, "chat")
    engine.waiting.append(again)
    assert run(engine) == [again]
    assert again.cached == 999  # one token is computed all the same


def test_an_engine_keeps_no_more_than_fits() -> None:
    engine = Engine("r", Shape(cache=2500))
    for text in range(4):
        engine.waiting.append(Job(0.0, Spans([(text, 1000)]), 1, "burst"))
    assert len(run(engine)) == 4
    assert engine.cached_tokens <= 2500
    assert set(engine.cache) == {2, 3}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_by_every_policy(policy: str) -> None:
    line = simulate(policy, replicas=3, routers=2, rate=1.0, seconds=15)
    assert line["requests"] > 50
    assert 0 < line["ttft_p50"] < line["ttft_p99"]
    assert 0 < line["hit_rate"] < 1
    assert policy in page([line, decision_cost(3, tries=100)])


def test_ours_finds_more_and_answers_sooner_than_turns() -> None:
    ours, turns = (simulate(name, 6, 2, 1.0, 30) for name in ("ours", "round robin"))
    assert ours["hit_rate"] > turns["hit_rate"] + 0.1
    assert ours["ttft_p99"] < turns["ttft_p99"]
