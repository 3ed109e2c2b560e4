"""The times of a request: they travel as what is left, and survive that a replica is lost."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from deployments.generation import Dispatcher, Generation
from deployments.submission import ANY_TIME, Refusal, SchedulingParams, Submission
from engine.request import FinishReason, SamplingParams


def test_what_is_left_of_the_times() -> None:
    whole = SchedulingParams(priority=2, client="a", cache_salt=b"s", timeout=10.0, queue_timeout=4.0)
    left = whole.after(3.0, began=False)
    assert (left.timeout, left.queue_timeout, left.over) == (7.0, 1.0, False)
    assert (left.priority, left.client, left.cache_salt) == (2, "a", b"s")
    assert whole.after(4.0, began=False).over
    began = whole.after(9.0, began=True)
    assert (began.timeout, began.queue_timeout, began.over) == (1.0, None, False)
    assert whole.after(10.0, began=True).over
    assert ANY_TIME.after(1e9, began=False) == ANY_TIME and not ANY_TIME.over
    assert pickle.loads(pickle.dumps(left)) == left


async def generate(
    submit: list[Submission], answers: list[Refusal | None], scheduling: SchedulingParams, delay: float = 0.01
) -> Generation:
    """A generation whose replicas answer so, and its submissions."""
    done = asyncio.Event()

    async def replica(submission: Submission) -> Refusal | None:
        submit.append(submission)
        await asyncio.sleep(delay)
        return answers[len(submit) - 1]

    dispatcher = Dispatcher(replica, "demo")
    await dispatcher.open("127.0.0.1")
    generation = dispatcher.start([1], SamplingParams(), done.set, scheduling)
    await asyncio.wait_for(done.wait(), 30)
    dispatcher.stop(generation)
    await dispatcher.close()
    return generation


async def test_each_attempt_has_what_is_left() -> None:
    sent: list[Submission] = []
    scheduling = SchedulingParams(timeout=100.0, queue_timeout=50.0)
    generation = await generate(sent, [Refusal("lost", "gone")] * 3, scheduling)
    assert generation.refusal == Refusal("lost", "gone")
    timeouts = [each.scheduling.timeout or 0 for each in sent]
    queue_timeouts = [each.scheduling.queue_timeout or 0 for each in sent]
    assert 100.0 >= timeouts[0] > timeouts[1] + 0.005 > timeouts[2] + 0.01 > 50
    assert 50.0 >= queue_timeouts[0] > queue_timeouts[1] > queue_timeouts[2] > 0


@pytest.mark.parametrize(
    "scheduling", [SchedulingParams(timeout=0.005), SchedulingParams(queue_timeout=0.005)]
)
async def test_no_attempt_is_made_when_time_is_over(scheduling: SchedulingParams) -> None:
    sent: list[Submission] = []
    generation = await generate(sent, [Refusal("lost", "gone")] * 3, scheduling)
    assert len(sent) == 1
    assert (generation.finish_reason, generation.refusal) == (FinishReason.TIMEOUT, None)


async def test_a_replica_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.generation.GRACE", 0.01)
    sent: list[Submission] = []
    generation = await generate(sent, [None], SchedulingParams(timeout=0.01), delay=1e6)
    assert (len(sent), generation.finish_reason) == (1, FinishReason.TIMEOUT)
    assert generation.admitted.is_set()
