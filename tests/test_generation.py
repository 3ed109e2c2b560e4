"""A Router's sequences over real tapes: delivered whole, aborted for good, resumed exactly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from deployments import execution, tape
from deployments.execution import Executor
from deployments.generation import ATTEMPTS, SHUTTING_DOWN, Dispatcher, Generation
from deployments.load import Load
from deployments.prefix_index import BLOCK, chain_of
from deployments.submission import Refusal, Submission
from deployments.tape import Observe, Record, Tape, TapeListener, TapeLost
from engine.request import FinishReason, Output, SamplingParams
from tests.memory_engine import MemoryEngine, logprobs_at, text_of

PROMPT = [5, 6, 7]


@dataclass
class Cluster:
    """Replicas in this process; one can be killed."""

    engines: list[MemoryEngine]
    executors: list[Executor] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    calls: list[asyncio.Task[Refusal | None]] = field(default_factory=list)
    deaf: bool = False
    """Whether it loses cancellations."""
    order: list[int] = field(default_factory=list)
    """The replica of each submission; by default they take turns."""

    def __post_init__(self) -> None:
        self.executors = [Executor(engine, f"r{n}", "demo") for n, engine in enumerate(self.engines)]

    async def submit(self, submission: Submission) -> Refusal | None:
        number = len(self.submissions)
        executor = self.executors[self.order[number] if self.order else number % len(self.executors)]
        self.submissions.append(submission)
        call = asyncio.create_task(executor.run(submission))
        self.calls.append(call)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not call.done():
                if not self.deaf:
                    call.cancel()
                raise
            return Refusal("lost", "the replica died")

    def kill(self, call: int) -> None:
        """As when the replica that runs this call dies: no answer, no last token."""
        self.calls[call].cancel()


@asynccontextmanager
async def dispatching(*engines: MemoryEngine) -> AsyncIterator[tuple[Dispatcher, Cluster]]:
    cluster = Cluster(list(engines))
    dispatcher = Dispatcher(cluster.submit, "demo")
    await dispatcher.open("127.0.0.1")
    try:
        yield dispatcher, cluster
    finally:  # else a test that fails would hang: what is cancelled as its loop ends would be submitted again
        await dispatcher.close()
        await asyncio.gather(*cluster.calls, return_exceptions=True)


class Reader:
    """Waits for news of one generation."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        max_tokens: int = 5,
        seed: int = 1,
        prompt: list[int] = PROMPT,
        logprobs: int | None = None,
    ):
        self.changed = asyncio.Event()
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed, logprobs=logprobs)
        self.generation: Generation = dispatcher.start(prompt, sampling, self.changed.set)

    async def until(self, good: Callable[[Generation], bool]) -> Generation:
        while not good(self.generation):
            await self.changed.wait()
            self.changed.clear()
        return self.generation


def ended(generation: Generation) -> bool:
    return generation.ended


def has(tokens: int) -> Callable[[Generation], bool]:
    return lambda generation: len(generation.tokens) == tokens


async def test_tokens_arrive_in_order_with_their_end() -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        readers = [Reader(dispatcher, max_tokens=3 + n, seed=n) for n in range(20)]
        stepping = asyncio.create_task(engine.run())
        for n, reader in enumerate(readers):
            generation = await reader.until(ended)
            assert generation.tokens == text_of(PROMPT, n, 3 + n)
            assert generation.finish_reason is FinishReason.LENGTH
            assert generation.refusal is None
            dispatcher.stop(generation)
        stepping.cancel()
        assert await asyncio.gather(*cluster.calls) == [None] * 20
    assert engine.aborts == []


