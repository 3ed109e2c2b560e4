"""Who waits, and who is next: by priority, then fairly among clients, then by arrival.

Among the clients of one priority the next is the one that has had the fewest tokens. A client that
comes (back) to the queue starts where those who wait are, so nobody saves up turns by being idle:
the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
Every operation takes O(log n) steps of Python, beside a memmove in the list of one client.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from engine.account import Account
from engine.request import Request, State

OUTPUT_WEIGHT = 2
"""An output token counts as this many prompt tokens, as in the paper: on an H200 an 8B model computes
a prompt token in 20 µs, and an output token among 256 requests in 47 µs."""


def _arrival(request: Request) -> int:
    return request.arrival


def _remove(requests: list[Request], request: Request) -> None:
    """From a list sorted by arrival. Raises `ValueError` if it is not there."""
    i = bisect_left(requests, request.arrival, key=_arrival)
    if i == len(requests) or requests[i] is not request:
        raise ValueError(f"request {request.id} does not wait")
    del requests[i]


@dataclass(slots=True)
class _Class:
    """The waiting requests of one priority."""

    accounts: dict[str, Account] = field(default_factory=dict)
    turns: list[tuple[int, int, Account]] = field(default_factory=list)
    """Heap with one entry for each account that waits, and some that no longer do: (tokens served, as
    far as was known when the entry was made; arrival of its first request; account)."""
    returning: list[Request] = field(default_factory=list)
    """Preempted ones, by arrival. They go first: their clients are reading already."""
    size: int = 0
    served: int = 0
    """What the account that was chosen last had had: nobody who waits has had less."""
    sweep_at: int = 64

    def first(self) -> Request:
        if self.returning:
            return self.returning[0]
        while True:
            served, _, account = self.turns[0]
            if not account.waiting:
                heappop(self.turns)
                account.queued = False
            elif served < account.served:  # it was served since; others may be before it now
                heapreplace(self.turns, (account.served, account.waiting[0].arrival, account))
            else:
                return account.waiting[0]

    def add(self, request: Request) -> None:
        self.size += 1
        if request.admissions:
            insort(self.returning, request, key=_arrival)
            return
        account = request.account = self._account(request.client)
        if not account.waiting:
            account.served = max(account.served, self.served)
        insort(account.waiting, request, key=_arrival)
        if not account.queued:
            heappush(self.turns, (account.served, account.waiting[0].arrival, account))
            account.queued = True

    def _account(self, client: str) -> Account:
        if client not in self.accounts:
            if len(self.accounts) >= self.sweep_at:
                # Those that would start at `self.served` again anyway need not be remembered.
                self.accounts = {
                    name: each
                    for name, each in self.accounts.items()
                    if each.waiting or each.served > self.served
                }
                self.sweep_at = 2 * len(self.accounts) + 64
            self.accounts[client] = Account()
        return self.accounts[client]

    def remove(self, request: Request) -> None:
        _remove(self.returning if request.admissions else request.account.waiting, request)
        self.size -= 1


class WaitingQueue:
    """Requests without a row: new ones, and preempted ones. A priority that nobody waits in is forgotten."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []  # sorted; those of `_classes`
        self._size = 0  # other threads ask for it, so nothing is iterated over
        self.num_tokens = 0
        """Known tokens of those who wait."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """In no order that matters."""
        for each in self._classes.values():
            yield from each.returning
            for account in each.accounts.values():
                yield from account.waiting

    @property
    def first(self) -> Request | None:
        """Who is next."""
        return self._classes[self._priorities[0]].first() if self._priorities else None

    def add(self, request: Request) -> None:
        if request.priority not in self._classes:
            self._classes[request.priority] = _Class()
            insort(self._priorities, request.priority)
        self._classes[request.priority].add(request)
        self._size += 1
        self.num_tokens += request.num_tokens

    def take(self, request: Request) -> None:
        """Remove `first` because its turn has come."""
        if not request.admissions:
            each = self._classes[request.priority]
            each.served = max(each.served, request.account.served)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Raises `ValueError` or `KeyError` if it does not wait."""
        each = self._classes[request.priority]
        each.remove(request)
        self._size -= 1
        self.num_tokens -= request.num_tokens
        if not each.size:
            del self._classes[request.priority]
            self._priorities.remove(request.priority)


class Deadlines:
    """Requests by the time at which they end unless they have ended, or been admitted, before."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, Request]] = []
        self._sweep_at = 64

    def add(self, request: Request) -> None:
        if len(self._heap) >= self._sweep_at:  # else what has ended long ago would be kept
            self._heap = [entry for entry in self._heap if self._counts(*entry[2:])]
            heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + 64
        for seconds, queue in ((request.timeout, False), (request.queue_timeout, True)):
            if seconds is not None:
                heappush(self._heap, (request.arrived + seconds, request.arrival, queue, request))

    def due(self, now: float) -> Iterator[tuple[Request, str]]:
        """Each request whose time is over by `now` (seconds of `time.monotonic`), and which field says so."""
        while self._heap and self._heap[0][0] <= now:
            _, _, queue, request = heappop(self._heap)
            if self._counts(queue, request):
                yield request, "queue_timeout" if queue else "timeout"

    @staticmethod
    def _counts(queue: bool, request: Request) -> bool:
        return request.state is not State.FINISHED and not (queue and request.admissions)
