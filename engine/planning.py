"""The arrays of a step's plan, gathered from the rows of its requests."""

from __future__ import annotations

import numpy as np

from engine.plan import SCRATCH_ROW, TOKEN, History, StepPlan
from engine.request import Request
from engine.rows import Int32s, Rows

NOTHING = np.empty(0, np.int32)


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

    sequences = r.sequences.take(rows)  # an index would copy field by field
    sequences["query_start"] = query_starts
    sequences["query_len"] = lengths
    sequences["context_len"] = ends
    sequences["sample_position"] = ends
    sequences["row"][~samples] = SCRATCH_ROW
    sequences["penalty_row"][~samples] = SCRATCH_ROW
    scored, likeliest = NOTHING, 0
    if r.num_scored:
        wanted = np.where(samples, r.logprobs[rows], -1)
        scored, likeliest = np.flatnonzero(wanted >= 0).astype(np.int32), max(int(wanted.max()), 0)
    constrained = NOTHING
    if r.num_constrained:
        constrained = np.flatnonzero(samples & r.constrained[rows]).astype(np.int32)
    return StepPlan(
        step=step,
        tokens=tokens,
        sequences=sequences,
        block_tables=r.blocks[rows, : int(r.num_blocks[rows].max())],
        num_decodes=num_decodes,
        greedy=not r.noisy[rows].any(),
        filtered=bool(r.filtered[rows].any()),
        penalised=bool(sequences["penalty_row"].any()),
        histories=tuple(_history(r.requests[row]) for row in rows[r.uncounted[rows]].tolist()),
        scored=scored,
        likeliest=likeliest,
        constrained=constrained,
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
