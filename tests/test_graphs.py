"""A captured step is replayed for its own slot, size and sampling, and for no other; padding harms nobody.

On a CPU a 'graph' is the captured work itself, run again: it reads and writes the same tensors as a
CUDA graph would, so a wrong slot, bucket or padding gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from engine.attention import LayerCache
from engine.config import EngineConfig
from engine.grammar import Grammars
from engine.graphs import bucket_for, buckets, mixed_buckets
from engine.lanes import Lanes, make_lanes
from engine.model import PagedModel
from engine.request import Request, SamplingParams
from engine.runner import Runner, Shape
from engine.scheduler import Scheduler
from tests.fake_device import reference
from tests.tiny_models import reference_texts, tiny_model
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


def new_scheduler(grammars: Grammars | None = None) -> Scheduler:
    return Scheduler(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        context_length=32,
        max_running_requests=ROWS,
        max_tokens_per_step=MAX_TOKENS,
        grammars=grammars,
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_replayed_steps_give_the_tokens_of_each_request_alone(depth: int) -> None:
    """transformers#45274, #45323: a graph runs for what it was captured for, in its own slot."""
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
    assert {kind for _, _, *kinds in graphs.replayed for kind in kinds} == {False}
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
        assert prompt == ((0, Shape(MAX_TOKENS, ROWS, ROWS, ROWS, 16)), (0, ROWS, kind == "filtered"))
        assert rest == [((0, Shape(2, 2, 2, 0, 16)), (0, 2, kind == "filtered"))] * 2
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


@pytest.fixture
def uninitialized_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize("rows", [1, 2])
def test_the_kernels_take_steps_as_they_are_padded(rows: int) -> None:
    """A model on captured steps says what `transformers.generate` does, though padded tokens are NaN."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("runs on a CPU")
    prompts, wanted = zip(*reference_texts("llama", (2, 9), 3), strict=True)
    config = EngineConfig(
        model=str(tiny_model("llama")[1]), attention="triton", device="cpu", max_running_requests=rows
    )
    model = PagedModel.load(config, DEVICE, torch.float32)
    scheduler = Scheduler(
        num_blocks=9, block_size=8, context_length=16, max_running_requests=rows, max_tokens_per_step=7
    )
    caches, graphs = model.allocate_cache(9, 8), RunAgain()
    runner = Runner(
        model,
        caches,
        make_lanes(DEVICE),
        DEVICE,
        max_tokens=7,
        max_sequences=rows,
        max_blocks=2,
        depth=1,
        min_sequences=2,
    )
    runner._capture_all(graphs)  # type: ignore[arg-type]
    for cache in caches:
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
    for i, prompt in enumerate(prompts):
        scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=3, temperature=0)))
    outputs: dict[str, list[int]] = {str(i): [] for i in range(2)}
    while (plan := scheduler.schedule()) is not None:
        runner.launch(plan)
        result = runner.collect()
        runner.slots[0].poison()
        for output in scheduler.commit(result):
            outputs[output.request.id].extend(output.tokens)
    runner.close()
    assert list(outputs.values()) == list(wanted)
    shapes = [shape for _, shape, *_ in graphs.replayed if isinstance(shape, Shape)]
    assert {(shape.num_tokens, shape.num_sequences) for shape in shapes} == {(7, 2), (2, 2)}


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


@pytest.mark.parametrize(
    "most", [(1, 2), (2, 2), (24, 11), (64, 64), (65, 65), (100, 65), (300, 300), (8192, 256), (2500, 2500)]
)
def test_mixed_steps_are_captured_up_to_what_keeps_a_gpu_busy(most: tuple[int, int]) -> None:
    """In shapes that some step needs, each no smaller than the step."""
    max_tokens, max_sequences = most
    shapes = mixed_buckets(max_tokens, max_sequences)
    assert shapes == sorted(set(shapes))
    assert shapes[-1][0] == max(2, min(max_tokens, 2048))
    assert all(2 <= sequences <= tokens for tokens, sequences in shapes)
    assert {sequences for _, sequences in shapes} <= set(buckets(max_sequences))  # whose sampling is captured
    runner = captured_runner(make_lanes(DEVICE), RunAgain(), 1)
    runner._mixed_buckets = shapes
    needed = set()
    for t in range(1, shapes[-1][0] + 1):
        for s in {1, 2, 64, 65, min(t, max_sequences)}:
            if s <= min(t, max_sequences):
                shape = runner._captured_shape(t, s, decodes=False)
                assert shape is not None
                assert shape.num_tokens >= t
                assert shape.num_sequences >= s
                needed.add((shape.num_tokens, shape.num_sequences))
    assert needed == set(shapes)
    assert runner._captured_shape(shapes[-1][0] + 1, 1, decodes=False) is None
    runner.close()