async def test_a_refusal_ends_it() -> None:
    engine = MemoryEngine(capacity=0)
    async with dispatching(engine) as (dispatcher, cluster):
        generation = await Reader(dispatcher).until(ended)
        assert generation.refusal == Refusal("full", "no room", replica="r0")
        assert generation.admitted.is_set()  # whoever waits for it is told
        assert len(cluster.submissions) == 2  # once more, which found no other replica
        engine.capacity = 1
        generation = await Reader(dispatcher, prompt=[94]).until(ended)
        assert generation.refusal == Refusal("invalid", "token 94 is unknown", "prompt", "r0")
        assert len(cluster.submissions) == 3


@pytest.mark.parametrize("replicas", [1, 2])
async def test_full_replicas_are_asked_once_each(replicas: int) -> None:
    async with dispatching(*(MemoryEngine(capacity=0) for _ in range(replicas))) as (dispatcher, cluster):
        dispatcher.welcome([f"r{n}" for n in range(replicas)])
        generation = await Reader(dispatcher).until(ended)
        assert generation.refusal == Refusal("full", "no room", replica=f"r{replicas - 1}")
        assert len(cluster.submissions) == replicas


async def test_a_replica_that_lost_it_may_have_room() -> None:
    answers = [
        Refusal("lost", "it died", replica="b"),
        Refusal("full", "no room", replica="a"),
        Refusal("invalid", "asked again", replica="b"),
    ]

    async def submit(submission: Submission) -> Refusal | None:
        return answers.pop(0)

    dispatcher = Dispatcher(submit, "demo")
    await dispatcher.open("127.0.0.1")
    dispatcher.welcome(["a", "b"])
    async with asyncio.timeout(20):
        generation = await Reader(dispatcher).until(ended)
    assert generation.refusal is not None and generation.refusal.message == "asked again"
    await dispatcher.close()


async def test_a_full_replica_is_passed_over() -> None:
    engines = MemoryEngine(capacity=0), MemoryEngine(capacity=0), MemoryEngine()
    async with dispatching(*engines) as (dispatcher, cluster):
        reader = Reader(dispatcher, max_tokens=1)
        await engines[2].submitted.wait()
        assert [submission.avoid for submission in cluster.submissions] == [(), ("r0",), ("r0", "r1")]
        engines[2].step()
        generation = await reader.until(ended)
        assert generation.tokens == text_of(PROMPT, 1, 1)


async def test_it_is_admitted_before_its_first_token() -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, _):
        reader = Reader(dispatcher)
        assert not reader.generation.admitted.is_set()
        await reader.generation.admitted.wait()
        assert not reader.generation.ended
        assert not reader.changed.is_set()  # no text comes of it


async def test_tokens_of_another_model_never_mix() -> None:
    engines = MemoryEngine(), MemoryEngine(), MemoryEngine()
    async with dispatching(*engines) as (dispatcher, cluster):
        cluster.executors[1] = Executor(engines[1], "r1", "other")
        reader = Reader(dispatcher, max_tokens=2)
        await engines[0].submitted.wait()
        engines[0].step()
        await reader.until(has(1))
        cluster.kill(0)
        await engines[2].submitted.wait()
        assert not engines[1].submitted.is_set()
        engines[2].step()
        assert (await reader.until(ended)).tokens == text_of(PROMPT, 1, 2)

        for n in range(3):
            cluster.executors[n] = Executor(engines[n], f"r{n}", "other")
        generation = await Reader(dispatcher).until(ended)
        assert generation.refusal is not None
        assert generation.refusal.reason == "other model"


async def test_an_engine_that_fails_loses_what_it_runs() -> None:
    engines = MemoryEngine(), MemoryEngine()
    async with dispatching(*engines) as (dispatcher, cluster):
        reader = Reader(dispatcher, max_tokens=3)
        await engines[0].submitted.wait()
        engines[0].step()
        await reader.until(has(1))
        engines[0].fail("broken")
        await engines[1].submitted.wait()
        engines[1].step()
        engines[1].step()
        generation = await reader.until(ended)
        assert generation.tokens == text_of(PROMPT, 1, 3)
        assert len(cluster.submissions) == 2


