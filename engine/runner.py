"""Launches plans over the three lanes and collects their results.

    H2D      [upload N] [upload N+1]
    compute             [carry-over, forward, sample: N] [N+1]
    D2H                                      [download N] [download N+1]

Each arrow between the lanes is one event of the step's slot. A step with grammars has one more, between
its forward and its sampling: its masks go over the H2D lane when all tokens before are known. Row tables
(`last_token`) are read and written on the compute lane alone, so its order is all the ordering they need.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention import LayerCache, PagedBatch
from engine.carry_over import keep_tokens, step_inputs
from engine.graphs import Graphs, bucket_for, buckets, mixed_buckets
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
    num_prefills: int
    num_blocks: int
    greedy: bool = True
    filtered: bool = False
    penalised: bool = False


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
        self._free = deque(self.slots)
        self._clock = StepClock(lanes, depth)
        # Slot, step, sequences, and when it was prepared and is through.
        self._in_flight: deque[tuple[Slot, int, int, float, Marks]] = deque()
        self._waiting: Callable[[], None] | None = None  # for masks: the sampling of the step launched last
        self._graphs: Graphs | None = None
        self._decode_buckets: list[int] = []
        self._mixed_buckets: list[tuple[int, int]] = []
        self._logits = torch.empty(0)  # of captured steps
        self._step_inputs, self._keep_tokens = step_inputs, keep_tokens

    def compile(self) -> None:
        """One kernel each, where there were many, for what a step does before and after the model."""
        self._step_inputs = torch.compile(step_inputs, fullgraph=True, dynamic=True)
        self._keep_tokens = torch.compile(keep_tokens, fullgraph=True, dynamic=True)

    # The two calls of the loop

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step on the lanes; the host does not wait."""
        slot, lanes = self._free.popleft(), self.lanes
        shape, captured = self._prepare(plan)
        slot.fill(plan, shape.num_tokens, shape.num_sequences)
        prepared, marks = time.perf_counter(), self._clock.take()

        lanes.h2d.run(slot.upload)
        lanes.h2d.record(marks.uploaded)
        lanes.h2d.record(slot.h2d_done)

        lanes.compute.wait(slot.h2d_done)
        lanes.compute.record(marks.begin)
        if slot.histories:
            lanes.compute.run(partial(self.penalties.begin, slot.histories))
        lanes.compute.run(partial(self._step_forward, slot, shape, captured))
        self._in_flight.append((slot, plan.step, len(plan.sequences), prepared, marks))
        if slot.num_constrained:
            self._waiting = partial(self._launch_sampling, slot, shape, captured, marks)
        else:
            self._launch_sampling(slot, shape, captured, marks)

    def constrain(self, masks: npt.NDArray[np.int32]) -> None:
        """Let the step that was launched last sample, where grammars allow it: [constrained, words]."""
        slot, lanes = self._in_flight[-1][0], self.lanes
        sample_step, self._waiting = self._waiting, None
        assert sample_step is not None, "no step waits for masks"
        slot.fill_masks(masks)
        lanes.h2d.run(slot.upload_masks)
        lanes.h2d.record(slot.masks_done)
        lanes.compute.wait(slot.masks_done)
        sample_step()

    def _launch_sampling(self, slot: Slot, shape: Shape, captured: bool, marks: Marks) -> None:
        lanes = self.lanes
        lanes.compute.run(partial(self._step_sample, slot, shape, captured))
        lanes.compute.record(marks.end)
        lanes.compute.record(slot.compute_done)

        lanes.d2h.wait(slot.compute_done)
        lanes.d2h.run(slot.download)
        lanes.d2h.record(marks.downloaded)
        lanes.d2h.record(slot.d2h_done)

    def collect(self) -> StepResult:
        """The result of the oldest step in flight: the only place where the host waits for the device.

        Raises what failed on a lane, if anything did.
        """
        slot, step, n, prepared, marks = self._in_flight[0]
        slot.d2h_done.synchronize()
        self._in_flight.popleft()
        self._free.append(slot)
        return StepResult(step, slot.result(n), self._clock.read(marks, prepared), slot.scores())

    def close(self) -> None:
        self.lanes.close()

    # What the compute lane does

    def _prepare(self, plan: StepPlan) -> tuple[Shape, bool]:
        """The shape of the step, padded to a bucket if that is captured, and whether it is."""
        t, s = len(plan.tokens), len(plan.sequences)
        sampling = {"greedy": plan.greedy, "filtered": plan.filtered, "penalised": plan.penalised}
        if self._graphs is not None:
            captured = self._captured_shape(t, s, decodes=plan.num_decodes == t)
            if captured is not None:
                return replace(captured, **sampling), True
        padding = max(self.min_sequences - s, 0)
        num_blocks = min(max(plan.block_tables.shape[1], self.min_sequences), self.max_blocks)
        prefills = s + padding - plan.num_decodes
        shape = Shape(t + padding, s + padding, plan.num_decodes, prefills, num_blocks, **sampling)
        return shape, False

    def _step_forward(self, slot: Slot, shape: Shape, captured: bool) -> None:
        if captured:
            assert self._graphs is not None
            name = replace(shape, greedy=True, filtered=False, penalised=False)
            self._graphs.replay((self.slots.index(slot), name))
            slot.logits = self._logits[: shape.num_sequences]
        else:
            with torch.inference_mode():
                slot.logits = self._forward(slot, shape)

    @torch.inference_mode()
    def _step_sample(self, slot: Slot, shape: Shape, captured: bool) -> None:
        logits, slot.logits = slot.logits, None
        assert logits is not None
        # Not captured: counts, which have no memory before they are used, and what few requests ask for.
        if captured and not (shape.penalised or slot.num_constrained):
            assert self._graphs is not None
            self._graphs.replay((self.slots.index(slot), shape.num_sequences, shape.filtered))
        else:
            self._sample(slot, shape, logits)
        if slot.num_scored:
            slot.score(logits)

    def _forward(self, slot: Slot, shape: Shape) -> torch.Tensor:
        """Carry-over and forward: logits [S, V]."""
        t, s = shape.num_tokens, shape.num_sequences
        query_start, query_len = slot.sequence("query_start", s), slot.sequence("query_len", s)
        input_ids, positions, logits_indices, block_tables = self._step_inputs(
            self.last_token,
            slot.token("carry_row", t),
            slot.token("input_id", t),
            slot.token("position", t),
            query_start,
            query_len,
            slot.block_tables(s, shape.num_blocks),
        )
        batch = PagedBatch(
            cache_slots=slot.token("cache_slot", t),
            query_start=query_start,
            query_len=query_len,
            context_len=slot.sequence("context_len", s),
            block_tables=block_tables,
            num_decodes=shape.num_decodes,
            num_prefills=shape.num_prefills,
        )
        return self.model.forward(input_ids, positions, batch, self.caches, logits_indices)

    def _sample(self, slot: Slot, shape: Shape, logits: torch.Tensor) -> None:
        """Sampled tokens to the slot's output and, for the carry-over, to their rows."""
        s = shape.num_sequences
        if shape.penalised:
            penalties = PenaltyTensors(
                row=slot.sequence("penalty_row", s),
                presence=slot.sequence("presence_penalty", s),
                frequency=slot.sequence("frequency_penalty", s),
                repetition=slot.sequence("repetition_penalty", s),
            )
            logits = self.penalties.apply(logits, penalties)
        if slot.num_constrained:
            logits = slot.constrain(logits)
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
        self._keep_tokens(tokens, slot.sequence("row", s), slot.sampled[:s], self.last_token)

    # Captured steps

    def _decodes(self, n: int) -> Shape:
        return Shape(n, n, n, 0, self.max_blocks)

    def _mixed(self, tokens: int, sequences: int) -> Shape:
        return Shape(tokens, sequences, sequences, sequences, self.max_blocks)

    def _captured_shape(self, t: int, s: int, decodes: bool) -> Shape | None:
        """The least of those captured that holds t tokens of s sequences; None if there is none."""
        if decodes:
            bucket = bucket_for(s, self._decode_buckets)
            return None if bucket is None else self._decodes(bucket)
        fit = (self._mixed(*each) for each in self._mixed_buckets if t <= each[0] and s <= each[1])
        return next(fit, None)

    def capture(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Capture steps on a GPU: forward and sampling apart, for every slot."""
        lane = self.lanes.compute
        assert isinstance(lane, CudaLane), "graphs need CUDA streams"
        self._capture_all(Graphs(lane), progress)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of what ran before, on this stream, and would be kept for it

    def _capture_all(self, graphs: Graphs, progress: Callable[[str], None] = lambda _: None) -> None:
        most = max(self.max_sequences, self.min_sequences)
        self._decode_buckets, self._mixed_buckets = buckets(most), mixed_buckets(self.max_tokens, most)
        # Largest first, so that smaller ones reuse its memory.
        shapes = [self._mixed(t, n) for t, n in reversed(self._mixed_buckets)]
        shapes += [self._decodes(n) for n in reversed(self._decode_buckets)]
        with torch.inference_mode():
            self.slots[0].make_scratch(most, 1)
            # Logits cross from one graph to the next, outside their memory pool.
            self._logits = torch.zeros_like(self._forward(self.slots[0], self._decodes(most)))
            for shape in shapes:
                progress(f"capturing steps of {shape.num_tokens} tokens of {shape.num_sequences} requests")
                for i, slot in enumerate(self.slots):
                    slot.make_scratch(shape.num_sequences, 0 if shape.num_prefills else 1)
                    self._capture_step(graphs, i, shape)
        self._graphs = graphs

    def _capture_step(self, graphs: Graphs, i: int, shape: Shape) -> None:
        slot, logits = self.slots[i], self._logits[: shape.num_sequences]

        def forward() -> None:
            logits.copy_(self._forward(slot, shape))

        graphs.capture((i, shape), forward)
        if shape.num_prefills:
            return  # samples like as many decodes
        for filtered in (False, True):
            # On a GPU greedy sequences are sampled like others, without noise.
            sampling = replace(shape, greedy=False, filtered=filtered)
            name = (i, shape.num_sequences, filtered)
            graphs.capture(name, partial(self._sample, slot, sampling, logits))
