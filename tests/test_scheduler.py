"""The scheduler against a fake device: random traces, and the bugs that peers shipped."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import FinishReason, Output, Request, RequestError, SamplingParams, State
from engine.scheduler import Scheduler
from tests.fake_device import VOCAB, FakeDevice, reference


@dataclass
class Bench:
    """Scheduler and fake device, driven like the engine's loop. Checks invariants after every step."""

    depth: int = 2
    num_blocks: int = 64
    block_size: int = 4
    context_length: int = 64
    max_running: int = 8
    max_tokens: int = 16
    prefix_caching: bool = True
    outputs: dict[Request, list[int]] = field(default_factory=dict)
    ended: dict[Request, FinishReason] = field(default_factory=dict)
    decoded: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            context_length=self.context_length,
            max_running_requests=self.max_running,
            max_tokens_per_step=max(self.max_tokens, self.max_running),
            prefix_caching=self.prefix_caching,
        )
        self.device = FakeDevice(self.num_blocks, self.block_size, self.max_running)

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.outputs[request] = list(request.generated)
        return request

    def abort(self, request: Request) -> None:
        output = self.scheduler.abort(request)
        if output is not None:
            self.take([output])
        self.scheduler.check()

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.request not in self.ended, "output after the end"
            assert output.position == len(self.outputs[output.request]), "a token lost or doubled"
            self.outputs[output.request].extend(output.tokens)
            if output.finish_reason is not None:
                self.ended[output.request] = output.finish_reason

    def step(self) -> bool:
        """One turn of the loop. False if there was nothing to do."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is not None:
            assert len(plan.tokens) <= self.scheduler.max_tokens_per_step
            self.decoded.append(set(plan.sequences["row"].tolist()))
            self.device.launch(plan)
        in_flight = self.scheduler.num_in_flight
        if in_flight and (in_flight == self.depth or plan is None):
            self.take(self.scheduler.commit(self.device.collect()))
            self.scheduler.check()
            return True
        return plan is not None

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                break
        else:
            pytest.fail("the trace does not end")
        assert not self.scheduler.has_work, "work left and nothing scheduled"
        counts = self.scheduler.counts()
        assert counts.owned == 0
        assert counts.free + counts.cached == counts.total
        assert sum(self.scheduler.counters.finished.values()) == self.scheduler.counters.admitted

    def expect_reference(self) -> None:
        """Every request's tokens are what it generates alone; an aborted one's are a beginning of that."""
        for request, output in self.outputs.items():
            sampling = request.sampling
            limit = sampling.max_tokens or self.scheduler.context_length - request.num_prompt
            stop = () if sampling.ignore_eos else sampling.stop_token_ids
            wanted = reference(request.prompt, limit, stop, sampling.seed)
            if self.ended[request] is FinishReason.ABORT:
                assert output == wanted[: len(output)]
            else:
                assert output == wanted
                stopped = bool(stop) and output[-1] in stop
                assert self.ended[request] is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def make(prompt: list[int], max_tokens: int | None = 5, **kwargs: object) -> Request:
    params = {k: kwargs.pop(k) for k in ("seed", "stop_token_ids", "ignore_eos") if k in kwargs}
    return Request("r", prompt, SamplingParams(max_tokens=max_tokens, **params), **kwargs)  # type: ignore[arg-type]


# Random traces

requests = st.builds(
    lambda shared, own, max_tokens, eos, ignore, seed, priority, salt: make(
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12][:shared] + own,
        max_tokens,
        stop_token_ids=(0, 1) if eos else (),
        ignore_eos=ignore,
        seed=seed,
        priority=priority,
        cache_salt=salt,
    ),
    shared=st.integers(0, 12),
    own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    max_tokens=st.integers(1, 20),
    eos=st.booleans(),
    ignore=st.sampled_from([False, False, True]),
    seed=st.integers(-(2**63), 2**64 - 1),
    priority=st.sampled_from([0, 0, 1]),
    salt=st.sampled_from([b"", b"", b"a"]),
)
events = st.lists(
    st.one_of(
        requests, st.integers(0, 30), st.just("reply"), st.just("step"), st.just("step"), st.just("step")
    ),
    max_size=60,
)


def play(bench: Bench, trace: list[Request | int | str]) -> None:
    sent: list[Request] = []
    for event in trace:
        if isinstance(event, Request):
            sent.append(bench.add(event))
        elif isinstance(event, int):
            if sent:
                bench.abort(sent[event % len(sent)])
        elif event == "reply":
            ended = [each for each in sent if each in bench.ended and each.num_tokens < 30]
            if ended:  # the next turn of a conversation: a prompt that its blocks hold, answer included
                before = ended[-1]
                prompt = [*before.prompt, *bench.outputs[before], 1]
                sent.append(bench.add(make(prompt, 8, seed=len(sent), cache_salt=before.cache_salt)))
        else:
            bench.step()
    bench.run()
    bench.expect_reference()


benches = st.builds(
    Bench,
    depth=st.sampled_from([1, 2, 2, 3]),
    num_blocks=st.sampled_from([12, 16, 40]),
    max_running=st.sampled_from([1, 3, 8]),
    max_tokens=st.sampled_from([1, 5, 32]),
    context_length=st.just(41),
    prefix_caching=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(benches, events)
def test_random_traces(bench: Bench, trace: list[Request | int | str]) -> None:
    play(bench, trace)


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None)
@given(benches, events)
def test_random_traces_nightly(bench: Bench, trace: list[Request | int | str]) -> None:
    play(bench, trace)


def test_no_torch_in_the_host_half() -> None:
    code = (
        "import sys, engine.scheduler, engine.config, tests.fake_device;"
        "sys.exit(any(m.split('.')[0] == 'torch' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Single cases


@pytest.mark.parametrize("depth", [1, 2])
def test_small_cache_preempts_and_ends(depth: int) -> None:
    bench = Bench(depth=depth, num_blocks=14, context_length=48, prefix_caching=False)
    for i in range(6):
        bench.add(make([i + 1] * 6, 20, seed=i))
    bench.run()
    bench.expect_reference()
    assert bench.scheduler.counters.preemptions > 0


def test_every_running_request_decodes_beside_a_stream_of_prompts() -> None:
    """sglang#32549: prefill never starves decode."""
    bench = Bench(num_blocks=200, max_running=8, max_tokens=12)
    first = bench.add(make([1, 2], 40, ignore_eos=True))
    bench.step()
    row = first.row
    for i in range(38):
        bench.add(make([i % 7] * 20, 1))
        bench.step()
        assert row in bench.decoded[-1]
    bench.run()
    bench.expect_reference()


