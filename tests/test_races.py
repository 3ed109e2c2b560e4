"""The pipeline gives the same tokens in every order that its events allow, and in no fewer events.

DESIGN: every enumerated order of the lanes over a few steps; threads with seeded delays; removing
any one event makes a run fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine.request import Request, SamplingParams
from tests.fake_device import reference
from tests.toy_pipeline import ChosenOrder, Pipeline, delayed_lanes, every_order

EVENTS = ("h2d_done", "compute_done", "d2h_done")


def make(prompt: list[int], max_tokens: int, stop: tuple[int, ...] = ()) -> Request:
    return Request("r", prompt, SamplingParams(max_tokens=max_tokens, temperature=0, stop_token_ids=stop))


def three_steps() -> Sequence[Sequence[Request]]:
    """A prompt in two chunks beside a decode; a row and blocks freed while a step is in flight."""
    return [[make([1, 2], 3), make([3, 4, 5, 6], 1)]]


def four_steps() -> Sequence[Sequence[Request]]:
    """The same, and a newcomer that takes the freed row."""
    return [[make([1, 2], 4), make([3, 4, 5, 6], 1)], [], [make([7], 2)]]


def many_steps() -> Sequence[Sequence[Request]]:
    return [[make([i, 2, 3][: 1 + i % 3], 1 + i % 7, stop=(0, 5))] for i in range(24)]


def penalised() -> Sequence[Sequence[Request]]:
    """Rows change hands, and with them the counts that change nearly every token."""
    return [
        [
            Request(
                f"{i}",
                [i % 13, 2, 3][: 1 + i % 3],
                SamplingParams(max_tokens=1 + i % 7, temperature=0, presence_penalty=2.0 if i % 3 else 0.0),
            )
        ]
        for i in range(24)
    ]


def expect(outputs: dict[Request, list[int]]) -> None:
    for request, output in outputs.items():
        sampling = request.sampling
        assert output == reference(request.prompt, sampling.max_tokens or 0, sampling.stop_token_ids, 0)


@pytest.mark.parametrize(("trace", "steps", "pauses"), [(three_steps, 3, True), (four_steps, 4, False)])
def test_every_order_gives_the_same_tokens(
    trace: Callable[[], Sequence[Sequence[Request]]], steps: int, pauses: bool
) -> None:
    """With pauses, lanes may also run between any two actions of the host, not only while it waits."""

    def run(world: ChosenOrder) -> None:
        pipeline = Pipeline(world.lanes(), pause=world.pause if pauses else lambda: None)
        expect(pipeline.run(trace()))
        assert pipeline.scheduler.counters.steps == steps

    assert every_order(run) > 500


@pytest.mark.parametrize("event", EVENTS)
def test_without_an_event_some_order_fails(event: str) -> None:
    failures = 0

    def run(world: ChosenOrder) -> None:
        nonlocal failures
        try:
            expect(Pipeline(world.lanes(), pause=world.pause).without(event).run(four_steps()))
        except Exception:
            failures += 1

    every_order(run, enough=lambda: failures > 0)
    assert failures == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_threads_with_delays(seed: int, depth: int) -> None:
    lanes = delayed_lanes(seed)
    try:
        expect(Pipeline(lanes, depth=depth).run(many_steps()))
    finally:
        lanes.close()


@pytest.mark.parametrize("event", EVENTS)
def test_threads_without_an_event_fail(event: str) -> None:
    failed = 0
    for seed in range(10):
        lanes = delayed_lanes(seed)
        try:
            expect(Pipeline(lanes).without(event).run(many_steps()))
        except Exception:
            failed += 1
        finally:
            lanes.close()
        if failed:
            break
    assert failed


def test_penalties_follow_their_rows() -> None:
    """vllm#45357, sglang#18803: state by row is cleared on the lane that reads it, in its order."""

    def tokens(seed: int, depth: int) -> list[list[int]]:
        lanes = delayed_lanes(seed)
        try:
            return list(Pipeline(lanes, depth=depth).run(penalised()).values())
        finally:
            lanes.close()

    wanted = tokens(0, depth=1)
    assert any(len(set(each)) > 2 for each in wanted)
    for seed in range(4):
        assert tokens(seed, depth=2) == wanted
