"""The arrays of a step's plan, gathered from the rows of its requests."""

from __future__ import annotations

import numpy as np

from engine.plan import SCRATCH_ROW, SEQUENCE, TOKEN, History, StepPlan
from engine.request import Request
from engine.rows import Int32s, Rows


def make_plan(step: int, r: Rows, rows: Int32s, lengths: Int32s, num_decodes: int) -> StepPlan:
    """The plan for the next `lengths` tokens of each of `rows`, of which the first `num_decodes` decode.

    It samples where all that is known, or will be once the steps in flight are through, is computed.
    """
    starts = r.scheduled[rows]
    ends = starts + lengths
    samples = ends == r.known[rows] + r.in_flight[rows]
    query_starts = np.cumsum(lengths, dtype=np.int32) - lengths

    tokens = np.empty(int(lengths.sum()), TOKEN)
    token_rows = np.repeat(rows, lengths)
    position = np.arange(len(tokens), dtype=np.int32) + np.repeat(starts - query_starts, lengths)
    tokens["position"] = position
    block = r.blocks[token_rows, position // r.block_size]
    tokens["cache_slot"] = block * r.block_size + position % r.block_size
    decodes = rows[:num_decodes]
    unknown = starts[:num_decodes] >= r.known[decodes]
    tokens["carry_row"] = -1
    tokens["carry_row"][:num_decodes][unknown] = decodes[unknown]
    tokens["input_id"][:num_decodes] = np.where(unknown, 0, r.last_token[decodes])
    for i in range(num_decodes, len(rows)):
        first, request = query_starts[i], r.requests[rows[i]]
        tokens["input_id"][first : first + lengths[i]] = request.tokens[starts[i] : ends[i]]

    sequences = np.empty(len(rows), SEQUENCE)
    sequences["query_start"] = query_starts
    sequences["query_len"] = lengths
    sequences["context_len"] = ends
    sequences["row"] = np.where(samples, rows, SCRATCH_ROW)
    sequences["sample_position"] = ends
    seed = r.seed[rows]
    sequences["seed_low"] = seed.astype(np.uint32).view(np.int32)
    sequences["seed_high"] = (seed >> np.uint64(32)).astype(np.uint32).view(np.int32)
    sequences["temperature"] = r.temperature[rows]
    sequences["top_k"] = r.top_k[rows]
    sequences["top_p"] = r.top_p[rows]
    sequences["min_p"] = r.min_p[rows]
    sequences["presence_penalty"] = r.presence_penalty[rows]
    sequences["frequency_penalty"] = r.frequency_penalty[rows]
    sequences["repetition_penalty"] = r.repetition_penalty[rows]
    penalised = r.penalised[rows] & samples
    # In a step with others that have them, what its row's last owner has left is not for this one.
    sequences["penalty_row"] = np.where(penalised, rows, SCRATCH_ROW)
    noisy = sequences["temperature"] > 0
    filtered = (sequences["top_k"] > 0) | (sequences["top_p"] < 1) | (sequences["min_p"] > 0)
    return StepPlan(
        step=step,
        tokens=tokens,
        sequences=sequences,
        block_tables=r.blocks[rows, : int(r.num_blocks[rows].max())],
        num_decodes=num_decodes,
        greedy=not noisy.any(),
        filtered=bool((noisy & filtered).any()),
        penalised=bool(penalised.any()),
        histories=tuple(_history(r.requests[row]) for row in rows[r.uncounted[rows]].tolist()),
    )


def _history(request: Request) -> History:
    ids, biases = zip(*request.sampling.logit_bias, strict=True) if request.sampling.logit_bias else ((), ())
    n = request.num_prompt
    return History(
        row=request.row,
        prompt=request.tokens[:n],
        generated=request.tokens[n : request.num_tokens],
        bias_ids=np.array(ids, np.int32),
        biases=np.array(biases, np.float32),
    )
