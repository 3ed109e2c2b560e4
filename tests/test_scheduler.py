"""The scheduler against a fake device: random traces, and the bugs that peers shipped."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import StepResult
from engine.request import FinishReason, Request, RequestError, SamplingParams, State
from tests.fake_device import VOCAB, reference
from tests.scheduler_bench import Bench, make

# Random traces

requests = st.builds(
    lambda shared, own, max_tokens, eos, ignore, **kwargs: make(
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12][:shared] + own,
        max_tokens,
        stop_token_ids=(0, 1) if eos else (),
        ignore_eos=ignore,
        **kwargs,
    ),
    shared=st.integers(0, 12),
    own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    max_tokens=st.integers(1, 20),
    eos=st.booleans(),
    ignore=st.sampled_from([False, False, True]),
    seed=st.integers(-(2**63), 2**64 - 1),
    priority=st.sampled_from([0, 0, 0, 1, -1, 5]),
    cache_salt=st.sampled_from([b"", b"", b"a"]),
    client=st.sampled_from(["", "", "a", "b"]),
    timeout=st.sampled_from([None, None, 1.0, 4.0]),
    queue_timeout=st.sampled_from([None, None, 0.5, 4.0]),
)
steps = [st.just("step")] * 4
events = st.lists(
    st.one_of(
        requests,
        st.integers(0, 30),  # abort
        st.sampled_from([0.25, 1.0]),  # time passes
        st.just("reply"),
        st.just("choices"),
        *steps,
    ),
    max_size=60,
)


def play(bench: Bench, trace: list[Request | int | float | str]) -> None:
    sent: list[Request] = []
    for event in trace:
        if isinstance(event, Request):
            sent.append(bench.add(event))
        elif isinstance(event, int):
            if sent:
                bench.abort(sent[event % len(sent)])
        elif isinstance(event, float):
            bench.wait(event)
        elif event == "reply":
            ended = [each for each in sent if each in bench.ended and each.num_tokens < 30]
            if ended:  # the next turn of a conversation: a prompt that its blocks hold, answer included
                before = ended[-1]
                prompt = [*before.prompt, *bench.outputs[before], 1]
                sent.append(bench.add(make(prompt, 8, seed=len(sent), cache_salt=before.cache_salt)))
        elif event == "choices" and sent:  # more answers to one prompt
            like = sent[-1]
            for seed in range(3):
                again = make(like.prompt, 6, seed=seed, priority=like.priority, client=like.client)
                sent.append(bench.add(again))
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
def test_random_traces(bench: Bench, trace: list[Request | int | float | str]) -> None:
    """sglang-jax#1487, sglang#14972, mini-sglang: no token crosses to another request, no block is missing
    under overlap and preemption, nothing comes after the end."""
    play(bench, trace)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None)
@given(benches, events)
def test_random_traces_nightly(bench: Bench, trace: list[Request | int | float | str]) -> None:
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


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_of_a_chat_finds_the_answer_before_it(depth: int) -> None:
    bench = Bench(depth=depth)
    first = bench.add(make([1, 2, 3, 4, 5], 9, ignore_eos=True))  # 13 of its 14 positions are computed
    bench.run()
    reply = bench.add(make([*first.prompt, *bench.outputs[first], 1, 2], 3))
    bench.run()
    assert reply.num_cached == 12
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
        ("stop_token_ids", None),
        ("stop_token_ids", ("a",)),
    ],
)
def test_sampling_params_out_of_range(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field


# One prefill for what is equal


def test_many_answers_to_one_prompt_take_one_prefill() -> None:
    """The first computes the prompt; each other one what lies after its last full block, in the same step."""
    bench = Bench(num_blocks=600, max_running=128, max_tokens=1000, block_size=4)
    prompt = [i % 13 for i in range(42)]
    for seed in range(128):
        bench.add(make(prompt, 3, seed=seed))
    bench.step()
    counters = bench.scheduler.counters
    assert len(bench.scheduler.running) == 128
    assert counters.prompt_tokens == 42 + 127 * (42 - 40)
    assert bench.scheduler.counts().owned == 10 + 128
    bench.run()
    bench.expect_reference()
    assert len({tuple(output) for output in bench.outputs.values()}) > 64, "each has its own noise"


def test_a_long_prefix_is_computed_once_though_it_takes_several_steps() -> None:
    bench = Bench(num_blocks=200, context_length=256, max_running=8, max_tokens=16)
    prefix = [i % 13 for i in range(100)]
    for i in range(8):
        bench.add(make([*prefix, i], 3, seed=i))
    bench.run()
    bench.expect_reference()
    assert bench.scheduler.counters.prompt_tokens == 101 + 7
    assert bench.scheduler.counters.steps < 12


def test_of_a_prompt_that_nobody_had_before_each_step_hashes_its_own_part() -> None:
    bench = Bench(num_blocks=200, context_length=256, max_tokens=16)
    first = bench.add(make([i % 13 for i in range(100)], 3))
    size = bench.scheduler.block_size
    bench.step()
    assert len(first.hashes) == 16 // size
    bench.run()
    again = bench.add(make([i % 13 for i in range(100)], 3))
    bench.step()
    assert len(again.hashes) == 100 // size and again.num_cached == 99 // size * size
    bench.run()
    bench.expect_reference()


@pytest.mark.parametrize("end", ["abort", "preempt"])
@pytest.mark.parametrize("launched", [1, 2])
def test_blocks_of_a_writer_that_goes_away_while_it_is_in_flight_stay_right(end: str, launched: int) -> None:
    bench = Bench(depth=3, num_blocks=60, max_tokens=32)
    writer = bench.add(make([7] * 20, 9))
    for _ in range(launched):
        bench.step()
    assert bench.scheduler.num_in_flight == launched
    if end == "abort":
        bench.abort(writer)
    else:
        bench.scheduler._preempt(writer)
    reader = bench.add(make([7] * 21, 9))
    bench.run()
    bench.expect_reference()
    assert reader.num_cached == 20


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_prompt_that_was_given_up_halfway_leaves_its_full_blocks_and_no_more(steps: int) -> None:
    bench = Bench(max_running=2, max_tokens=5)
    writer = bench.add(make([7] * 20, 9))
    for _ in range(steps):
        bench.step()
    bench.abort(writer)
    reader = bench.add(make([7] * 21, 9))
    bench.run()
    bench.expect_reference()
    assert reader.num_cached == 5 * steps // 4 * 4


def test_a_block_that_another_request_has_computed_meanwhile_is_not_registered_twice() -> None:
    bench = Bench(max_tokens=8)
    urgent = make([5] * 9, 3, priority=-1)
    bench.add(make([5] * 9, 3))
    bench.step()
    bench.add(urgent)
    bench.run()
    bench.expect_reference()


# Priorities


def test_an_urgent_request_takes_the_row_of_the_newest_least_urgent_one() -> None:
    bench = Bench(max_running=3)
    kept = [bench.add(make([i], 30, ignore_eos=True, priority=p)) for i, p in enumerate((0, 5, 5))]
    for _ in range(3):
        bench.step()
    urgent = bench.add(make([9], 3, ignore_eos=True, priority=1))
    bench.step()
    assert [each.state for each in kept] == [State.RUNNING, State.RUNNING, State.WAITING]
    assert urgent.state is State.RUNNING
    bench.run()
    bench.expect_reference()
    assert [each.admissions for each in kept] == [1, 1, 2]
    assert next(iter(bench.ended)) is urgent


def test_an_urgent_request_takes_blocks_and_its_prompt_goes_first() -> None:
    bench = Bench(num_blocks=21, context_length=60, max_tokens=8, prefix_caching=False)
    long = bench.add(make([1] * 55, 5, ignore_eos=True, priority=3))
    bench.step()
    urgent = bench.add(make([2] * 30, 2, ignore_eos=True))
    bench.step()
    assert (long.state, urgent.state) == (State.WAITING, State.RUNNING)
    bench.run()
    bench.expect_reference()
    assert list(bench.ended) == [urgent, long]


def test_a_prompt_under_way_waits_for_a_more_urgent_one_and_keeps_what_it_has() -> None:
    bench = Bench(num_blocks=100, max_tokens=8)
    long = bench.add(make([1] * 40, 2, priority=3))
    bench.step()
    urgent = bench.add(make([2] * 16, 2))
    bench.run()
    bench.expect_reference()
    assert list(bench.ended) == [urgent, long]
    assert long.admissions == 1


def test_an_urgent_request_takes_the_row_of_a_prompt_under_way() -> None:
    bench = Bench(max_running=1, max_tokens=8)
    long = bench.add(make([1] * 40, 2, priority=3))
    bench.step()
    urgent = bench.add(make([2] * 3, 2))
    plan = bench.scheduler.schedule()
    assert plan is not None and plan.sequences["query_len"].tolist() == [3], "the rest is for nobody"
    bench.device.launch(plan)
    bench.run()
    bench.expect_reference()
    assert list(bench.ended) == [urgent, long]


def test_equal_priority_takes_nothing() -> None:
    bench = Bench(max_running=1)
    first = bench.add(make([1], 9, ignore_eos=True))
    bench.step()
    bench.add(make([2], 1))
    bench.run()
    assert first.admissions == 1


def test_nobody_loses_blocks_where_that_would_not_help() -> None:
    bench = Bench(num_blocks=21, context_length=60, max_running=4, prefix_caching=False)
    first = bench.add(make([1] * 50, 10, ignore_eos=True))
    small = bench.add(make([2] * 8, 6, ignore_eos=True, priority=9))
    for _ in range(5):
        bench.step()
    bench.add(make([3] * 30, 1, priority=4))  # it needs more than the two of them leave
    bench.step()
    assert small.state is State.RUNNING
    bench.run()
    bench.expect_reference()
    assert (first.admissions, small.admissions) == (1, 1)


@pytest.mark.parametrize("prompt", [76, 72])
def test_blocks_that_several_share_are_freed_once(prompt: int) -> None:
    """Six answers to one prompt have 16 blocks, of which each could name 11."""
    bench = Bench(num_blocks=31, context_length=100, max_running=16, max_tokens=200)
    bench.add(make([1] * 40, 40, ignore_eos=True))
    bench.step()
    bench.step()
    answers = [bench.add(make([2] * 41, 8, seed=i, priority=9, ignore_eos=True)) for i in range(6)]
    bench.step()
    urgent = bench.add(make([3] * prompt, 1, priority=4))
    bench.step()
    fits = prompt == 72  # beside the first and its reserve of one block; the other needs one more
    assert urgent.state is (State.RUNNING if fits else State.WAITING)
    assert {each.state for each in answers} == {State.WAITING if fits else State.RUNNING}
    bench.run()
    bench.expect_reference()


@pytest.mark.parametrize("num_blocks", [16, 18])
def test_what_the_urgent_one_shares_with_those_it_may_preempt_is_no_room(num_blocks: int) -> None:
    bench = Bench(num_blocks=num_blocks, context_length=60, max_running=16, max_tokens=200)
    bench.add(make([1], 3, ignore_eos=True))
    answers = [bench.add(make([2] * 41, 8, seed=i, priority=9, ignore_eos=True)) for i in range(2)]
    bench.step()
    urgent = bench.add(make([2] * 41 + [5] * 17, 2, ignore_eos=True))  # five blocks beside those ten
    bench.step()
    fits = num_blocks == 18
    assert urgent.state is (State.RUNNING if fits else State.WAITING)
    assert {each.state for each in answers} == {State.WAITING if fits else State.RUNNING}
    bench.run()
    bench.expect_reference()


def test_a_prompt_under_way_goes_on_while_a_more_urgent_one_finds_no_room() -> None:
    bench = Bench(num_blocks=21, context_length=60, max_running=4, max_tokens=4, prefix_caching=False)
    bench.add(make([1] * 50, 10, ignore_eos=True))
    for _ in range(14):
        bench.step()
    slow = bench.add(make([2] * 12, 6, ignore_eos=True, priority=9))
    bench.step()
    bench.add(make([3] * 30, 1, priority=4))
    computed = bench.scheduler.rows.scheduled[slow.row]
    bench.step()
    assert bench.scheduler.rows.scheduled[slow.row] == computed + 3
    bench.run()
    bench.expect_reference()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cache_of_a_few_blocks_and_a_stream_of_urgent_requests_end(depth: int) -> None:
    """No livelock: whoever preempts is more urgent or older, so there is always one that gets on."""
    bench = Bench(depth=depth, num_blocks=11, context_length=40, max_running=8, max_tokens=9)
    for i in range(60):
        bench.add(make([i % 13] * (1 + 7 * i % 20), 1 + 11 * i % 19, priority=-(i % 7), seed=i))
        if i % 3 == 0:
            bench.step()
    bench.run(20_000)
    bench.expect_reference()
    assert bench.scheduler.counters.preemptions > 20


# Time


def test_time_runs_out_in_the_queue_and_while_running() -> None:
    bench = Bench(max_running=1)
    running = bench.add(make([1], 50, ignore_eos=True, timeout=5.0, queue_timeout=1.0))
    queued = bench.add(make([2], 5, queue_timeout=2.0))
    patient = bench.add(make([3], 5, timeout=100.0))
    for _ in range(4):
        bench.step()
    bench.wait(2.0)
    assert bench.ended == {queued: FinishReason.TIMEOUT}
    bench.wait(2.9)
    assert running not in bench.ended
    bench.wait(0.1)
    assert bench.ended[running] is FinishReason.TIMEOUT
    assert bench.outputs[running] and not bench.outputs[queued]
    bench.run()
    bench.expect_reference()
    assert bench.ended[patient] is FinishReason.LENGTH
    assert bench.scheduler.counters.wasted_tokens == 1  # in flight when its time ran out


def test_a_preempted_request_no_longer_has_a_queue_deadline() -> None:
    bench = Bench(num_blocks=40)
    request = bench.add(make([1] * 5, 6, queue_timeout=1.0))
    bench.step()
    bench.scheduler._preempt(request)
    bench.wait(9.0)
    bench.run()
    bench.expect_reference()
    assert bench.ended[request] is not FinishReason.TIMEOUT


@pytest.mark.parametrize("field", ["timeout", "queue_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_times_that_are_none(field: str, value: float) -> None:
    with pytest.raises(RequestError) as refused:
        Bench().add(make([1], 1, **{field: value}))
    assert refused.value.field == field


# The books


def test_a_newcomer_leaves_room_for_those_who_run() -> None:
    """Else it would be preempted by the next block that one of them needs, and begin again."""
    bench = Bench(num_blocks=12, context_length=44, max_running=4, prefix_caching=False)
    bench.add(make([1] * 8, 30, ignore_eos=True))
    bench.step()
    newcomer = bench.add(make([2] * 32, 1, ignore_eos=True))  # all eight blocks that will be left
    bench.step()
    assert newcomer.state is State.WAITING
    small = bench.add(make([3] * 2, 1, ignore_eos=True, priority=-1))
    bench.step()
    assert small.state is State.RUNNING
    bench.run()
    assert bench.scheduler.counters.preemptions == 0


def test_results_are_taken_in_order_only() -> None:
    bench = Bench()
    bench.add(make([1, 2], 9))
    plans = [bench.scheduler.schedule(), bench.scheduler.schedule()]
    assert plans[1] is not None
    with pytest.raises(ValueError, match="result of step 1 where step 0 was due"):
        bench.scheduler.commit(StepResult(1, plans[1].sequences["row"]))


def test_a_row_that_nobody_owns_is_not_given_back() -> None:
    bench = Bench()
    request = bench.add(make([1, 2], 9))
    bench.step()
    row = request.row
    bench.scheduler.rows.release(row)
    with pytest.raises(ValueError, match=f"row {row} has no owner"):
        bench.scheduler.rows.release(row)


def test_prefixes_are_not_shared_across_models() -> None:
    caches = [Bench(identity=identity).scheduler.cache for identity in (b"a", b"b")]
    tokens = np.arange(4, dtype=np.int32)
    hashes: list[list[bytes]] = [[], []]
    for cache, chain in zip(caches, hashes, strict=True):
        cache.extend_hashes(chain, tokens, 1)
    assert hashes[0] != hashes[1]
