"""What runs next: admission, chunked prefill, decode, preemption, and what a result means.

The scheduler plans step N+1 while step N is in flight, so it plans with tokens it does not know
yet: `known` counts the tokens of a request whose ids have arrived, `in_flight` those still to
come. Everything that depends on lengths alone is decided without waiting for them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.kv_cache import CacheCounts, KVCache
from engine.plan import SEQUENCE, TOKEN, StepPlan, StepResult
from engine.request import FinishReason, Output, Request, RequestError, State
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
    ) -> None:
        self.cache = KVCache(num_blocks, block_size, prefix_caching=prefix_caching, identity=identity)
        self.block_size = block_size
        # A request that could outgrow the whole cache would be preempted for ever.
        self.context_length = min(context_length, self.cache.total * block_size)
        self.max_tokens_per_step = max_tokens_per_step
        self.rows = Rows(max_running_requests, -(-self.context_length // block_size))
        self.running: list[Request] = []  # sorted by Request.order, like waiting
        self.waiting: list[Request] = []
        self.waiting_tokens = 0  # known tokens of those in `waiting`
        self.counters = SchedulerCounters()
        self._in_flight: deque[_InFlight] = deque()
        self._steps = 0

    # Requests

    def check_request(self, request: Request) -> None:
        """Raise `RequestError` naming the field for a request that can never be served."""
        sampling, n = request.sampling, request.num_prompt
        if request.num_tokens or request.state is not State.WAITING:
            raise RequestError("the request was submitted before; make a new one", "id")
        if not isinstance(request.priority, int):
            raise RequestError(f"priority must be an integer, got {request.priority!r}", "priority")
        if n == 0:
            raise RequestError("the prompt is empty", "prompt")
        if n >= self.context_length:
            raise RequestError(
                f"the prompt has {n} tokens; with one to generate, at most "
                f"{self.context_length - 1} fit into the context of {self.context_length}",
                "prompt",
            )
        if sampling.max_tokens is not None and n + sampling.max_tokens > self.context_length:
            raise RequestError(
                f"{n} prompt tokens and max_tokens {sampling.max_tokens} exceed the context length "
                f"of {self.context_length}",
                "max_tokens",
            )
        limit = self._limit(request)
        if n + len(request.generated) >= limit:
            raise RequestError("every token asked for was already generated", "generated")

    def _limit(self, request: Request) -> int:
        if request.sampling.max_tokens is None:
            return self.context_length
        return request.num_prompt + request.sampling.max_tokens

    def add(self, request: Request) -> None:
        """Accept a request. Raises `RequestError` if it can never run."""
        self.check_request(request)
        request.limit = self._limit(request)
        known = [*request.prompt, *request.generated]
        request.num_tokens = len(known)
        request.tokens = np.empty(request.limit, np.int32)
        request.tokens[: len(known)] = known
        insort(self.waiting, request, key=lambda r: r.order)
        self.waiting_tokens += request.num_tokens
        self.counters.admitted += 1

    def abort(
        self, request: Request, reason: FinishReason = FinishReason.ABORT, error: str | None = None
    ) -> Output | None:
        """End a request at once; None if it had ended. Its tokens in flight will be dropped."""
        if request.state is State.FINISHED:
            return None
        return self._finish(request, reason, error=error)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of running and waiting requests that no step has computed; one that decodes has none."""
        rows = self.rows
        rest = rows.known - rows.scheduled
        return self.waiting_tokens + int(rest[rest > 1].sum())

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
        chunks = self._choose_chunks(self.max_tokens_per_step - len(decodes))
        if not len(decodes) and not chunks:
            return None
        return self._make_plan(decodes, chunks)

    def _grow_decodes(self) -> Int32s:
        """Rows with one token to compute, each given the block it writes to."""
        r = self.rows
        while True:
            order = np.array([request.row for request in self.running], np.int32)
            total = r.known[order] + r.in_flight[order]
            # Ends by length are known in advance: nothing is computed past them.
            rows: Int32s = order[(total - r.scheduled[order] == 1) & (total < r.limit[order])]
            full = rows[r.scheduled[rows] == r.num_blocks[rows] * self.block_size]
            if all(self._grow(int(row)) for row in full):
                return rows

    def _grow(self, row: int) -> bool:
        """One more block for the row. False if somebody had to be preempted: choose again."""
        if self.cache.available:
            self.rows.append_blocks(row, self.cache.allocate(1))
            return True
        self._preempt(self.running[-1])
        return False

    def _preempt(self, request: Request) -> None:
        """Take row and blocks from a running request; it will be computed again.

        Its tokens in flight stay valid: the steps that sample them were launched before anything
        that could reuse its blocks. They are taken at commit, and it waits for them.
        """
        request.late = int(self.rows.in_flight[request.row])
        self._give_back(request)
        request.state = State.WAITING
        insort(self.waiting, request, key=lambda r: r.order)
        self.waiting_tokens += request.num_tokens
        self.counters.preemptions += 1

    def _choose_chunks(self, budget: int) -> list[tuple[int, int]]:
        """(row, tokens) of the prompts to go on with or to begin."""
        r = self.rows
        chunks: list[tuple[int, int]] = []
        for request in self.running:
            if budget <= 0:
                return chunks
            rest = int(r.known[request.row] - r.scheduled[request.row])
            if rest > 1:
                chunks.append((request.row, min(rest, budget)))
                budget -= chunks[-1][1]
        while budget > 0 and self.waiting and (row := self._admit(self.waiting[0])):
            rest = int(r.known[row] - r.scheduled[row])
            chunks.append((row, min(rest, budget)))
            budget -= chunks[-1][1]
        return chunks

    def _admit(self, request: Request) -> int | None:
        """Give the first waiting request a row and blocks for all its tokens; None if there is no room."""
        if request.late or not self.rows.num_free:
            return None
        size, known = self.block_size, request.num_tokens
        # At least one token must be computed, or there would be nothing to sample from.
        sharable = (known - 1) // size
        shared: list[int] = []
        if self.cache.prefix_caching:
            self.cache.extend_hashes(request.hashes, request.tokens, sharable, request.cache_salt)
            shared = self.cache.match(request.hashes[:sharable])
        needed = -(-known // size) - len(shared)
        # Beside others leave room to grow, or the newcomer would be preempted at once.
        reserve = min(len(self.running), self.cache.total // 100 + 1)
        if needed + reserve > self.cache.available - self.cache.count_cached(shared):
            return None
        self.cache.share(shared)
        blocks = shared + self.cache.allocate(needed)
        self.waiting.pop(0)
        self.waiting_tokens -= request.num_tokens
        row = self.rows.take(request, blocks, len(shared) * size)
        self.rows.registered[row] = len(shared)
        request.state = State.RUNNING
        insort(self.running, request, key=lambda r: r.order)
        self.counters.cached_tokens += len(shared) * size
        if not request.admissions:
            request.num_cached = min(len(shared) * size, request.num_prompt)
        request.admissions += 1
        return row

    def _make_plan(self, decodes: Int32s, chunks: list[tuple[int, int]]) -> StepPlan:
        r, num_decodes = self.rows, len(decodes)
        rows = np.concatenate([decodes, np.array([row for row, _ in chunks], np.int32)])
        lengths = np.ones(len(rows), np.int32)
        lengths[num_decodes:] = [n for _, n in chunks]
        starts = r.scheduled[rows]
        ends = starts + lengths
        samples = ends == r.known[rows] + r.in_flight[rows]
        query_starts = np.cumsum(lengths, dtype=np.int32) - lengths

        tokens = np.empty(int(lengths.sum()), TOKEN)
        token_rows = np.repeat(rows, lengths)
        position = np.arange(len(tokens), dtype=np.int32) + np.repeat(starts - query_starts, lengths)
        tokens["position"] = position
        block = r.blocks[token_rows, position // self.block_size]
        tokens["cache_slot"] = block * self.block_size + position % self.block_size
        unknown = starts[:num_decodes] >= r.known[decodes]
        tokens["carry_row"] = -1
        tokens["carry_row"][:num_decodes][unknown] = decodes[unknown]
        tokens["input_id"][:num_decodes] = np.where(unknown, 0, r.last_token[decodes])
        requests = [r.requests[row] for row in rows.tolist()]
        for i in range(num_decodes, len(rows)):
            first = query_starts[i]
            tokens["input_id"][first : first + lengths[i]] = requests[i].tokens[starts[i] : ends[i]]

        sequences = np.empty(len(rows), SEQUENCE)
        sequences["query_start"] = query_starts
        sequences["query_len"] = lengths
        sequences["context_len"] = ends
        sequences["row"] = np.where(samples, rows, 0)
        sequences["sample_position"] = ends
        seed = r.seed[rows]
        sequences["seed_low"] = seed.astype(np.uint32).view(np.int32)
        sequences["seed_high"] = (seed >> np.uint64(32)).astype(np.uint32).view(np.int32)
        sequences["temperature"] = r.temperature[rows]
        sequences["top_k"] = r.top_k[rows]
        sequences["top_p"] = r.top_p[rows]
        sequences["min_p"] = r.min_p[rows]
        noisy = sequences["temperature"] > 0
        filtered = (sequences["top_k"] > 0) | (sequences["top_p"] < 1) | (sequences["min_p"] > 0)

        step = self._steps
        self._steps += 1
        r.scheduled[rows] = ends
        r.in_flight[rows[samples]] += 1
        self.counters.steps += 1
        self.counters.prompt_tokens += len(tokens) - num_decodes
        self._in_flight.append(_InFlight(step, requests, rows, r.generation[rows], ends, samples))
        return StepPlan(
            step=step,
            tokens=tokens,
            sequences=sequences,
            block_tables=r.blocks[rows, : int(r.num_blocks[rows].max())],
            num_decodes=num_decodes,
            max_query_len=int(lengths.max()),
            greedy=not noisy.any(),
            filtered=bool((noisy & filtered).any()),
        )

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
                self.waiting_tokens += 1
                outputs.append(self._append(request, int(result.tokens[i])))
            else:
                self.counters.wasted_tokens += 1
        if self.cache.prefix_caching:
            self._register(step.rows[alive], step.ends[alive] // self.block_size)
        for output in outputs:
            if output.finish_reason is not None:
                self._release(output.request, output.finish_reason)
        return outputs

    def _append(self, request: Request, token: int) -> Output:
        position = request.num_output
        request.tokens[request.num_tokens] = token
        request.num_tokens += 1
        self.counters.output_tokens += 1
        reason = None
        if token in request.sampling.stop_token_ids and not request.sampling.ignore_eos:
            reason = FinishReason.STOP
        elif request.num_tokens == request.limit:
            reason = FinishReason.LENGTH
        return Output(request, position, (token,), reason)

    def _register(self, rows: Int32s, full: Int32s) -> None:
        """Offer the first `full` blocks of each row to the prefix cache: now they are computed."""
        r = self.rows
        due = full > r.registered[rows]
        for row, n in zip(rows[due].tolist(), full[due].tolist(), strict=True):
            request = r.requests[row]
            self.cache.extend_hashes(request.hashes, request.tokens, n, request.cache_salt)
            for i in range(int(r.registered[row]), n):
                self.cache.register(int(r.blocks[row, i]), request.hashes[i])
            r.registered[row] = n

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        self._release(request, reason)
        return Output(request, request.num_output, (), reason, error)

    def _release(self, request: Request, reason: FinishReason) -> None:
        if request.state is State.RUNNING:
            self._give_back(request)
        else:
            self.waiting.remove(request)
            self.waiting_tokens -= request.num_tokens
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
        assert self.waiting_tokens == sum(request.num_tokens for request in self.waiting)
        rest = [r.known[q.row] - r.scheduled[q.row] for q in self.running]
        assert self.prefill_tokens == self.waiting_tokens + sum(n for n in rest if n > 1)
        live = [request.row for request in self.running]
        assert (r.in_flight[live] >= 0).all()
        assert (r.known[live] + r.in_flight[live] <= r.limit[live]).all(), "computed past a limit"
        assert all(r.known[q.row] == q.num_tokens for q in self.running), "row and request disagree"
