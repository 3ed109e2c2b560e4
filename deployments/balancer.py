"""Which replica a request goes to: the one that has the least to compute before it answers.

A replica's score for a request is the tokens of its prompt that the replica would have to compute,
plus a share of the work it has already, in tokens as well. What a replica has to do comes with each
frame of its tape (`deployments/load.py`); what this Router sent since is added to it. Nothing here
knows of Ray, so `benchmarks/routing_sim.py` simulates this very code.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.load import Load
from deployments.prefix_index import PrefixIndex

Tokens: TypeAlias = npt.NDArray[np.float64]
"""One number of tokens for each replica."""

LOAD_WEIGHT = 0.5
"""What a token of work that a replica has already counts against a token of this prompt.

Below 1, since a prefix found saves work for everybody, waiting elsewhere costs one request only.
"""

DECODE_COST = 64
"""Tokens of prompt that a request which is being answered is worth: its decode shares the steps."""

SLACK = 512
"""Scores no further apart than this many tokens are as good: what Routers know is a step old."""

SETTLE = 0.02
"""Seconds from a request's arrival on a replica until a frame is sure to count it."""

STALE = 10.0
"""Seconds after which the word of a replica that sends no frames is worth nothing."""

SILENT = 2.0
"""Seconds without a frame of the next step, where one was to come, after which a replica seems to hang."""

SUSPECTED = 60.0
"""Seconds for which it seems so. Ray Serve ends one that hangs sooner; a frame may be lost with its tape."""

AVOIDED = 1e12
"""Tokens; more than any replica has to do."""

SESSIONS = 1 << 16
"""Sessions whose replica is remembered, the oldest forgotten first."""


def choose(uncached: Tokens, load: Tokens, rng: random.Random) -> int:
    """The replica with the fewest tokens between a request and its first one.

    `uncached` is what each replica would compute of this prompt, `load` what it has to do already.
    Among replicas that are as good as the best, and have cached as much, it is the less loaded of two
    taken at random, so that Routers which know the same do not all go to the same one.
    """
    score = uncached + LOAD_WEIGHT * load
    best = score.argmin()
    equals = np.flatnonzero((score <= score[best] + SLACK) & (uncached == uncached[best]))
    if len(equals) == 1:
        return int(best)
    first = int(rng.random() * len(equals))
    second = (first + 1 + int(rng.random() * (len(equals) - 1))) % len(equals)
    one, other = int(equals[first]), int(equals[second])
    return one if load[one] <= load[other] else other


@dataclass(slots=True)
class _Placement:
    replica: str
    tokens: float
    placed: float
    accepted: float | None = None


