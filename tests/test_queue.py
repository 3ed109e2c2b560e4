"""Who is next, by priority, share and arrival; and whose time is over."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.queue import Deadlines, WaitingQueue
from engine.request import Request, State
from tests.scheduler_bench import Bench, make


def request(client: str = "", priority: int = 0, **kwargs: object) -> Request:
    return Request("r", [1], client=client, priority=priority, **kwargs)  # type: ignore[arg-type]


def drained(queue: WaitingQueue, cost: int = 0) -> list[Request]:
    """All that wait, in order; each costs its client `cost` tokens."""
    order = []
    while (first := queue.first) is not None:
        queue.take(first)
        first.account.served += cost
        order.append(first)
    return order


def test_one_client_is_served_in_order_of_arrival() -> None:
    queue = WaitingQueue()
    sent = [request() for _ in range(5)]
    for i in (3, 0, 4, 1, 2):
        queue.add(sent[i])
    assert drained(queue, cost=7) == sent
    assert not queue and len(queue) == 0


def test_the_lower_priority_number_goes_first() -> None:
    queue = WaitingQueue()
    sent = [request(priority=p) for p in (3, -2, 0, 3, 0)]
    for each in sent:
        queue.add(each)
    assert [each.priority for each in drained(queue)] == [-2, 0, 0, 3, 3]


def test_clients_take_turns_whatever_they_send() -> None:
    queue = WaitingQueue()
    flood = [request("flood") for _ in range(1000)]
    for each in flood:
        queue.add(each)
    single = request("single")
    queue.add(single)
    assert drained(queue, cost=10).index(single) == 1


def test_whoever_has_idled_has_not_saved_up_turns() -> None:
    queue = WaitingQueue()
    for _ in range(100):
        queue.add(request("busy"))
    queue.add(request("idle"))
    for _ in range(50):
        first = queue.first
        assert first is not None
        queue.take(first)
        first.account.served += 10
    for _ in range(50):
        queue.add(request("idle"))
    order = [each.client for each in drained(queue, cost=10)]
    assert abs(order[:20].count("idle") - 10) <= 1


def test_a_request_that_has_run_goes_before_those_that_have_not() -> None:
    queue = WaitingQueue()
    waiting, preempted = request("a"), request("b", admissions=1)
    preempted.account.served = 10**6
    queue.add(waiting)
    queue.add(preempted)
    assert drained(queue) == [preempted, waiting]


def test_a_request_that_does_not_wait_cannot_leave() -> None:
    queue = WaitingQueue()
    queue.add(request())
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(request())
    with pytest.raises(KeyError):
        queue.remove(request(priority=1))


def test_clients_that_came_once_are_forgotten() -> None:
    queue = WaitingQueue()
    queue.add(request("stays"))
    for i in range(10_000):
        passing = request(f"user {i}", priority=0)
        queue.add(passing)
        queue.take(passing)
        passing.account.served += 1
        if i % 3 == 0:  # the one that stays is served, and so are later ones
            first = queue.first
            assert first is not None
            first.account.served += 3
            queue.take(first)
            queue.add(request("stays"))
    assert len(queue._classes[0].accounts) < 1000
    assert len(queue._classes[0].turns) < 1000


def test_no_client_that_waits_is_forgotten() -> None:
    queue = WaitingQueue()
    sent = [request(str(i % 100)) for i in range(200)]
    for each in sent:
        queue.add(each)
    assert sent[0].account is sent[100].account
    assert set(map(id, queue)) == set(map(id, sent))


def model_next(waiting: list[Request]) -> set[int]:
    """Straight from the definition: who may be first, by identity."""
    best = min(each.priority for each in waiting)
    those = [each for each in waiting if each.priority == best]
    returning = [each for each in those if each.admissions]
    if returning:
        return {id(min(returning, key=lambda r: r.arrival))}
    least = min(each.account.served for each in those)
    return {
        id(min(group, key=lambda r: r.arrival))
        for _, members in itertools.groupby(sorted(those, key=lambda r: r.client), key=lambda r: r.client)
        if (group := list(members))[0].account.served == least
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_is_always_the_one_that_the_definition_says(data: st.DataObject) -> None:
    queue, waiting, taken = WaitingQueue(), list[Request](), list[Request]()
    for _ in range(data.draw(st.integers(0, 60))):
        action = data.draw(st.sampled_from(["add", "add", "take", "charge", "abort", "preempt"]))
        if action == "add":
            new = request(data.draw(st.sampled_from("abc")), data.draw(st.sampled_from([0, 0, 1])))
            waiting.append(new)
            queue.add(new)
        elif action == "take" and waiting:
            first = queue.first
            assert first is not None and id(first) in model_next(waiting)
            queue.take(first)
            waiting.remove(first)
            first.admissions += 1
            taken.append(first)
        elif action == "charge" and taken:
            data.draw(st.sampled_from(taken)).account.served += data.draw(st.integers(0, 9))
        elif action == "abort" and waiting:
            gone = data.draw(st.sampled_from(waiting))
            queue.remove(gone)
            waiting.remove(gone)
        elif action == "preempt" and taken:
            back = taken.pop()
            waiting.append(back)
            queue.add(back)
        assert len(queue) == len(waiting) and bool(queue) == bool(waiting)
        assert set(map(id, queue)) == set(map(id, waiting))


# Fairness of what the scheduler serves


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=2, max_size=4),
    st.sampled_from([1, 2]),
    st.sampled_from([12, 40]),
)
def test_clients_that_always_wait_get_equal_shares(
    sizes: list[tuple[int, int]], depth: int, num_blocks: int
) -> None:
    """VTC's bound: tokens of clients differ by those of a few of the largest requests."""
    bench = Bench(depth=depth, num_blocks=num_blocks, max_running=2, prefix_caching=False, context_length=44)
    served: Counter[int] = Counter()
    sent: dict[Request, int] = {}
    for client, (prompt, n) in enumerate(sizes):
        for seed in range(20):
            asked = make([client] * prompt, n, ignore_eos=True, seed=seed, client=str(client))
            sent[bench.add(asked)] = client
    while len({each.client for each in bench.scheduler.waiting}) == len(sizes):
        bench.step()
    for each, client in sent.items():
        if each.admissions:
            served[client] += each.num_prompt + 2 * len(bench.outputs[each])
    largest = max(prompt + 2 * n for prompt, n in sizes)
    assert max(served.values()) - min(served[client] for client in range(len(sizes))) <= 3 * largest


