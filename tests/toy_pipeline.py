"""The real scheduler, slots and runner around a toy model, on lanes whose order a test controls."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.attention import LayerCache, PagedBatch
from engine.grammar import Grammars
from engine.lanes import Lanes, ThreadEvent, ThreadLane, Work
from engine.request import Logprobs, Request
from engine.runner import Runner
from engine.scheduler import Scheduler
from tests.fake_device import VOCAB, next_token

BLOCK_SIZE, NUM_BLOCKS, ROWS, MAX_TOKENS = 2, 40, 4, 5
DEVICE = torch.device("cpu")


class ToyModel:
    """Keeps token ids where a real model keeps keys, and 'predicts' a hash of the context it finds."""

    vocab_size = VOCAB

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        caches: list[LayerCache],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        cells = caches[0].key.view(-1)
        cells[batch.cache_slots.long()] = input_ids.to(cells.dtype)
        logits = torch.zeros(len(batch.context_len), VOCAB)
        for i, length in enumerate(batch.context_len.tolist()):
            if not length:
                continue  # padded
            assert positions[logits_indices[i]] == length - 1
            at = torch.arange(length)
            slots = batch.block_tables[i, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
            logits[i, next_token(cells[slots].long().tolist(), 0)] = 1
        return logits


@dataclass
class Pipeline:
    """Requests through scheduler and runner in the engine's order; slots are poisoned when retired."""

    lanes: Lanes
    depth: int = 2
    pause: Callable[[], None] = lambda: None
    grammars: Grammars | None = None
    outputs: dict[Request, list[int]] = field(default_factory=dict)
    logprobs: dict[Request, list[Logprobs]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            context_length=32,
            max_running_requests=ROWS,
            max_tokens_per_step=MAX_TOKENS,
            grammars=self.grammars,
        )
        shape = (NUM_BLOCKS, BLOCK_SIZE, 1, 1)
        self.runner = Runner(
            ToyModel(),
            [LayerCache(torch.zeros(shape), torch.zeros(shape))],
            self.lanes,
            DEVICE,
            max_tokens=MAX_TOKENS,
            max_sequences=ROWS,
            max_blocks=self.scheduler.rows.blocks.shape[1],
            depth=self.depth,
        )

    def without(self, event: str) -> Pipeline:
        """Take one of the three events away from every slot."""
        for slot in self.runner.slots:
            assert hasattr(slot, event)
            setattr(slot, event, NoEvent())
        return self

    def run(self, arrivals: Sequence[Sequence[Request]]) -> dict[Request, list[int]]:
        """Requests arrive before the step of their index; runs until all have ended."""
        waiting = deque(arrivals)
        while True:
            for request in waiting.popleft() if waiting else ():
                self.scheduler.add(request)
                self.outputs[request], self.logprobs[request] = [], []
            plan = self.scheduler.schedule()
            if plan is not None:
                self.pause()
                self.runner.launch(plan)
                if len(plan.constrained):
                    while self.scheduler.num_in_flight > 1:
                        self.retire()
                    self.pause()
                    self.runner.constrain(self.scheduler.masks())
            in_flight = self.scheduler.num_in_flight
            if in_flight and (in_flight == self.depth or plan is None):
                self.retire()
            elif plan is None and not waiting:
                return self.outputs

    def retire(self) -> None:
        slot = self.runner._in_flight[0][0]
        result = self.runner.collect()
        slot.poison()
        for output in self.scheduler.commit(result):
            self.outputs[output.request].extend(output.tokens)
            self.logprobs[output.request].extend(output.logprobs)


class NoEvent(ThreadEvent):
    """An event that orders nothing: as if it had been reached before it was recorded."""

    def __setattr__(self, name: str, value: object) -> None:
        if not hasattr(self, name):
            super().__setattr__(name, value)


# Lanes that run in one thread, in an order that is chosen


class Stuck(Exception):
    """Nothing can run and the host waits."""


@dataclass
class ChosenEvent:
    world: ChosenOrder
    reached: int = 0
    recorded: int = 0

    def synchronize(self) -> None:
        wanted = self.recorded
        self.world.host_waits(lambda: self.reached >= wanted)


@dataclass(frozen=True)
class Wait:
    over: Callable[[], bool]


@dataclass
class ChosenLane:
    queue: deque[Work | Wait] = field(default_factory=deque)

    def run(self, work: Work) -> None:
        self.queue.append(work)

    def record(self, event: Any) -> None:
        if isinstance(event, NoEvent):
            return
        event.recorded += 1
        work = self.queue.pop()  # reaching a point is part of the work before it
        assert not isinstance(work, Wait)

        def work_and_reach(count: int = event.recorded) -> None:
            work()
            event.reached = count

        self.queue.append(work_and_reach)

    def wait(self, event: Any) -> None:
        if not isinstance(event, NoEvent):
            wanted = event.recorded
            self.queue.append(Wait(lambda: event.reached >= wanted))

    def next_work(self) -> Work | None:
        """What the lane would run next, if no wait holds it up."""
        while self.queue and isinstance(head := self.queue[0], Wait):
            if not head.over():
                return None
            self.queue.popleft()
        return self.queue[0] if self.queue else None  # type: ignore[return-value]


class ChosenOrder:
    """One execution. Wherever both lanes and host could go on, `choices` says which does."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = deque(choices)
        self.taken: list[tuple[int, int]] = []  # (choice, number of options)
        self.all_lanes = [ChosenLane() for _ in range(3)]

    def lanes(self) -> Lanes:
        h2d, compute, d2h = self.all_lanes
        return Lanes(h2d, compute, d2h, lambda: ChosenEvent(self), lambda: None, NoEvent)

    def pause(self) -> None:
        """A moment of the host's own work, in which any work of the lanes may run."""
        self.host_waits(lambda: True)

    def host_waits(self, over: Callable[[], bool]) -> None:
        """Run work of the lanes, in any order, until the host may go on and does."""
        while True:
            able = [lane for lane in self.all_lanes if lane.next_work() is not None]
            options = len(able) + over()
            if not options:
                raise Stuck
            choice = 0
            if options > 1:
                choice = self.choices.popleft() if self.choices else 0
                self.taken.append((choice, options))
            if choice == len(able):
                return
            work = able[choice].queue.popleft()
            assert not isinstance(work, Wait)
            work()


def every_order(run: Callable[[ChosenOrder], None], enough: Callable[[], bool] = lambda: False) -> int:
    """Call `run` for each order of execution, depth first, until `enough`; returns how many there were."""
    choices: list[int] = []
    for count in itertools.count(1):
        world = ChosenOrder(choices)
        run(world)
        taken = world.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken or enough():
            return count
        choices = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]
    raise AssertionError("unreachable")


# Lanes with threads and seeded delays


class DelayedLane(ThreadLane):
    def __init__(self, name: str, seed: int) -> None:
        self._random = random.Random(f"{name} {seed}")
        super().__init__(name)

    def run(self, work: Work) -> None:
        delay = self._random.choice((0, 0, 0.001, 0.003))

        def delayed() -> None:
            time.sleep(delay)  # stands for work that takes long, nothing waits by it
            work()

        super().run(delayed)


def delayed_lanes(seed: int) -> Lanes:
    h2d, compute, d2h = lanes = [DelayedLane(name, seed) for name in ("h2d", "compute", "d2h")]

    def close() -> None:
        for lane in lanes:
            lane.close()

    return Lanes(h2d, compute, d2h, ThreadEvent, close, ThreadEvent)
