"""A captured step is replayed for its own slot, size and sampling, and for no other; padding harms nobody.

On a CPU a 'graph' is the captured work itself, run again: it reads and writes the same tensors as a
CUDA graph would, so a wrong slot, bucket or padding gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from engine.attention import LayerCache
from engine.graphs import bucket_for, buckets, mixed_buckets
from engine.lanes import Lanes, make_lanes
from engine.request import Request, SamplingParams
from engine.runner import Runner, Shape
from engine.scheduler import Scheduler
from tests.fake_device import reference
from tests.toy_pipeline import BLOCK_SIZE, DEVICE, ToyModel

ROWS, NUM_BLOCKS, MAX_TOKENS = 11, 90, 24


class RunAgain:
    """In place of `engine.graphs.Graphs`."""

    def __init__(self) -> None:
        self.work: dict[Any, Callable[[], None]] = {}
        self.replayed: list[Any] = []

    def capture(self, name: Any, work: Callable[[], None]) -> None:
        work()
        self.work[name] = work

    def replay(self, name: Any) -> None:
        self.replayed.append(name)
        with torch.inference_mode():  # in which it was captured; a graph knows nothing of it
            self.work[name]()


def captured_runner(lanes: Lanes, graphs: RunAgain, depth: int) -> Runner:
    shape = (NUM_BLOCKS, BLOCK_SIZE, 1, 1)
    runner = Runner(
        ToyModel(),
        [LayerCache(torch.zeros(shape), torch.zeros(shape))],
        lanes,
        DEVICE,
        max_tokens=MAX_TOKENS,
        max_sequences=ROWS,
        max_blocks=16,
        depth=depth,
        min_sequences=2,
    )
    runner._capture_all(graphs)  # type: ignore[arg-type]
    return runner


def new_scheduler() -> Scheduler:
    return Scheduler(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        context_length=32,
        max_running_requests=ROWS,
        max_tokens_per_step=MAX_TOKENS,
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_replayed_steps_give_the_tokens_of_each_request_alone(depth: int) -> None:
    lanes, graphs = make_lanes(DEVICE), RunAgain()
    runner = captured_runner(lanes, graphs, depth)
    scheduler = new_scheduler()
    requests = [
        Request(str(i), [1 + i % 12] * (1 + i % 5), SamplingParams(max_tokens=1 + i * 7 % 20, temperature=0))
        for i in range(40)
    ]
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}
    waiting = list(requests)
    while waiting or scheduler.has_work or scheduler.num_in_flight:
        if waiting:
            scheduler.add(waiting.pop())
        plan = scheduler.schedule()
        if plan is not None:
            runner.launch(plan)
        if scheduler.num_in_flight == depth or (plan is None and scheduler.num_in_flight):
            slot = runner._in_flight[0][0]
            result = runner.collect()
            slot.poison()
            for output in scheduler.commit(result):
                outputs[output.request.id].extend(output.tokens)
    runner.close()
    for request in requests:
        assert outputs[request.id] == reference(request.prompt, request.sampling.max_tokens or 0, (), 0)
    forwards = [(i, shape) for i, shape, *_ in graphs.replayed if isinstance(shape, Shape)]
    assert {i for i, _ in forwards} == set(range(depth))
    assert {shape.num_sequences for _, shape in forwards if not shape.num_prefills} == set(buckets(ROWS))
    mixed = {(shape.num_tokens, shape.num_sequences) for _, shape in forwards if shape.num_prefills}
    assert mixed == {(MAX_TOKENS, ROWS)}
    assert {kind for _, _, *kinds in graphs.replayed for kind in kinds} == {"greedy"}
    assert len(graphs.replayed) == 2 * len(forwards)  # nothing but its sampling beside each


def test_sampling_is_replayed_as_the_step_needs_it() -> None:
    lanes, graphs = make_lanes(DEVICE), RunAgain()
    runner = captured_runner(lanes, graphs, 1)
    scheduler = new_scheduler()
    kinds = {
        "greedy": SamplingParams(max_tokens=3, temperature=0),
        "noisy": SamplingParams(max_tokens=3, temperature=1),
        "filtered": SamplingParams(max_tokens=3, temperature=1, top_p=0.9),
    }
    for kind, sampling in kinds.items():
        scheduler.add(Request(kind, [1, 2, 3], sampling))
        graphs.replayed.clear()
        while (plan := scheduler.schedule()) is not None:
            runner.launch(plan)
            scheduler.commit(runner.collect())
        prompt, *rest = zip(graphs.replayed[::2], graphs.replayed[1::2], strict=True)
        assert prompt == ((0, Shape(MAX_TOKENS, ROWS, ROWS, ROWS, 16)), (0, ROWS, kind))
        assert rest == [((0, Shape(2, 2, 2, 0, 16)), (0, 2, kind))] * 2
    runner.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_penalties_are_taken_after_a_captured_forward(depth: int) -> None:
    """The toy's favourite token leads by 1; what was said before is 2 behind, so no token comes twice."""
    lanes, graphs = make_lanes(DEVICE), RunAgain()
    runner = captured_runner(lanes, graphs, depth)
    scheduler = new_scheduler()
    for i in range(3):
        scheduler.add(
            Request(str(i), [1 + i, 2], SamplingParams(max_tokens=12, temperature=0, presence_penalty=2))
        )
    outputs: dict[str, list[int]] = {str(i): [] for i in range(3)}
    while scheduler.has_work or scheduler.num_in_flight:
        plan = scheduler.schedule()
        if plan is not None:
            runner.launch(plan)
        if scheduler.num_in_flight == depth or plan is None:
            slot = runner._in_flight[0][0]
            result = runner.collect()
            slot.poison()
            for output in scheduler.commit(result):
                outputs[output.request.id].extend(output.tokens)
    runner.close()
    for tokens in outputs.values():
        assert len(set(tokens)) == len(tokens) == 12
    assert all(isinstance(shape, Shape) for _, shape, *_ in graphs.replayed)


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 32, 33, 100, 256])
def test_buckets_hold_every_size_and_begin_at_two(largest: int) -> None:
    sizes = buckets(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 2
    assert sizes[-1] == max(largest, 2)
    fit = partial(bucket_for, sizes=sizes)
    for n in range(1, largest + 1):
        size = fit(n)
        assert size is not None
        assert size >= n
        assert not any(n <= smaller < size for smaller in sizes)
    assert fit(sizes[-1] + 1) is None


@pytest.mark.parametrize("most", [(24, 11), (64, 64), (100, 65), (8192, 256), (1500, 1024), (2, 2)])
def test_mixed_steps_are_captured_up_to_what_keeps_a_gpu_busy(most: tuple[int, int]) -> None:
    for sizes, largest in zip(mixed_buckets(*most), (min(most[0], 2048), most[1]), strict=True):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
        assert sizes[0] > 1
        assert set(mixed_buckets(*most)[1]) <= set(buckets(most[1]))  # so that their sampling is captured