async def test_an_error_of_one_request_ends_it() -> None:
    """It is not submitted again: it may be what breaks engines."""
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        reader = Reader(dispatcher)
        await engine.submitted.wait()
        [(request, sink, _)] = engine.running.values()
        sink(Output(request, 0, (), FinishReason.ERROR, "it divides by zero"))
        generation = await reader.until(ended)
        assert generation.refusal == Refusal("failed", "it divides by zero")
        assert len(cluster.submissions) == 1


async def test_a_replica_that_leaves_hands_over_its_requests() -> None:
    engines = MemoryEngine(), MemoryEngine(capacity=0)
    async with dispatching(*engines) as (dispatcher, cluster):
        cluster.order = [0, 0, 1, 1]
        readers = [Reader(dispatcher, max_tokens=6, seed=seed) for seed in range(2)]
        for reader in readers:
            await reader.generation.admitted.wait()
        engines[0].step()
        engines[0].step()
        await readers[0].until(has(2))
        dispatcher.keep(["r1"])
        while len(engines[1].running) < 2:  # though it is full: they were promised a place
            engines[1].submitted.clear()
            await engines[1].submitted.wait()
        assert not engines[0].running
        assert [each.reason for each in await asyncio.gather(*cluster.calls[:2]) if each] == ["moved"] * 2
        for _ in range(4):
            engines[1].step()
        for seed, reader in enumerate(readers):
            assert (await reader.until(ended)).tokens == text_of(PROMPT, seed, 6)

        # One that was on its way to it when it left.
        cluster.order += [0, 1]
        engines[1].capacity = 1
        reader = Reader(dispatcher, max_tokens=1)
        engines[1].submitted.clear()
        await engines[1].submitted.wait()
        engines[1].step()
        assert (await reader.until(ended)).tokens == text_of(PROMPT, 1, 1)
        assert len(cluster.submissions) == 6


async def test_requests_of_an_engine_that_hangs_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "HAND_BACK", 0.05)
    engines = MemoryEngine(), MemoryEngine()
    monkeypatch.setattr(engines[0], "abort", lambda *_: None)  # as if nobody heard it
    async with dispatching(*engines) as (dispatcher, cluster):
        cluster.order = [0, 1]
        reader = Reader(dispatcher, max_tokens=6)
        await reader.generation.admitted.wait()
        engines[0].step()
        await reader.until(has(1))
        dispatcher.keep(["r1"])
        async with asyncio.timeout(20):
            await engines[1].submitted.wait()
        for _ in range(5):  # it wakes up, and is as late as one can be
            engines[1].step()
            engines[0].step()
        assert (await reader.until(ended)).tokens == text_of(PROMPT, 1, 6)
        assert [await call for call in cluster.calls] == [
            Refusal("moved", "the Router asked for it back", replica="r0"),
            None,
        ]


async def test_what_an_engine_that_hangs_has_not_answered_goes_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tape, "HAND_BACK", 0.05)
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def never(*args: Any, **kwargs: Any) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    engines = MemoryEngine(), MemoryEngine()
    monkeypatch.setattr(engines[0], "submit", never)
    async with dispatching(*engines) as (dispatcher, cluster):
        cluster.order = [0, 1]
        reader = Reader(dispatcher, max_tokens=1)
        await asked.wait()
        assert not reader.generation.admitted.is_set()
        dispatcher.keep(["r1"])
        async with asyncio.timeout(20):
            await engines[1].submitted.wait()
            await cancelled.wait()
        engines[1].step()
        assert (await reader.until(ended)).tokens == text_of(PROMPT, 1, 1)
        assert [await call for call in cluster.calls] == [
            Refusal("moved", "the Router asked for it back", replica="r0"),
            None,
        ]


