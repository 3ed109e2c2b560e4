"""Policies that `benchmarks/routing_sim.py` compares: ours as it is deployed, Ray Serve's by their rules.

The rules of Ray's are those of ray 2.60, read in `ray/serve/_private/request_router/` and in
`ray/llm/_internal/serve/routing_policies/prefix_aware/`; its prefix tree is Ray's own code.
"""

from __future__ import annotations

import random

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

from benchmarks.routing_engines import Engine, Job
from deployments.balancer import Balancer
from deployments.load import Load
from deployments.prefix_index import chain_of

Now = list[float]
"""The simulated time, in seconds, in a list of one."""


class RoundRobin:
    def __init__(self, engines: list[Engine], now: Now, seed: int) -> None:
        self._next = seed % len(engines)
        self._n = len(engines)

    def choose(self, job: Job) -> int:
        self._next = (self._next + 1) % self._n
        return self._next

    def accepted(self, job: Job, engine: int) -> None:
        pass

    def finished(self, job: Job, engine: int) -> None:
        pass

    def observe(self, engine: int, load: Load) -> None:
        pass

    def learn(self, engine: int, job: Job, load: Load) -> None:
        pass


class PowerOfTwo(RoundRobin):
    """Serve's default: of two replicas at random, the one with fewer ongoing requests.

    What a Router knows of that is what the replica said with the last request it took, plus what
    this Router sent and minus what ended since; after 10 s without any news it asks.
    """

    TIMEOUT = 10.0

    def __init__(self, engines: list[Engine], now: Now, seed: int) -> None:
        super().__init__(engines, now, seed)
        self._engines = engines
        self._now = now
        self._rng = random.Random(seed)
        self._known: dict[int, tuple[int, float]] = {}

    def choose(self, job: Job) -> int:
        return self._shortest(self._rng.sample(range(self._n), min(2, self._n)))

    def _length(self, engine: int) -> int:
        known = self._known.get(engine)
        if known is None or self._now[0] - known[1] > self.TIMEOUT:
            known = self._known[engine] = self._engines[engine].ongoing, self._now[0]
        return known[0]

    def _shortest(self, candidates: list[int]) -> int:
        chosen = min(candidates, key=self._length)
        self._known[chosen] = self._length(chosen) + 1, self._now[0]
        return chosen

    def accepted(self, job: Job, engine: int) -> None:
        self._known[engine] = self._engines[engine].ongoing, self._now[0]

    def finished(self, job: Job, engine: int) -> None:
        self._known[engine] = max(self._length(engine) - 1, 0), self._now[0]


class PrefixAware(PowerOfTwo):
    """Serve LLM's router: where queues differ by no more than `threshold`, the longest matching prefix.

    Where less than a tenth of the text matches, the replicas whose part of the tree is smallest; of
    several candidates the one with the shortest queue. All Routers share one tree.
    """

    MATCH = 0.1
    threshold = float("inf")

    def __init__(self, engines: list[Engine], now: Now, seed: int, tree: PrefixTree | None = None) -> None:
        super().__init__(engines, now, seed)
        self._tree = tree or PrefixTree()
        self._names = [engine.name for engine in engines]
        self._index = {name: i for i, name in enumerate(self._names)}
        if tree is None:
            self._tree.add_tenants(self._names, 0.0)

    def share(self, engines: list[Engine], now: Now, seed: int) -> PrefixAware:
        return type(self)(engines, now, seed, self._tree)

    def choose(self, job: Job) -> int:
        lengths = [self._length(i) for i in range(self._n)]
        if max(lengths) - min(lengths) > self.threshold:
            return super().choose(job)
        text = job.prompt.text()
        matched, tenants = self._tree.prefix_match(text, self._names)
        if len(matched) < self.MATCH * len(text):
            tenants = self._tree.get_smallest_tenants()
        return self._shortest([self._index[name] for name in tenants or self._names])

    def accepted(self, job: Job, engine: int) -> None:
        super().accepted(job, engine)
        self._tree.insert(job.prompt.text(), self._names[engine], self._now[0])


class PrefixAware10(PrefixAware):
    threshold = 10.0


class Ours(RoundRobin):
    """`deployments/balancer.py`."""

    def __init__(self, engines: list[Engine], now: Now, seed: int) -> None:
        super().__init__(engines, now, seed)
        self._names = [engine.name for engine in engines]
        self._index = {name: i for i, name in enumerate(self._names)}
        self.balancer = Balancer(clock=lambda: now[0], rng=random.Random(seed))
        self.balancer.set_replicas(self._names)

    def choose(self, job: Job) -> int:
        return self._index[self.balancer.place(id(job), len(job.prompt), chain_of(job.prompt))]

    def accepted(self, job: Job, engine: int) -> None:
        self.balancer.accepted(id(job), self._names[engine])

    def finished(self, job: Job, engine: int) -> None:
        self.balancer.finished(id(job))

    def observe(self, engine: int, load: Load) -> None:
        self.balancer.observe(self._names[engine], load)

    def learn(self, engine: int, job: Job, load: Load) -> None:
        self.balancer.observe(self._names[engine], load, [chain_of(job.prompt)])


POLICIES: dict[str, type[RoundRobin]] = {
    "round robin": RoundRobin,
    "power of two (Serve's default)": PowerOfTwo,
    "prefix-aware (Serve LLM)": PrefixAware,
    "prefix-aware, threshold 10": PrefixAware10,
    "ours": Ours,
}