def test_one_request_is_not_starved_by_a_thousand() -> None:
    bench = Bench(num_blocks=100, max_running=4)
    for i in range(1000):
        bench.add(make([i % 13] * 8, 8, client="flood", ignore_eos=True))
    for _ in range(20):
        bench.step()
    single = bench.add(make([3] * 8, 8, client="single", ignore_eos=True))
    for _ in range(20):
        bench.step()
    assert single in bench.ended
    assert len(bench.ended) < 30


def lines_of(work: Callable[[], object]) -> int:
    """Lines of Python that it runs."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def test_a_long_queue_is_no_more_work_for_a_step() -> None:
    """transformers#45063: nothing goes over all that wait."""
    found = []
    for waiting in (50, 5000):
        bench = Bench(num_blocks=200, max_running=4)
        for i in range(waiting):
            bench.add(make([i % 13] * 4, 3, client=str(i % 40)))
        for _ in range(4):
            bench.step()
        found.append(lines_of(partial(turns, bench, 20)))
    assert found[1] < 1.5 * found[0]


def turns(bench: Bench, n: int) -> None:
    """As the engine does them: without the checks that look at everything."""
    for _ in range(n):
        plan = bench.scheduler.schedule()
        assert plan is not None
        bench.device.launch(plan)
        bench.scheduler.commit(bench.device.collect())


def test_a_long_prompt_that_finds_no_room_is_looked_at_again_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(num_blocks=33, max_running=4)
    for i in range(2):
        bench.add(make([i] * 40, 20, ignore_eos=True))
    for _ in range(8):
        bench.step()
    bench.add(make([5] * 60, 3))
    looked = Mock(wraps=bench.scheduler.cache.match)
    monkeypatch.setattr(bench.scheduler.cache, "match", looked)
    for _ in range(8):
        bench.step()
    assert len(bench.scheduler.waiting) == 1
    assert looked.call_count == 1
    bench.run()
    bench.expect_reference()


# Deadlines


def test_deadlines_come_in_order_and_once() -> None:
    deadlines = Deadlines()
    first = request(timeout=5.0, queue_timeout=1.0, arrived=0.0)
    second = request(timeout=2.0, arrived=0.0)
    third = request(queue_timeout=3.0, arrived=0.0)
    for each in (first, second, third):
        deadlines.add(each)
    third.admissions = 1
    assert list(deadlines.due(0.5)) == []
    assert list(deadlines.due(4.0)) == [(first, "queue_timeout"), (second, "timeout")]
    first.state = State.FINISHED
    assert list(deadlines.due(100.0)) == []


def test_requests_that_ended_in_time_are_not_kept() -> None:
    deadlines = Deadlines()
    for _ in range(10_000):
        each = request(timeout=1e9)
        deadlines.add(each)
        each.state = State.FINISHED
    assert len(deadlines._heap) < 200
    alive = request(timeout=1.0, arrived=0.0)
    deadlines.add(alive)
    assert list(deadlines.due(2.0)) == [(alive, "timeout")]