async def test_a_replica_that_has_just_come_is_not_asked_for_its_requests() -> None:
    """Whom to keep is decided only after the replicas were asked what they serve, or never."""
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        dispatcher.welcome(["r9"])
        dispatcher.keep(["r9"])
        dispatcher.welcome(["r0"])
        stepping = asyncio.create_task(engine.run())
        generation = await Reader(dispatcher).until(ended)
        assert generation.tokens == text_of(PROMPT, 1, 5)
        assert len(cluster.submissions) == 1
        stepping.cancel()


async def test_draining_lets_them_end() -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, _):
        reader = Reader(dispatcher, max_tokens=1)
        await engine.submitted.wait()
        draining = asyncio.create_task(dispatcher.drain(60))
        await asyncio.sleep(0)
        late = Reader(dispatcher)
        assert late.generation.refusal == SHUTTING_DOWN
        dispatcher.stop(late.generation)
        engine.step()
        generation = await reader.until(ended)
        assert generation.finish_reason is FinishReason.LENGTH
        assert not draining.done()  # its reader may still have to write
        dispatcher.stop(generation)
        await draining
    assert not engine.aborts


async def test_draining_ends_what_takes_too_long() -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        reader = Reader(dispatcher)
        await engine.submitted.wait()
        engine.step()
        draining = asyncio.create_task(dispatcher.drain(0))
        generation = await reader.until(ended)
        assert generation.refusal == SHUTTING_DOWN
        dispatcher.stop(generation)
        await draining
        await asyncio.gather(*cluster.calls, return_exceptions=True)
        assert not engine.running


async def test_stop_aborts_on_the_replica() -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        reader = Reader(dispatcher)
        await engine.submitted.wait()
        dispatcher.stop(reader.generation)
        await asyncio.gather(*cluster.calls, return_exceptions=True)
        assert not engine.running
        assert len(set(engine.aborts)) == 1


async def test_one_that_goes_on_between_deaths_outlives_any_number_of_them() -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        reader = Reader(dispatcher, max_tokens=2 * ATTEMPTS)
        for n in range(2 * ATTEMPTS - 1):
            await engine.submitted.wait()
            engine.submitted.clear()
            engine.step()
            await reader.until(has(n + 1))
            cluster.kill(n)
        await engine.submitted.wait()
        engine.step()
        generation = await reader.until(ended)
        assert generation.tokens == text_of(PROMPT, 1, 2 * ATTEMPTS)
        assert {each.lost for each in cluster.submissions} == {0}


