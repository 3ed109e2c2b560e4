"""Scheduler and fake device, driven like the engine's loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.request import FinishReason, Output, Request, SamplingParams
from engine.scheduler import Scheduler
from tests.fake_device import FakeDevice, reference


@dataclass
class Bench:
    """Checks invariants after every step."""

    depth: int = 2
    num_blocks: int = 64
    block_size: int = 4
    context_length: int = 64
    max_running: int = 8
    max_tokens: int = 16
    prefix_caching: bool = True
    identity: bytes = b""
    outputs: dict[Request, list[int]] = field(default_factory=dict)
    ended: dict[Request, FinishReason] = field(default_factory=dict)
    now: float = 0.0
    decoded: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            context_length=self.context_length,
            max_running_requests=self.max_running,
            max_tokens_per_step=max(self.max_tokens, self.max_running),
            prefix_caching=self.prefix_caching,
            identity=self.identity,
        )
        self.device = FakeDevice(self.num_blocks, self.block_size, self.max_running)

    def add(self, request: Request) -> Request:
        request.arrived = self.now
        self.scheduler.add(request)
        self.outputs[request] = list(request.generated)
        return request

    def abort(self, request: Request) -> None:
        output = self.scheduler.abort(request)
        if output is not None:
            self.take([output])
        self.scheduler.check()

    def wait(self, seconds: float) -> None:
        """Time passes, and nothing else."""
        self.now += seconds
        self.take(self.scheduler.expire(self.now))
        self.scheduler.check()
        for request in self.outputs:
            if request.timeout is not None and request.timeout <= self.now - request.arrived:
                assert request in self.ended, "its time is over"
            if self.ended.get(request) is FinishReason.TIMEOUT:
                limits = [s for s in (request.timeout, request.queue_timeout) if s is not None]
                assert min(limits) <= self.now - request.arrived, "ended before its time"

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.request not in self.ended, "output after the end"
            assert output.position == len(self.outputs[output.request]), "a token lost or doubled"
            self.outputs[output.request].extend(output.tokens)
            if output.finish_reason is not None:
                self.ended[output.request] = output.finish_reason
                assert (output.error is None) != (output.finish_reason is FinishReason.TIMEOUT)

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
        """Every request's tokens are what it generates alone, or a beginning of that where it was cut off."""
        for request, output in self.outputs.items():
            sampling = request.sampling
            limit = sampling.max_tokens or self.scheduler.context_length - request.num_prompt
            stop = () if sampling.ignore_eos else sampling.stop_token_ids
            wanted = reference(request.prompt, limit, stop, sampling.seed)
            if self.ended[request] in (FinishReason.ABORT, FinishReason.TIMEOUT):
                assert output == wanted[: len(output)]
            else:
                assert output == wanted
                stopped = bool(stop) and output[-1] in stop
                assert self.ended[request] is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def make(prompt: list[int], max_tokens: int | None = 5, **kwargs: object) -> Request:
    params = {k: kwargs.pop(k) for k in ("seed", "stop_token_ids", "ignore_eos") if k in kwargs}
    return Request("r", prompt, SamplingParams(max_tokens=max_tokens, **params), **kwargs)  # type: ignore[arg-type]
