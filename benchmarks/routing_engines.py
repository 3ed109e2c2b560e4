"""Simulated engines and the traffic they serve, for `benchmarks/routing_sim.py`."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from benchmarks.arrivals import Lengths, gamma, poisson
from deployments.load import Load


class Spans(Sequence[int]):
    """A prompt that need not exist: the first tokens of a shared text, then of a session's own."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        """`spans`: (number of a text, tokens of it); all but the last in whole routing blocks."""
        self.spans = spans
        self._length = sum(length for _, length in spans)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice) -> Sequence[int]:  # type: ignore[override]  # slices only
        start, stop = index.start, index.stop
        for text, length in self.spans:
            if start < length:
                return range((text << 24) + start, (text << 24) + min(stop, length))
            start, stop = start - length, stop - length
        return range(0)

    def text(self) -> str:
        """One character for each 16 tokens."""
        return "".join(
            chr(0x4000 + (text * 7919 + i * 31) % 0x8000) for text, n in self.spans for i in range(n // 16)
        )


@dataclass(slots=True)
class Job:
    at: float
    prompt: Spans
    output: int
    kind: str
    left: int = 0
    """Prompt tokens to compute, once admitted."""
    cached: int = 0
    ttft: float = 0.0
    router: int = 0


@dataclass(frozen=True)
class Shape:
    """A 32B model on one H200: four times what an 8B was measured to take there, in seconds."""

    step: float = 4 * 4.9e-3
    row: float = 4 * 0.031e-3
    token: float = 4 * 0.0206e-3
    rows: int = 256
    budget: int = 2048
    cache: int = 230_000
    """Tokens."""


@dataclass
class Engine:
    """Continuous batching in simulated time: prompts in order, decode beside them, a prefix cache."""

    name: str
    shape: Shape
    waiting: deque[Job] = field(default_factory=deque)
    prefilling: deque[Job] = field(default_factory=deque)
    decoding: list[tuple[int, int, Job]] = field(default_factory=list)
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    cached_tokens: int = 0
    owned: int = 0
    steps: int = 0
    busy: float = 0.0
    computed: int = 0
    running_until: float | None = None
    speed: float = 0.0
    _chunk: int = 0
    _jump: int = 0

    @property
    def ongoing(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    def load(self) -> Load:
        left = sum(job.left for job in self.prefilling) + sum(len(job.prompt) for job in self.waiting)
        rows = len(self.prefilling) + len(self.decoding)
        return Load(left, rows, len(self.waiting), (self.shape.cache - self.owned) // 16, self.speed)

    def begin(self, now: float) -> bool:
        """Launch the next step; False if there is nothing to do."""
        shape = self.shape
        self._admit()
        decoding = len(self.decoding)
        self._chunk = min(sum(job.left for job in self.prefilling), shape.budget - decoding)
        if not self._chunk and not decoding:
            self.running_until = None
            return False
        self._jump = 1 if self._chunk else min(self.decoding[0][0] - self.steps, 4)
        seconds = self._jump * (shape.step + shape.row * decoding + shape.token * self._chunk)
        self.busy += seconds
        work = self._chunk + self._jump * decoding
        self.computed += work
        self.speed += (1 if not self.speed else min(seconds / 2, 1)) * (work / seconds - self.speed)
        self.running_until = now + seconds
        return True

    def end(self, now: float) -> list[Job]:
        """The step is done. Returns the jobs that have ended with it."""
        self.steps += self._jump
        ended = []
        while self.decoding and self.decoding[0][0] <= self.steps:
            ended.append(heappop(self.decoding)[2])
        chunk = self._chunk
        while self.prefilling and (chunk or not self.prefilling[0].left):
            job = self.prefilling[0]
            done = min(chunk, job.left)
            job.left -= done
            chunk -= done
            if job.left:
                break
            self.prefilling.popleft()
            job.ttft = now - job.at
            if job.output > 1:
                heappush(self.decoding, (self.steps + job.output - 1, id(job), job))
            else:
                ended.append(job)
        for job in ended:
            self.owned -= len(job.prompt) + job.output
        return ended

    def _admit(self) -> None:
        shape = self.shape
        while self.waiting and len(self.prefilling) + len(self.decoding) < shape.rows:
            need = len(self.waiting[0].prompt) + self.waiting[0].output
            if self.owned and self.owned + need > shape.cache:
                return
            job = self.waiting.popleft()
            self.owned += need
            # At least one token is computed. What those ahead compute is there by then: prompts go in order.
            job.cached = min(self._find(job.prompt), len(job.prompt) - 1)
            job.left = len(job.prompt) - job.cached
            self._keep(job)
            self.prefilling.append(job)

    def _find(self, prompt: Spans) -> int:
        found = 0
        for text, length in prompt.spans:
            has = min(self.cache.get(text, 0), length)
            found += has
            if has < length:
                break
        return found

    def _keep(self, job: Job) -> None:
        last = len(job.prompt.spans) - 1
        for i, (text, length) in enumerate(job.prompt.spans):
            has = self.cache.get(text, 0)
            new = max(has, length + (job.output if i == last else 0))
            self.cached_tokens += new - has
            self.cache[text] = new
        for text, _ in reversed(job.prompt.spans):  # the shared beginning is the most recent
            self.cache.move_to_end(text)
        while self.cached_tokens > self.shape.cache and len(self.cache) > 1:
            self.cached_tokens -= self.cache.popitem(last=False)[1]


class Traffic:
    """Requests of three kinds in an open loop, the same for every policy.

    agents: a shared prompt of 2 to 6 thousand tokens and a context that grows with each turn, one turn in
    twenty tried four times at once; chats: lengths of recorded conversations, several turns; bursts:
    lengths of recorded code completions, nothing shared, Gamma distributed gaps.
    """

    def __init__(self, replicas: int, seconds: float, rate: float, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._text = 0
        self.jobs: list[Job] = []
        scale = 0.5 * rate * replicas
        self._sessions(self._apps(8, 2048, 6144), 0.30 * scale, seconds, "agent")
        self._sessions(self._apps(2, 256, 512), 0.60 * scale, seconds, "chat")
        prompts, outputs = Lengths("azure-2023-code").draw(
            self._rng, len(times := gamma(self._rng, 1.5 * scale, seconds)), 16_384
        )
        for at, prompt, output in zip(times, prompts, outputs, strict=True):
            self._add(float(at), Spans([(self._new(), int(prompt))]), int(output), "burst")
        self.jobs.sort(key=lambda job: job.at)

    def _new(self) -> int:
        self._text += 1
        return self._text

    def _apps(self, n: int, shortest: int, longest: int) -> list[tuple[int, int]]:
        return [(self._new(), int(self._rng.integers(shortest, longest)) // 64 * 64) for _ in range(n)]

    def _add(self, at: float, prompt: Spans, output: int, kind: str) -> None:
        self.jobs.append(Job(at, prompt, max(output, 1), kind))

    def _sessions(self, apps: list[tuple[int, int]], rate: float, seconds: float, kind: str) -> None:
        rng = self._rng
        lengths = Lengths("azure-2023-conversation")
        weights = 1 / np.arange(1, len(apps) + 1)
        # Sessions that began before the first second are met in their midst, or none would be long.
        for begin in poisson(rng, rate, seconds + 30) - 30:
            shared, own = apps[rng.choice(len(apps), p=weights / weights.sum())], self._new()
            turns = int(rng.geometric(0.12 if kind == "agent" else 0.25))
            at, context = float(begin), 0
            for _ in range(turns):
                if kind == "agent":
                    new, output = int(rng.lognormal(6.2, 0.8)), int(rng.exponential(120)) + 8
                    pause = float(rng.exponential(1.5)) + 0.5
                else:
                    prompts, outputs = lengths.draw(rng, 1, 8192)
                    new, output = max(int(prompts[0]) // 3, 8), int(outputs[0])
                    pause = float(rng.exponential(8)) + 2
                context += new
                if at >= 0:
                    tries = 4 if kind == "agent" and rng.random() < 0.05 else 1
                    for _ in range(tries):
                        self._add(at, Spans([shared, (own, context)]), output, kind)
                context += output
                at += pause + output * 0.03
                if at >= seconds or context > 24_000:
                    break
