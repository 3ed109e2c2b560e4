"""The index of prefixes against one that is slow and obvious."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from deployments.prefix_index import BLOCK, PrefixIndex, chain_of

PATHS = st.lists(st.integers(0, 2), max_size=5)
"""Prompts by block: few kinds of blocks, so that prefixes are shared."""


def prompt(path: list[int]) -> list[int]:
    return [kind for kind in path for _ in range(BLOCK)]


def test_chains_cover_all_that_precedes_a_block_and_what_they_belong_to() -> None:
    one, two = [1] * BLOCK, [2] * BLOCK
    assert chain_of(one[:-1]) == []
    assert len(chain_of(one + two + one[:-1])) == 2
    assert chain_of(one + two)[:1] == chain_of(one)
    assert chain_of(one + two)[1] != chain_of(two + two)[1] != chain_of(two)[0]
    assert chain_of(one, b"a") != chain_of(one, b"b")


def test_chains_are_the_same_in_another_process() -> None:
    program = "from deployments.prefix_index import *; print(chain_of(range(200), b'model'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(chain_of(range(200), b"model"))


@given(st.lists(st.tuples(PATHS, st.integers(0, 70)), max_size=12), PATHS, st.integers(0, 70))
def test_each_replica_is_found_with_the_longest_prefix_that_it_holds(
    sent: list[tuple[list[int], int]], asked: list[int], left: int
) -> None:
    index = PrefixIndex()
    holds: dict[int, set[tuple[int, ...]]] = {}
    for path, replica in sent:
        index.add(chain_of(prompt(path)), replica)
        holds.setdefault(replica, set()).update(tuple(path[:n]) for n in range(1, len(path) + 1))
    for forgotten in (None, left):
        if forgotten is not None:
            index.forget(1 << forgotten)
            holds.pop(forgotten, None)
        expected = {}
        for replica, prefixes in holds.items():
            depth = max((n for n in range(1, len(asked) + 1) if tuple(asked[:n]) in prefixes), default=0)
            if depth:
                expected[replica] = depth * BLOCK
        found = index.match(chain_of(prompt(asked)))
        assert {i: tokens for bits, tokens in found for i in range(80) if bits >> i & 1} == expected
        assert len({tokens for _, tokens in found}) == len(found)


def test_what_was_not_used_for_longest_is_forgotten_and_ends_before_beginnings() -> None:
    index = PrefixIndex(capacity=4)
    old, new = chain_of(prompt([0, 0, 0])), chain_of(prompt([1, 1]))
    index.add(old, 0)
    index.add(new, 1)
    assert len(index) == 4
    assert index.match(old) == [(1, 2 * BLOCK)]
    index.add(old[:1], 0)
    index.add(chain_of(prompt([2, 2])), 2)
    assert index.match(old) == [(1, BLOCK)]
    assert index.match(new) == [(2, BLOCK)]
