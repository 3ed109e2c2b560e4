"""Launches plans over the three lanes and collects their results.

    H2D      [upload N] [upload N+1]
    compute             [carry-over, forward, sample: N] [N+1]
    D2H                                      [download N] [download N+1]

Each arrow between the lanes is one event of the step's slot. Row tables (`last_token`) are read
and written on the compute lane alone, so its order is all the ordering they need.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from engine.attention import LayerCache, PagedBatch
from engine.graphs import Graphs, bucket_for
from engine.lanes import CudaLane, Lanes
from engine.penalties import Penalties, PenaltyTensors
from engine.plan import StepPlan, StepResult
from engine.sampler import SamplingTensors, sample
from engine.slots import Slot
from engine.step_clock import Marks, StepClock


class Model(Protocol):
    """What the runner needs of `engine.model.PagedModel`."""

    vocab_size: int

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        caches: list[LayerCache],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a plan fixes the kernels of its step."""

    num_tokens: int
    num_sequences: int
    num_decodes: int
    max_query_len: int
    num_blocks: int
    greedy: bool
    filtered: bool
    penalised: bool = False

    @property
    def sampling(self) -> str:
        return "greedy" if self.greedy else "filtered" if self.filtered else "noisy"


class Runner:
    """The device half of the loop: `launch` enqueues a step, `collect` waits for the oldest one.

    At most `depth` steps may be in flight. `close` ends the lanes.
    """

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        lanes: Lanes,
        device: torch.device,
        *,
        max_tokens: int,
        max_sequences: int,
        max_blocks: int,
        depth: int,
        min_sequences: int = 1,
    ) -> None:
        """`min_sequences`: smaller steps are padded; 2 where the model is compiled for sizes from 2 on."""
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self.min_sequences = min_sequences
        max_sequences = max(max_sequences, min_sequences)
        max_tokens += min_sequences  # room for padding
        self.model = model
        self.caches = caches
        self.lanes = lanes
        self.max_blocks = max_blocks
        self.slots = [Slot(max_tokens, max_sequences, max_blocks, device, lanes) for _ in range(depth)]
        self.last_token = torch.zeros(max_sequences + 1, dtype=torch.int32, device=device)
        self.penalties = Penalties(max_sequences + 1, model.vocab_size, device)
        self._block_size = caches[0].key.shape[1]
        self._free = deque(self.slots)
        self._clock = StepClock(lanes, depth)
        # Slot, step, sequences, and when it was prepared and is through.
        self._in_flight: deque[tuple[Slot, int, int, float, Marks]] = deque()
        self._graphs: Graphs | None = None
        self._buckets: list[int] = []
        self._logits = torch.empty(0)  # of captured steps

    # The two calls of the loop

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step on the lanes; the host does not wait."""
        slot, lanes = self._free.popleft(), self.lanes
        shape, compute = self._prepare(slot, plan)
        slot.fill(plan, shape.num_tokens, shape.num_sequences)
        prepared, marks = time.perf_counter(), self._clock.take()

        lanes.h2d.run(slot.upload)
        lanes.h2d.record(marks.uploaded)
        lanes.h2d.record(slot.h2d_done)

        lanes.compute.wait(slot.h2d_done)
        lanes.compute.record(marks.begin)
        if slot.histories:
            lanes.compute.run(partial(self.penalties.begin, slot.histories))
        lanes.compute.run(compute)
        lanes.compute.record(marks.end)
        lanes.compute.record(slot.compute_done)

        lanes.d2h.wait(slot.compute_done)
        lanes.d2h.run(slot.download)
        lanes.d2h.record(marks.downloaded)
        lanes.d2h.record(slot.d2h_done)

        self._in_flight.append((slot, plan.step, len(plan.sequences), prepared, marks))

    def collect(self) -> StepResult:
        """The result of the oldest step in flight: the only place where the host waits for the device.

        Raises what failed on a lane, if anything did.
        """
        slot, step, n, prepared, marks = self._in_flight[0]
        slot.d2h_done.synchronize()
        self._in_flight.popleft()
        self._free.append(slot)
        return StepResult(step, slot.result(n), self._clock.read(marks, prepared))

    def close(self) -> None:
        self.lanes.close()

    # What the compute lane does

    def _prepare(self, slot: Slot, plan: StepPlan) -> tuple[Shape, Callable[[], None]]:
        """The shape of the step, padded to a bucket if that is captured, and its work."""
        padding = max(self.min_sequences - len(plan.sequences), 0)
        shape = Shape(
            num_tokens=len(plan.tokens) + padding,
            num_sequences=len(plan.sequences) + padding,
            num_decodes=plan.num_decodes,
            max_query_len=plan.max_query_len,
            num_blocks=min(max(plan.block_tables.shape[1], self.min_sequences), self.max_blocks),
            greedy=plan.greedy,
            filtered=plan.filtered,
            penalised=plan.penalised,
        )
        if self._graphs is not None and len(plan.tokens) == plan.num_decodes:
            bucket = bucket_for(shape.num_sequences, self._buckets)
            if bucket is not None:
                shape = self._decode_shape(bucket, shape.greedy, shape.filtered, shape.penalised)
                return shape, partial(self._replay, slot, shape)
        return shape, partial(self._compute, slot, shape)

    def _compute(self, slot: Slot, shape: Shape) -> None:
        with torch.inference_mode():
            self._sample(slot, shape, self._forward(slot, shape))

    def _forward(self, slot: Slot, shape: Shape) -> torch.Tensor:
        """Carry-over and forward: logits [S, V]."""
        t, s = shape.num_tokens, shape.num_sequences
        carry_row = slot.token("carry_row", t)
        carried = self.last_token[carry_row.clamp(min=0)]
        input_ids = torch.where(carry_row >= 0, carried, slot.token("input_id", t))
        query_start, query_len = slot.sequence("query_start", s), slot.sequence("query_len", s)
        batch = PagedBatch(
            cache_slots=slot.token("cache_slot", t),
            query_start=query_start,
            query_len=query_len,
            context_len=slot.sequence("context_len", s),
            block_tables=slot.block_tables(s, shape.num_blocks).contiguous(),
            num_decodes=shape.num_decodes,
            max_query_len=shape.max_query_len,
            max_context_len=shape.num_blocks * self._block_size,
        )
        last = (query_start + query_len - 1).long()
        return self.model.forward(
            input_ids.long(), slot.token("position", t).long(), batch, self.caches, last
        )

    def _sample(self, slot: Slot, shape: Shape, logits: torch.Tensor) -> None:
        """Sampled tokens to the slot's output and, for the carry-over, to their rows."""
        s = shape.num_sequences
        row = slot.sequence("row", s)
        if shape.penalised:
            penalties = PenaltyTensors(
                row=slot.sequence("penalty_row", s),
                presence=slot.sequence("presence_penalty", s),
                frequency=slot.sequence("frequency_penalty", s),
                repetition=slot.sequence("repetition_penalty", s),
            )
            logits = self.penalties.apply(logits, penalties)
        params = SamplingTensors(
            temperature=slot.sequence("temperature", s),
            top_k=slot.sequence("top_k", s),
            top_p=slot.sequence("top_p", s),
            min_p=slot.sequence("min_p", s),
            seed_low=slot.sequence("seed_low", s),
            seed_high=slot.sequence("seed_high", s),
            position=slot.sequence("sample_position", s),
        )
        tokens = sample(logits, params, greedy=shape.greedy, filtered=shape.filtered)
        if shape.penalised:
            self.penalties.count(penalties.row, tokens)
        slot.sampled[:s] = tokens
        self.last_token.index_copy_(0, row.long(), tokens)

    # Captured steps

    def _decode_shape(self, bucket: int, greedy: bool, filtered: bool, penalised: bool = False) -> Shape:
        return Shape(bucket, bucket, bucket, 1, self.max_blocks, greedy, filtered, penalised)

    def capture(self, sizes: Iterable[int], progress: Callable[[str], None] = lambda _: None) -> None:
        """Capture decode steps of these sizes on a GPU: forward and sampling apart, for every slot."""
        lane = self.lanes.compute
        assert isinstance(lane, CudaLane), "graphs need CUDA streams"
        self._capture_all(Graphs(lane), sorted(sizes), progress)
        torch.cuda.synchronize()

    def _capture_all(
        self, graphs: Graphs, sizes: list[int], progress: Callable[[str], None] = lambda _: None
    ) -> None:
        with torch.inference_mode():
            self.slots[0].make_scratch(sizes[-1])
            # Logits cross from one graph to the next, outside their memory pool.
            logits = torch.zeros_like(
                self._forward(self.slots[0], self._decode_shape(sizes[-1], True, False))
            )
            for bucket in reversed(sizes):  # largest first, so that smaller ones reuse its memory
                progress(f"capturing decode steps of {bucket} requests")
                for i, slot in enumerate(self.slots):
                    slot.make_scratch(bucket)
                    self._capture_step(graphs, i, bucket, logits[:bucket])
        self._graphs, self._buckets, self._logits = graphs, sizes, logits

    def _capture_step(self, graphs: Graphs, i: int, bucket: int, logits: torch.Tensor) -> None:
        slot = self.slots[i]

        def forward() -> None:
            logits.copy_(self._forward(slot, self._decode_shape(bucket, True, False)))

        graphs.capture((i, bucket, "forward"), forward)
        for greedy, filtered in ((True, False), (False, False), (False, True)):
            shape = self._decode_shape(bucket, greedy, filtered)
            graphs.capture((i, bucket, shape.sampling), partial(self._sample, slot, shape, logits))

    def _replay(self, slot: Slot, shape: Shape) -> None:
        assert self._graphs is not None
        i = self.slots.index(slot)
        self._graphs.replay((i, shape.num_sequences, "forward"))
        if shape.penalised:  # not captured, since the counts have no memory before they are used
            with torch.inference_mode():
                self._sample(slot, shape, self._logits[: shape.num_sequences])
        else:
            self._graphs.replay((i, shape.num_sequences, shape.sampling))