class Balancer:
    """All that one Router knows of the replicas of one deployment. Safe to use from several threads."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        capacity: int = 1 << 17,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._rng = rng or random.Random()
        self._index = PrefixIndex(capacity)
        self._slots: dict[str, int] = {}
        self._names: list[str | None] = []
        self._unseen: dict[str, dict[Hashable, _Placement]] = {}  # not yet in what their replica reports
        self._placements: dict[Hashable, _Placement] = {}
        self._homes: dict[str, str] = {}  # of sessions; computed again where forgotten
        self._followers: list[Callable[[frozenset[str]], object]] = []
        self.on_choice: Callable[[str, float, float], object] = lambda reason, tokens, seconds: None
        """Called, on any thread, with what decided, the tokens before the first one, and the seconds."""
        self._reported = self._drain = self._stamp = self._sent = self._due = np.zeros(0)

    # Replicas

    def set_replicas(self, names: Iterable[str]) -> None:
        """These replicas take requests, and no others."""
        wanted = frozenset(names)
        with self._lock:
            before = self._slots.keys() | ()
            self._remove([name for name in self._slots if name not in wanted])
            for name in wanted - before:
                self._add(name)
            if wanted != before:
                self._homes.clear()
        if wanted != before:
            for callback in self._followers:
                callback(wanted)

    def on_replicas(self, callback: Callable[[frozenset[str]], object]) -> None:
        """Call back with the names of those that take requests, whenever they are others than before.

        One that is gone may still finish what it has: Ray Serve removes it from here before it stops
        it. The callback runs on whatever thread Serve's own router has; hop to yours.
        """
        self._followers.append(callback)

    def _remove(self, names: list[str]) -> None:
        bits = 0
        for name in names:
            slot = self._slots.pop(name)
            bits |= 1 << slot
            self._names[slot] = None
            self._reported[slot], self._sent[slot] = 0.0, np.inf
            del self._unseen[name]
        if bits:
            self._index.forget(bits)

    def _add(self, name: str) -> None:
        if None not in self._names:
            self._names.append(None)
            self._reported, self._drain, self._stamp, self._sent, self._due = (
                np.append(array, 0.0)
                for array in (self._reported, self._drain, self._stamp, self._sent, self._due)
            )
        slot = self._names.index(None)
        self._names[slot] = name
        self._slots[name] = slot
        self._unseen[name] = {}
        self._reported[slot] = self._drain[slot] = self._stamp[slot] = self._sent[slot] = 0.0
        self._due[slot] = np.inf

    # Requests

    def place(
        self,
        key: Hashable,
        tokens: int,
        prefix: Sequence[int] = (),
        *,
        session: str = "",
        avoid: Iterable[str] = (),
    ) -> str:
        """The replica for a request, which counts as sent there from now on.

        `key` names the request here, `tokens` are to be computed before it decodes, `prefix` are their
        hashes (`chain_of`). All requests of a `session`, if it has a name, go to one replica, the same from
        all Routers, as if it had all their tokens, unless it has much more to do than others. Replicas to
        `avoid`, and those that seem to hang, are chosen only where there is no other. Raises `LookupError`
        if there is no replica.
        """
        began = self._clock()
        with self._lock:
            if not self._slots:
                raise LookupError("no replica")
            self._forget(began)
            home = self._home(session) if session else None
            load = self._load()
            found = self._index.match(prefix)
            uncached = np.empty_like(load)
            uncached.fill(tokens)
            for bits, n in found:
                uncached -= n * _ones(bits, len(load))
            if home is not None:
                uncached[self._slots[home]] = 0
            uncached[(self._due < began) & (began < self._due + SUSPECTED)] += AVOIDED / 2
            for name in avoid:
                if (slot := self._slots.get(name)) is not None:
                    uncached[slot] += AVOIDED
            slot = choose(uncached, load, self._rng)
            chosen = self._names[slot]
            assert chosen is not None
            cached = next((n for bits, n in found if bits >> slot & 1), 0)
            self._index.add(prefix, slot)
            self._assign(key, chosen, tokens - cached + DECODE_COST)
            reason = "affinity" if chosen == home else "prefix" if cached else "load"
            reason = "only" if len(self._slots) == 1 else reason
        self.on_choice(reason, tokens - cached + float(load[slot]), self._clock() - began)
        return chosen

    def accepted(self, key: Hashable, name: str) -> None:
        """A request has arrived on this replica, which need not be the one that was chosen."""
        with self._lock:
            placement = self._placements.get(key)
            if placement is None:
                return
            if placement.replica != name and name in self._slots:
                self._assign(key, name, placement.tokens)
            self._placements[key].accepted = self._clock()

    def finished(self, key: Hashable) -> None:
        """A request has ended, in whatever way."""
        with self._lock:
            if placement := self._placements.pop(key, None):
                self._settle(key, placement)

    def observe(
        self, name: str, load: Load, prefixes: Iterable[Sequence[int]] = (), goes_on: bool | None = False
    ) -> None:
        """A replica has said what it has to do, and the chains of prompts that other Routers have sent it;
        if it `goes_on`, it will say so again after its next step; None: no step has been heard of."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is None:
                return
            now = self._clock()
            self._forget(now)
            tokens = load.prefill_tokens + DECODE_COST * (load.running + load.waiting)
            self._reported[slot] = tokens
            self._drain[slot] = max(load.tokens_per_s, tokens / STALE)
            self._stamp[slot] = now
            if goes_on is not None:
                self._due[slot] = now + SILENT if goes_on else np.inf
            for prefix in prefixes:
                self._index.add(prefix, slot)
            if unseen := self._unseen[name]:
                for key, placement in list(unseen.items()):
                    if placement.accepted is not None and now - placement.accepted >= SETTLE:
                        self._settle(key, placement)

    def loads(self) -> dict[str, float]:
        """Tokens that each replica is thought to have to do."""
        with self._lock:
            load = self._load()
            return {name: float(load[slot]) for name, slot in self._slots.items()}

    def _home(self, session: str) -> str:
        """Rendezvous hashing: Routers agree without a word, and a replica that comes or goes moves few."""
        if session not in self._homes:
            if len(self._homes) >= SESSIONS:
                del self._homes[next(iter(self._homes))]
            self._homes[session] = max(
                self._slots, key=lambda name: blake2b((session + name).encode(), digest_size=8).digest()
            )
        return self._homes[session]

    def _assign(self, key: Hashable, name: str, tokens: float) -> None:
        if earlier := self._placements.get(key):
            self._settle(key, earlier)
        placement = self._placements[key] = self._unseen[name][key] = _Placement(name, tokens, self._clock())
        self._sent[self._slots[name]] += placement.tokens

    def _forget(self, now: float) -> None:
        """The oldest on each replica, if it was placed after it had ended, since Ray Serve heard too late of
        its cancellation, and so never arrives."""
        for unseen in self._unseen.values():
            if unseen:
                key, placement = next(iter(unseen.items()))
                if placement.accepted is None and now - placement.placed >= STALE:
                    self._settle(key, self._placements.pop(key))

    def _settle(self, key: Hashable, placement: _Placement) -> None:
        """From now on, what the replica reports says all about it."""
        if self._unseen.get(placement.replica, {}).pop(key, None) is not None:
            self._sent[self._slots[placement.replica]] -= placement.tokens

    def _load(self) -> Tokens:
        """Of each slot; infinite where no replica is. A replica that is silent works on, unseen."""
        load = self._clock() - self._stamp
        load *= -self._drain
        load += self._reported
        np.maximum(load, 0, out=load)
        load += self._sent
        return load


def _ones(bits: int, length: int) -> npt.NDArray[np.float32]:
    """`bits`, the lowest first, as numbers."""
    packed = np.frombuffer(bits.to_bytes(length // 8 + 1, "little"), np.uint8)
    return np.unpackbits(packed, count=length, bitorder="little").view(np.bool_).astype(np.float32)


_balancers: dict[Hashable, Balancer] = {}


def balancer_of(deployment: Hashable) -> Balancer:
    """The `Balancer` that this process uses for a deployment; a handle's `deployment_id` names it."""
    return _balancers.setdefault(deployment, Balancer())
