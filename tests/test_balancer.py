"""Where requests go, given what a Router knows of the replicas."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from deployments.balancer import (
    DECODE_COST,
    LOAD_WEIGHT,
    SETTLE,
    SILENT,
    SLACK,
    STALE,
    SUSPECTED,
    Balancer,
    choose,
)
from deployments.load import Load
from deployments.prefix_index import BLOCK, chain_of

LONG = 100 * BLOCK


class World:
    """A balancer, its replicas a, b and c, and a clock."""

    def __init__(self, names: str = "abc") -> None:
        self.now = 0.0
        self.balancer = Balancer(clock=lambda: self.now, rng=random.Random(0))
        self.balancer.set_replicas(names)

    def loads(self, **tokens: int) -> None:
        for name, prefill in tokens.items():
            self.balancer.observe(name, Load(prefill, 0, 0, 1000, 0.0))

    def where(self, tokens: int = LONG, prefix: list[int] | None = None, **options: str) -> str:
        """Where a request would go; it is gone at once."""
        chosen = self.balancer.place("probe", tokens, prefix or [], **options)
        self.balancer.finished("probe")
        return chosen


def prefix(seed: int, tokens: int = LONG) -> list[int]:
    return chain_of([seed] * tokens)


def test_prefixes_are_weighed_against_work() -> None:
    def chosen(uncached: list[int], load: list[int]) -> int:
        return choose(np.array(uncached, float), np.array(load, float), random.Random(0))

    assert chosen([5000, 1000], [0, 0]) == 1
    saved = 4000
    assert chosen([5000, 1000], [0, int(saved / LOAD_WEIGHT) - 1]) == 1
    assert chosen([5000, 1000], [0, int(saved / LOAD_WEIGHT) + 1]) == 0
    assert chosen([5000, 5000, 5000], [9000, 4000, 9000]) == 1


def test_of_equals_the_less_loaded_of_two_is_taken_so_that_many_are_used_and_the_idle_most() -> None:
    rng = random.Random(0)
    load = np.linspace(0, SLACK / LOAD_WEIGHT, 8)
    taken = Counter(choose(np.full(8, 1000.0), load, rng) for _ in range(4000))
    assert set(taken) == set(range(7))  # the last is never the less loaded one
    assert taken[0] > taken[2] > taken[4] > taken[6]
    holder = np.array([1000.0] * 7 + [900.0])  # no equal: the others have less of it
    assert {choose(holder, np.zeros(8), rng) for _ in range(100)} == {7}


def test_without_replicas_there_is_no_place() -> None:
    with pytest.raises(LookupError):
        World("").where()


def test_choices_of_one_prompt_stay_together_and_different_prompts_part() -> None:
    world = World()
    together = {world.balancer.place(("choice", i), 2000, prefix(1, 2000)) for i in range(4)}
    assert len(together) == 1
    apart = {world.balancer.place(("other", i), 4000, prefix(2 + i, 4000)) for i in range(2)}
    assert together | apart == set("abc")


def test_work_that_is_sent_counts_at_once_and_only_once() -> None:
    world = World("ab")
    first = world.balancer.place(1, 9000)
    second = world.balancer.place(2, 6000)
    assert {first, second} == set("ab")
    assert world.where() == second
    world.balancer.accepted(1, first)
    world.loads(**{first: 9000 + DECODE_COST})  # may not have counted it yet
    assert world.balancer.loads() == {first: 2 * (9000 + DECODE_COST), second: 6000 + DECODE_COST}
    world.now += SETTLE
    world.loads(**{first: 9000 + DECODE_COST})
    assert world.balancer.loads() == {first: 9000 + DECODE_COST, second: 6000 + DECODE_COST}
    for key in (1, 2):
        world.balancer.finished(key)
        world.balancer.finished(key)
    world.loads(a=0, b=0)
    assert world.balancer.loads() == {"a": 0, "b": 0}


def test_what_a_replica_took_counts_there_and_not_where_it_was_meant_to_go() -> None:
    world = World("ab")
    meant = world.balancer.place(1, 5000)
    other = "ab".replace(meant, "")
    world.balancer.accepted(1, other)
    assert world.balancer.loads() == {meant: 0, other: 5000 + DECODE_COST}
    world.balancer.place(1, 5000)  # again, as when Serve asks twice
    assert sum(world.balancer.loads().values()) == 5000 + DECODE_COST
    world.balancer.finished(1)
    assert world.balancer.loads() == {"a": 0, "b": 0}


def test_what_is_placed_after_its_end_and_never_arrives_is_forgotten() -> None:
    world = World("ab")
    name = world.balancer.place(1, 5000)
    world.balancer.finished(1)
    world.balancer.place(1, 5000)  # Serve had not heard of its cancellation
    world.now += STALE - 1
    world.loads(a=0, b=0)
    assert sum(world.balancer.loads().values()) == 5000 + DECODE_COST
    world.balancer.place(2, 100, avoid=["a"])  # this one still waits for room
    world.now += 1
    world.loads(a=0, b=0)
    assert world.balancer.loads() == {"a": 0, "b": 100 + DECODE_COST}, name
    assert list(world.balancer._placements) == [2]
    world.now += STALE
    assert world.where(avoid="a") == "b"  # of a replica that says nothing, the next request finds it
    assert world.balancer.loads() == {"a": 0, "b": 0}


def test_a_replica_whose_next_step_does_not_come_is_chosen_only_where_there_is_no_other() -> None:
    world = World("ab")

    def frame(name: str, running: int, goes_on: bool | None) -> None:
        world.balancer.observe(name, Load(0, running, 0, 1000, 10_000.0), goes_on=goes_on)

    frame("a", 1, goes_on=True)
    frame("b", 100, goes_on=False)
    assert {world.where() for _ in range(20)} == {"a"}
    world.now += SILENT + 0.1
    frame("b", 100, goes_on=True)
    frame("a", 1, goes_on=None)  # it takes a request, and computes nothing
    assert {world.where() for _ in range(20)} == {"b"}
    world.now += SILENT + 0.1  # both are silent: nothing is known against one of them
    assert {world.where() for _ in range(20)} == {"a", "b"}
    frame("a", 1, goes_on=False)  # has nothing of ours any more, so it has no reason to send frames
    frame("b", 100, goes_on=False)
    world.now += SILENT + 0.1
    assert {world.where() for _ in range(20)} == {"a", "b"}
    frame("a", 1, goes_on=True)
    world.now += SILENT + 0.1
    assert world.where() == "b" and world.where(avoid="b") == "a"
    world.now += SUSPECTED  # its tape was lost, maybe: then no frame would come, whatever it does
    assert {world.where() for _ in range(20)} == {"a", "b"}
    frame("a", 1, goes_on=True)
    world.now += SILENT + 0.1
    assert world.where() == "b"
    world.balancer.set_replicas("b")
    world.balancer.set_replicas("ab")
    assert {world.where() for _ in range(20)} == {"a", "b"}


def test_running_requests_are_work_too() -> None:
    world = World("ab")
    world.balancer.observe("a", Load(0, 30, 10, 1000, 0.0))
    assert world.balancer.loads()["a"] == 40 * DECODE_COST


def test_a_silent_replica_is_taken_to_work_on() -> None:
    world = World("ab")
    world.balancer.observe("a", Load(8000, 0, 0, 1000, 4000.0))
    world.balancer.observe("b", Load(8000, 0, 0, 1000, 0.0))  # its speed is not known
    world.now += 1
    assert world.balancer.loads() == {"a": 4000, "b": pytest.approx(8000 * (1 - 1 / STALE))}
    world.now += STALE
    assert world.balancer.loads() == {"a": 0, "b": 0}


def test_a_prefix_is_found_again_unless_others_have_much_less_to_do() -> None:
    world = World()
    home = world.where(prefix=prefix(1))
    world.loads(**dict.fromkeys(set("abc") - {home}, 0), **{home: LONG})
    assert world.where(prefix=prefix(1)) == home
    assert world.where(prefix=prefix(2)) != home
    world.loads(**{home: int(LONG / LOAD_WEIGHT) + SLACK})
    assert world.where(prefix=prefix(1)) != home


def test_what_other_routers_have_sent_is_known_too() -> None:
    world = World()
    world.balancer.observe("b", Load(0, 0, 0, 1000, 0.0), [prefix(1), prefix(2)])
    assert {world.where(prefix=prefix(n)) for n in (1, 2) for _ in range(20)} == {"b"}
    world.balancer.observe("stranger", Load(0, 0, 0, 1000, 0.0), [prefix(3)])  # has left, say


def test_a_session_has_one_replica_that_all_routers_know() -> None:
    world, other = World(), World("cab")
    homes = {str(n): world.where(session=str(n)) for n in range(60)}
    assert all(15 <= count <= 25 for count in Counter(homes.values()).values())
    for router in (world, other, world):
        assert {name: router.where(session=name) for name in homes} == homes
    other.balancer.set_replicas("ab")  # only those whose replica is gone move
    assert all(other.where(session=name) == home for name, home in homes.items() if home != "c")


def test_a_session_waits_no_longer_than_it_would_take_to_compute_it_elsewhere() -> None:
    world = World()
    home = world.where(session="ann")
    assert {world.where(session="") for _ in range(50)} == set("abc")
    world.loads(**{home: int(LONG / LOAD_WEIGHT) - SLACK})
    assert world.where(session="ann") == home
    world.loads(**{home: int(LONG / LOAD_WEIGHT) + SLACK})
    assert world.where(session="ann") != home
    world.loads(**{home: 0})
    assert world.where(session="ann") == home


def test_replicas_to_avoid_are_the_last_resort() -> None:
    world = World()
    world.loads(c=10**6)
    assert world.balancer.place(1, 100, avoid=("a", "b", "gone")) == "c"
    assert world.balancer.place(2, 100, avoid=("a", "b", "c")) in "ab"


def test_replicas_come_and_go() -> None:
    world = World()
    seen: list[frozenset[str]] = []
    world.balancer.on_replicas(seen.append)
    home = world.where(prefix=prefix(1), session="ann")
    world.balancer.place("there", 100_000, prefix(3))
    left = set("abc") - {home}
    world.balancer.set_replicas(left)
    world.balancer.set_replicas(left)  # no news
    assert seen == [left]
    assert {world.where(prefix=prefix(1), session="ann") for _ in range(3)} <= left
    world.balancer.set_replicas(left | {"new"})
    world.loads(**dict.fromkeys(left, 10**6))
    assert world.where(prefix=prefix(9)) == "new"
    world.balancer.finished("there")
    world.loads(**dict.fromkeys(left | {"new"}, 0))
    assert world.balancer.loads() == dict.fromkeys(left | {"new"}, 0)
    world.balancer.set_replicas(set())
    assert seen[-1] == frozenset()
    with pytest.raises(LookupError):
        world.where()


def test_a_new_replica_inherits_nothing_from_the_one_whose_place_it_takes() -> None:
    world = World("a")
    world.where(prefix=prefix(1))
    world.balancer.set_replicas("b")
    world.balancer.set_replicas("bc")
    for _ in range(20):  # neither has it: they share the work
        world.balancer.place(object(), LONG, prefix(1)[:1])
    assert all(world.balancer.loads().values())