async def test_one_that_kills_is_refused_and_those_beside_it_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine dies whenever it has computed a step with it; the others each have a token by then."""
    monkeypatch.setattr(execution, "PROBATION", 0.2)
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        others = [Reader(dispatcher, max_tokens=9 * ATTEMPTS, seed=n) for n in range(4)]

        async def run() -> None:
            while True:
                await engine.submitted.wait()
                engine.submitted.clear()
                while engine.running:
                    if any(request.prompt == [9] for request, _, _ in engine.running.values()):
                        for call in range(len(cluster.calls)):
                            cluster.kill(call)
                        engine.running.clear()
                    else:
                        engine.step()
                    await asyncio.sleep(0.01)

        running = asyncio.create_task(run())
        for reader in others:
            await reader.until(lambda generation: bool(generation.tokens))
        killer = Reader(dispatcher, prompt=[9])
        assert (await killer.until(ended)).refusal == Refusal("lost", "the replica died")
        for n, reader in enumerate(others):
            assert (await reader.until(ended)).tokens == text_of(PROMPT, n, 9 * ATTEMPTS)
        assert not killer.generation.tokens
        assert len(cluster.submissions) > 4 + ATTEMPTS  # they died with it
        running.cancel()


async def test_a_lost_cancellation_takes_effect_at_the_next_token() -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        cluster.deaf = True
        reader = Reader(dispatcher, max_tokens=100)
        await reader.generation.admitted.wait()
        dispatcher.stop(reader.generation)
        await asyncio.sleep(0)
        assert engine.running  # nobody has told it
        engine.step()
        await cluster.calls[0]  # ends without another step
        assert not engine.running


@pytest.mark.parametrize("lost", [False, True])
async def test_each_of_1000_that_leave_is_aborted_before_its_second_token(lost: bool) -> None:
    """With every cancellation of Ray Serve lost, too: then the tape brings it."""
    engine = MemoryEngine(capacity=1000)
    async with dispatching(engine) as (dispatcher, cluster):
        ends: dict[int, int] = {}
        deliver = dispatcher._listener._deliver

        def watch(record: Record) -> bool:
            if record.finish_reason is FinishReason.ABORT:
                ends[record.request] = record.position
            return deliver(record)

        dispatcher._listener._deliver = watch
        if lost:
            cluster.deaf = True
        generations = [Reader(dispatcher, max_tokens=10_000, seed=seed).generation for seed in range(1000)]
        await asyncio.gather(*(generation.admitted.wait() for generation in generations))
        left: dict[int, int] = {}
        rng = random.Random(1)
        while len(left) < 1000:
            for generation in generations:
                if generation.request not in left and rng.random() < 0.3:
                    left[generation.request] = len(generation.tokens)
                    dispatcher.stop(generation)
            engine.step()
            [tape] = [each.result() for each in cluster.executors[0]._tapes.values()]
            while tape._pending or tape._outstanding is not None:  # until this step is delivered
                await asyncio.sleep(0)
        engine.step()
        while len(ends) < 1000:
            await asyncio.sleep(0)
        assert max(ends[request] - left[request] for request in left) <= 1
        assert not engine.running


async def test_a_replica_that_dies_is_replaced_without_a_trace() -> None:
    engines = MemoryEngine(), MemoryEngine()
    async with dispatching(*engines) as (dispatcher, cluster):
        reader = Reader(dispatcher, max_tokens=6)
        await engines[0].submitted.wait()
        engines[0].step()
        engines[0].step()
        await reader.until(has(2))
        cluster.kill(0)
        await engines[1].submitted.wait()
        assert cluster.submissions[1].generated == text_of(PROMPT, 1, 2)
        assert cluster.submissions[1].attempt == 1
        for _ in range(4):
            engines[1].step()
        generation = await reader.until(ended)
        assert generation.tokens == text_of(PROMPT, 1, 6)
        assert generation.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("likeliest", [None, 0, 4])
async def test_each_token_has_its_log_probability_wherever_it_was_made(likeliest: int | None) -> None:
    """Also with a Router that takes two steps at once, and a replica that dies with the third on the way."""
    engines = MemoryEngine(), MemoryEngine()
    async with dispatching(*engines) as (dispatcher, cluster):
        reader = Reader(dispatcher, max_tokens=7, logprobs=likeliest)
        await reader.generation.admitted.wait()
        engines[0].step()
        engines[0].step()
        await reader.until(has(2))
        engines[0].step()
        cluster.kill(0)
        await engines[1].submitted.wait()
        for _ in range(5):
            engines[1].step()
        generation = await reader.until(ended)
        assert generation.tokens == text_of(PROMPT, 1, 7)
        assert generation.logprobs == (
            []
            if likeliest is None
            else [logprobs_at(token, place, likeliest) for place, token in enumerate(generation.tokens)]
        )
        assert len(cluster.submissions) == 2


async def test_it_is_not_tried_for_ever() -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        reader = Reader(dispatcher)
        for attempt in range(ATTEMPTS):
            await engine.submitted.wait()
            engine.submitted.clear()
            cluster.kill(attempt)
        generation = await reader.until(ended)
        assert generation.refusal == Refusal("lost", "the replica died")


async def test_a_closed_tape_is_opened_again() -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        reader = Reader(dispatcher, max_tokens=3)
        await engine.submitted.wait()
        engine.submitted.clear()
        engine.step()
        await reader.until(has(1))
        for connection in list(dispatcher._listener._connections):
            connection.close()
        await engine.submitted.wait()
        engine.step()
        engine.step()
        generation = await reader.until(ended)
        assert generation.tokens == text_of(PROMPT, 1, 3)
        assert [submission.attempt for submission in cluster.submissions] == [0, 1]


async def test_a_router_that_is_gone_leaves_nothing_running() -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        for seed in range(3):
            Reader(dispatcher, seed=seed)
        while len(engine.running) < 3:
            engine.submitted.clear()
            await engine.submitted.wait()
        dispatcher._tasks.clear()  # so that closing cancels no submission
        await dispatcher.close()
        assert (
            await asyncio.gather(*cluster.calls) == [Refusal("lost", "the Router is gone", replica="r0")] * 3
        )
        assert not engine.running
        late = await cluster.executors[0].run(cluster.submissions[0])
        assert late is not None
        assert late.reason == "lost"


@pytest.mark.parametrize("position", [0, 2])
async def test_a_gap_or_a_repetition_is_not_taken(position: int) -> None:
    engine = MemoryEngine()
    async with dispatching(engine) as (dispatcher, cluster):
        reader = Reader(dispatcher, max_tokens=4)
        await engine.submitted.wait()
        engine.submitted.clear()
        engine.step()
        await reader.until(has(1))
        [(_, _, output)] = engine.running.values()
        output[:] = [9] * position  # so the next token claims another place
        engine.step()
        await engine.submitted.wait()  # again, from what is known
        assert cluster.submissions[1].generated == text_of(PROMPT, 1, 1)
        for _ in range(3):
            engine.step()
        generation = await reader.until(ended)
        assert generation.tokens == text_of(PROMPT, 1, 4)


async def test_a_tape_that_ends_twice_does_not_take_the_next_one_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, ends = Executor(MemoryEngine(), "r0", "demo"), list[Callable[[], None]]()
    listener = TapeListener(lambda _: True, lambda *_: None)
    address = await listener.start("127.0.0.1")
    connect = Tape.connect

    async def lost_at_first(*args: Any) -> Tape:
        ends.append(args[4])
        if len(ends) == 1:
            raise TapeLost("no Router there")
        return await connect(*args)

    monkeypatch.setattr(Tape, "connect", lost_at_first)
    with pytest.raises(TapeLost):
        await executor._tape(address)
    tape = await executor._tape(address)
    ends[0]()  # the connection of the first is only closed now
    assert await executor._tape(address) is tape
    await listener.close()


async def test_routers_learn_of_the_prompts_that_others_send() -> None:
    executor = Executor(MemoryEngine(), "r0", "demo")
    news: list[asyncio.Queue[list[int]]] = [asyncio.Queue(), asyncio.Queue()]

    def hear(router: int) -> Observe:
        def observe(replica: str, load: Load, prefixes: list[list[int]], goes_on: bool | None) -> None:
            for prefix in prefixes:
                news[router].put_nowait(prefix)

        return observe

    dispatchers = [Dispatcher(executor.run, "demo", hear(router)) for router in range(2)]
    prompts = [[1 + blocks] * BLOCK * blocks for blocks in range(3)]
    readers: list[tuple[Dispatcher, Reader]] = []
    for router, prompt in ((0, PROMPT), (1, prompts[1]), (0, prompts[2])):
        if not readers or router:
            await dispatchers[router].open("127.0.0.1")
        readers.append((dispatchers[router], Reader(dispatchers[router], prompt=prompt)))
        await readers[-1][1].generation.admitted.wait()
    assert await news[0].get() == chain_of(prompts[1], b"demo\0")
    assert await news[1].get() == chain_of(prompts[2], b"demo\0")
    assert news[0].empty() and news[1].empty()
    for dispatcher, reader in readers:
        dispatcher.stop(reader.generation)
    for dispatcher in dispatchers:
        await dispatcher.close()