@pytest.mark.parametrize("depth", [1, 2])
def test_exactly_max_tokens_and_exactly_the_context(depth: int) -> None:
    """vllm#28172, #25120, #27922."""
    bench = Bench(depth=depth, context_length=24)
    exact = bench.add(make([3] * 10, 14, ignore_eos=True))
    open_end = bench.add(make([4] * 10, None, ignore_eos=True))
    one = bench.add(make([5] * 10, 1))
    full = bench.add(make([6] * 23, 1))
    with pytest.raises(RequestError, match="context") as refused:
        bench.scheduler.add(make([3] * 10, 15))
    assert refused.value.field == "max_tokens"
    bench.run()
    bench.expect_reference()
    assert [len(bench.outputs[r]) for r in (exact, open_end, one, full)] == [14, 14, 1, 1]


def test_nothing_is_computed_past_a_length_limit() -> None:
    bench = Bench()
    bench.add(make([1, 2, 3], 4, ignore_eos=True))
    bench.run()
    assert bench.scheduler.counters.steps == 4
    assert bench.scheduler.counters.wasted_tokens == 0


def test_a_stop_costs_one_wasted_token_at_depth_two_and_none_at_depth_one() -> None:
    """mini-sglang: the extra token of a finished request never reaches the client."""
    prompt = next([i, j] for i in range(13) for j in range(13) if len(reference([i, j], 9, (0,), 0)) == 4)
    for depth, wasted in ((1, 0), (2, 1)):
        bench = Bench(depth=depth)
        bench.add(make(prompt, 9, stop_token_ids=(0,)))
        bench.run()
        bench.expect_reference()
        assert bench.scheduler.counters.wasted_tokens == wasted


def test_full_prefix_hit_still_computes_one_token() -> None:
    """nano-vllm#144."""
    bench = Bench()
    first = bench.add(make([1, 2, 3, 4, 5, 6, 7, 8], 3))
    bench.run()
    again = bench.add(make([1, 2, 3, 4, 5, 6, 7, 8], 3))
    bench.run()
    assert bench.outputs[first] == bench.outputs[again]
    assert again.num_cached == 4
    bench.expect_reference()


def test_a_block_is_shareable_only_once_its_last_position_is_computed() -> None:
    """The last token of an answer is never computed: a block that ends with it must not be shared."""
    bench = Bench()
    first = bench.add(make([1, 2, 3, 4, 5], 3))
    bench.run()
    reply = bench.add(make([*first.prompt, *bench.outputs[first], 1], 3))
    bench.run()
    assert reply.num_cached == 4
    bench.expect_reference()


