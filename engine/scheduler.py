"""What runs next: admission, chunked prefill, decode, preemption, and what a result means.

The scheduler plans step N+1 while step N is in flight, so it plans with tokens it does not know
yet: `known` counts the tokens of a request whose ids have arrived, `in_flight` those still to
come. Everything that depends on lengths alone is decided without waiting for them.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.admission import check_request, token_limit
from engine.grammar import Grammars, matched
from engine.kv_cache import CacheCounts, KVCache
from engine.plan import SCRATCH_ROW, StepPlan, StepResult
from engine.planning import make_plan
from engine.queue import OUTPUT_WEIGHT, Deadlines, WaitingQueue
from engine.request import FinishReason, Output, Request, State
from engine.rows import Int32s, Rows


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What `commit` must remember of a launched plan. All lists and arrays have length S."""

    step: int
    requests: list[Request]
    rows: Int32s
    generations: npt.NDArray[np.int64]
    ends: Int32s
    """Positions computed once the step is through."""
    samples: npt.NDArray[np.bool_]
    constrained: Int32s
    """Places of those with grammars."""


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed, recomputation after preemption included."""
    cached_tokens: int = 0
    """Tokens found in the prefix cache at an admission, and not computed."""
    output_tokens: int = 0
    wasted_tokens: int = 0
    """Sampled for requests that had ended meanwhile, and dropped."""
    preemptions: int = 0
    admitted: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    queue_times: deque[float] = field(default_factory=lambda: deque(maxlen=10_000))
    """Seconds that requests waited for their first row, until somebody takes them out."""


class Scheduler:
    """Requests in, plans out, results back. Called from one thread only."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        context_length: int,
        max_running_requests: int,
        max_tokens_per_step: int,
        prefix_caching: bool = True,
        identity: bytes = b"",
        grammars: Grammars | None = None,
    ) -> None:
        self.cache = KVCache(num_blocks, block_size, prefix_caching=prefix_caching, identity=identity)
        self.block_size = block_size
        # A request that could outgrow the whole cache would be preempted for ever.
        self.context_length = min(context_length, self.cache.total * block_size)
        self.max_tokens_per_step = max_tokens_per_step
        self.rows = Rows(max_running_requests, -(-self.context_length // block_size), block_size)
        self.grammars = grammars or Grammars()
        self.running: list[Request] = []  # sorted by Request.order
        self.waiting = WaitingQueue()
        self._deadlines = Deadlines()
        self._blocked: tuple[Request, int] | None = None  # who found no room, and after which release
        self.counters = SchedulerCounters()
        self._in_flight: deque[_InFlight] = deque()
        self._steps = 0

    # Requests

    def check_request(self, request: Request) -> None:
        """Raise `RequestError` naming the field for a request that can never be served."""
        check_request(request, self.context_length)

    def follow(self, request: Request) -> None:
        """Begin with its grammar, if it has one. Raises `RequestError` naming the field."""
        if request.matcher is None:
            request.matcher = self.grammars.start(request)

    def add(self, request: Request) -> None:
        """Accept a request. Raises `RequestError` if it can never run."""
        self.check_request(request)
        self.follow(request)
        request.limit = token_limit(request, self.context_length)
        n, known = len(request.prompt), len(request.prompt) + len(request.generated)
        request.num_tokens = known
        request.tokens = np.empty(request.limit, np.int32)
        request.tokens[:n], request.tokens[n:known] = request.prompt, request.generated
        self.waiting.add(request)
        self._deadlines.add(request)
        self.counters.admitted += 1

    def abort(
        self, request: Request, reason: FinishReason = FinishReason.ABORT, error: str | None = None
    ) -> Output | None:
        """End a request at once; None if it had ended. Its tokens in flight will be dropped."""
        if request.state is State.FINISHED:
            return None
        return self._finish(request, reason, error=error)

    def expire(self, now: float) -> list[Output]:
        """End the requests whose time is over at `now`, in seconds of `time.monotonic`."""
        return [
            self._finish(
                request, FinishReason.TIMEOUT, f"it ended after {getattr(request, field):g} s, its {field}"
            )
            for request, field in self._deadlines.due(now)
        ]

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of running and waiting requests that no step has computed; one that decodes has none."""
        rows = self.rows
        rest = rows.known - rows.scheduled
        return self.waiting.num_tokens + int(rest[rest > 1].sum())

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._in_flight)

    # Planning

    def schedule(self) -> StepPlan | None:
        """Plan the next step: every running request decodes, prompt chunks take the rest.

        None if there is nothing to compute (all tokens up to the limits are in flight, say).
        """
        decodes = self._grow_decodes()
        generations = self.rows.generation[decodes]
        chunks = self._choose_chunks(self.max_tokens_per_step - len(decodes))
        decodes = decodes[self.rows.generation[decodes] == generations]  # some made room for urgent ones
        if not len(decodes) and not chunks:
            return None
        rows: Int32s = np.concatenate([decodes, np.array([row for row, _ in chunks], np.int32)])
        lengths = np.ones(len(rows), np.int32)
        lengths[len(decodes) :] = [tokens for _, tokens in chunks]
        return self._launched(make_plan(self._steps, self.rows, rows, lengths, len(decodes)), rows)

    def _grow_decodes(self) -> Int32s:
        """Rows with one token to compute, each given the block it writes to."""
        r = self.rows
        while True:
            order = np.array([request.row for request in self.running], np.int32)
            total = r.known[order] + r.in_flight[order]
            # Ends by length are known in advance: nothing is computed past them.
            rows: Int32s = order[(total - r.scheduled[order] == 1) & (total < r.limit[order])]
            full = rows[r.scheduled[rows] == r.num_blocks[rows] * self.block_size]
            if len(full) <= self.cache.available:
                r.append_block_each(full, self.cache.allocate(len(full)))
                return rows
            self._preempt(self.running[-1])  # and choose again

    def _preempt(self, request: Request) -> None:
        """Take row and blocks from a running request; it will be computed again.

        Its tokens in flight stay valid: the steps that sample them were launched before anything
        that could reuse its blocks. They are taken at commit, and it waits for them.
        """
        request.late = int(self.rows.in_flight[request.row])
        self._give_back(request)
        request.state = State.WAITING
        self.waiting.add(request)
        self.counters.preemptions += 1

    def _choose_chunks(self, budget: int) -> list[tuple[int, int]]:
        """(row, tokens) of the prompts to go on with or to begin, the lowest priority number first."""
        r = self.rows
        order = np.array([request.row for request in self.running], np.int32)
        unfinished = np.flatnonzero(r.known[order] - r.scheduled[order] > 1)
        started = deque(self.running[i] for i in unfinished.tolist())
        chunks: list[tuple[int, int]] = []
        room = True
        while budget > 0:
            waiting = self.waiting.first if room else None
            if started and (waiting is None or started[0].priority <= waiting.priority):
                request = started.popleft()
                if request.state is not State.RUNNING:
                    # It made room for an urgent one. Nobody does who has a chunk already: along this loop
                    # the priority number only grows.
                    continue
            elif waiting is None:
                break
            elif not self._admit(waiting):
                room = False  # nobody overtakes: whoever needs much would wait for ever
                continue
            else:
                request = waiting
            row = request.row
            tokens = min(int(r.known[row] - r.scheduled[row]), budget)
            chunks.append((row, tokens))
            budget -= tokens
            # Whoever comes next may share these blocks: it reads them in this step at the earliest,
            # and each layer of a step writes all keys and values before it reads any.
            self._register(request, (int(r.scheduled[row]) + tokens) // self.block_size)
        return chunks

    def _admit(self, request: Request) -> bool:
        """Give the first waiting request a row and blocks for all its tokens. False if there is no room."""
        if request.late or not (self.rows.num_free or self.running[-1].priority > request.priority):
            return False
        if self._blocked == (request, self.cache.releases):
            return False  # as before: looking at all blocks of a long prompt in each step would take long
        size, known = self.block_size, request.num_tokens
        # At least one token must be computed, or there would be nothing to sample from.
        sharable = (known - 1) // size
        # No further than to the first that is not there: of a long prompt each step does its own part.
        chain = self.cache.chain(request.hashes, request.tokens, sharable, request.cache_salt)
        shared = self.cache.match(chain)
        needed = -(-known // size) - len(shared)
        if not self._make_room(request, needed, shared):
            self._blocked = request, self.cache.releases
            return False
        self.cache.share(shared)
        blocks = shared + self.cache.allocate(needed)
        self.waiting.take(request)
        row = self.rows.take(request, blocks, len(shared) * size)
        self.rows.registered[row] = len(shared)
        request.state = State.RUNNING
        insort(self.running, request, key=lambda r: r.order)
        self.counters.cached_tokens += len(shared) * size
        if not request.admissions:
            self.counters.queue_times.append(time.monotonic() - request.arrived)
            request.num_cached = min(len(shared) * size, request.num_prompt)
            request.account.served += known - len(shared) * size
        request.admissions += 1
        return True

    def _make_room(self, request: Request, needed: int, shared: list[int]) -> bool:
        """Whether there are a row and `needed` blocks beside the `shared` ones.

        If not, the newest of those that are less urgent than the request lose theirs, provided that
        it helps. They can never do the same to it, so this comes to an end.
        """

        def missing(staying: int) -> int:
            # Beside others leave room to grow, or the newcomer would be preempted at once.
            reserve = min(staying, self.cache.total // 100 + 1)
            return needed + reserve + self.cache.count_cached(shared) - self.cache.available

        if self.rows.num_free and missing(len(self.running)) <= 0:
            return True
        victims = [each for each in self.running if each.priority > request.priority]
        short = missing(len(self.running) - len(victims))
        if not victims or short > int(self.rows.num_blocks[[each.row for each in victims]].sum()):
            return False  # most times; what several of them share, which takes long to find, makes it less
        if short > self.cache.count_freed((self.rows.owned_blocks(each.row) for each in victims), shared):
            return False
        while not (self.rows.num_free and missing(len(self.running)) <= 0):
            self._preempt(victims.pop())
        return True

    def _launched(self, plan: StepPlan, rows: Int32s) -> StepPlan:
        """Take it that the step will be computed."""
        r, ends, lengths = self.rows, plan.sequences["context_len"], plan.sequences["query_len"]
        samples = plan.sequences["row"] != SCRATCH_ROW
        r.scheduled[rows] = ends
        r.uncounted[rows] = False
        r.in_flight[rows[samples]] += 1
        self._steps += 1
        self.counters.steps += 1
        self.counters.prompt_tokens += int(lengths[plan.num_decodes :].sum())
        requests = [r.requests[row] for row in rows.tolist()]
        self._in_flight.append(
            _InFlight(plan.step, requests, rows, r.generation[rows], ends, samples, plan.constrained)
        )
        return plan

    def masks(self) -> npt.NDArray[np.int32]:
        """What `constrained` sequences of the last plan may sample; all steps before are committed."""
        step = self._in_flight[-1]
        return self.grammars.masks([step.requests[i].matcher for i in step.constrained.tolist()])

    # Results

    def commit(self, result: StepResult) -> list[Output]:
        """Take the result of the oldest step in flight. Returns what it brought, request by request."""
        step = self._in_flight.popleft()
        if step.step != result.step or len(result.tokens) != len(step.rows):
            raise ValueError(f"result of step {result.step} where step {step.step} was due")
        r = self.rows
        alive = r.generation[step.rows] == step.generations
        took = alive & step.samples
        rows, tokens = step.rows[took], result.tokens[took]
        r.known[rows] += 1
        r.in_flight[rows] -= 1
        r.last_token[rows] = tokens
        outputs: list[Output] = []
        for i, token in zip(np.flatnonzero(took).tolist(), tokens.tolist(), strict=True):
            outputs.append(self._append(step.requests[i], token))
        for i in np.flatnonzero(step.samples & ~alive).tolist():
            request = step.requests[i]
            if request.state is State.WAITING and request.late:  # preempted meanwhile
                request.late -= 1
                self.waiting.num_tokens += 1
                outputs.append(self._append(request, int(result.tokens[i])))
            else:
                self.counters.wasted_tokens += 1
        self.counters.output_tokens += len(outputs)
        if len(step.constrained):
            outputs = [matched(output) for output in outputs]
        # Tokens whose ids were not known when their positions were planned are part of a prefix now.
        rows, full = step.rows[alive], step.ends[alive] // self.block_size
        due = full > r.registered[rows]
        for row, n in zip(rows[due].tolist(), full[due].tolist(), strict=True):
            self._register(r.requests[row], n)
        for output in outputs:
            if output.finish_reason is not None:
                self._release(output.request, output.finish_reason)
        return outputs if result.scores is None else result.scores.told(outputs, step.requests)

    def _append(self, request: Request, token: int) -> Output:
        n, sampling = request.num_tokens, request.sampling
        request.tokens[n] = token
        request.num_tokens = n + 1
        request.account.served += OUTPUT_WEIGHT
        reason = None
        if token in sampling.stop_token_ids and not sampling.ignore_eos:
            reason = FinishReason.STOP
        elif n + 1 == request.limit:
            reason = FinishReason.LENGTH
        return Output(request, n - len(request.prompt), (token,), reason)

    def _register(self, request: Request, full: int) -> None:
        """Offer the first `full` blocks of a running request to the prefix cache: they are planned."""
        row = request.row
        first = int(self.rows.registered[row])
        if full <= first or not self.cache.prefix_caching:
            return
        self.cache.extend_hashes(request.hashes, request.tokens, full, request.cache_salt)
        for i in range(first, full):
            self.cache.register(int(self.rows.blocks[row, i]), request.hashes[i])
        self.rows.registered[row] = full

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        self._release(request, reason)
        return Output(request, request.num_output, (), reason, error)

    def _release(self, request: Request, reason: FinishReason) -> None:
        if request.state is State.RUNNING:
            self._give_back(request)
        else:
            self.waiting.remove(request)
        request.state = State.FINISHED
        request.finish_reason = reason
        self.counters.finished[reason] += 1

    def _give_back(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(self.rows.release(request.row))

    # Integrity

    def counts(self) -> CacheCounts:
        return self.cache.counts()

    def check(self) -> None:
        """Raise `AssertionError` unless rows, blocks and lists agree."""
        r = self.rows
        owned = [r.owned_blocks(request.row) for request in self.running]
        self.cache.check(owned)
        assert all(r.requests[request.row] is request for request in self.running)
        assert r.num_free + len(self.running) == r.capacity, "a row is lost"
        assert all(request.row == 0 for request in self.waiting), "a waiting request has a row"
        assert self.waiting.num_tokens == sum(request.num_tokens for request in self.waiting)
        assert len(self.waiting) == sum(1 for _ in self.waiting)
        rest = [r.known[q.row] - r.scheduled[q.row] for q in self.running]
        assert self.prefill_tokens == self.waiting.num_tokens + sum(n for n in rest if n > 1)
        live = [request.row for request in self.running]
        assert (r.in_flight[live] >= 0).all()
        assert (r.known[live] + r.in_flight[live] <= r.limit[live]).all(), "computed past a limit"
        assert all(r.known[q.row] == q.num_tokens for q in self.running), "row and request disagree"