def test_cached_tokens_count_what_others_computed_and_not_what_it_lost_itself() -> None:
    bench = Bench(num_blocks=40)
    request = bench.add(make([1] * 30, 4))
    bench.step()
    bench.step()
    bench.scheduler._preempt(request)
    bench.run()
    assert request.admissions == 2
    assert request.num_cached == 0
    bench.expect_reference()


def test_prefixes_are_not_shared_across_salts() -> None:
    bench = Bench()
    bench.add(make([1] * 9, 3, cache_salt=b"a"))
    bench.run()
    other = bench.add(make([1] * 9, 3, cache_salt=b"b"))
    same = bench.add(make([1] * 9, 3, cache_salt=b"a"))
    bench.run()
    assert (other.num_cached, same.num_cached) == (0, 8)


def test_resumption_goes_on_where_an_earlier_attempt_stopped() -> None:
    whole = reference([2, 4, 6], 12, (), 99)
    for n in range(12):
        bench = Bench()
        resumed = bench.add(make([2, 4, 6], 12, seed=99, generated=whole[:n]))
        bench.run()
        assert bench.outputs[resumed] == whole


def test_preempted_request_keeps_its_late_token() -> None:
    """vllm#27756, #38624: neither lost nor doubled, and not computed twice."""
    bench = Bench(depth=2)
    request = bench.add(make([1, 2, 3], 6, ignore_eos=True))
    bench.step()
    bench.step()
    assert bench.scheduler.num_in_flight == 1
    bench.scheduler._preempt(request)
    assert (request.state, request.late) == (State.WAITING, 1)
    bench.run()
    bench.expect_reference()
    assert bench.scheduler.counters.wasted_tokens == 0


def test_abort_everywhere_returns_the_pool_to_its_baseline() -> None:
    """vllm#54947, #31503, ray#52533."""
    bench = Bench(num_blocks=20, prefix_caching=False)
    sent = [bench.add(make([i % 13] * (1 + i % 11), 20)) for i in range(200)]
    for i, request in enumerate(sent):
        if i % 3 == 0:
            bench.step()
        bench.abort(request)
    bench.run()
    counters = bench.scheduler.counters
    assert counters.finished.total() == 200
    assert counters.finished[FinishReason.ABORT] + counters.finished[FinishReason.LENGTH] == 200
    assert bench.scheduler.counts().free == bench.scheduler.counts().total


def test_starting_with_nothing_to_do() -> None:
    """transformers#48303."""
    bench = Bench()
    assert bench.scheduler.schedule() is None
    assert not bench.scheduler.has_work


def test_refusals_name_the_field() -> None:
    bench = Bench(context_length=16)
    for request, name in (
        (make([], 1), "prompt"),
        (make([1] * 16, 1), "prompt"),
        (make([1] * 10, 7), "max_tokens"),
    ):
        with pytest.raises(RequestError) as refused:
            bench.scheduler.add(request)
        assert refused.value.field == name
    assert not bench.scheduler.has_work


def test_context_is_capped_by_the_whole_cache() -> None:
    bench = Bench(num_blocks=5, block_size=4, context_length=64)
    assert bench.scheduler.context_length == 16
    request = bench.add(make([1] * 7, None, ignore_eos=True))
    bench.run()
    assert len(bench.outputs[request]) == 9


def test_the_newest_of_the_lowest_priority_is_preempted() -> None:
    bench = Bench(num_blocks=11, context_length=40, prefix_caching=False)
    kept = [bench.add(make([i] * 4, 16, ignore_eos=True, priority=p)) for i, p in ((1, 0), (2, 1), (3, 0))]
    lost: list[Request] = []
    preempt = bench.scheduler._preempt

    def noting(request: Request) -> None:
        lost.append(request)
        preempt(request)

    bench.scheduler._preempt = noting  # type: ignore[method-assign]
    bench.run()
    bench.expect_reference()
    assert lost[0] is kept[1]
    assert kept[0] not in lost


def test_priority_runs_first() -> None:
    bench = Bench(max_running=1)
    late = bench.add(make([1], 2, priority=5, ignore_eos=True))
    early = bench.add(make([2], 2, priority=-5, ignore_eos=True))
    bench.run()
    assert list(bench.ended) == [early, late]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", 2**64),
    ],
)
def test_sampling_params_out_of_range(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field
