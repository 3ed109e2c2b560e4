"""All that crosses between the host half and the device half: a plan goes in, a result comes out.

Both are plain numpy. A plan is never changed after it is made; the device half copies it into a
slot's pinned buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from engine.request import MAX_LOGPROBS, Logprobs, Output, Request

# One record per token of the step. Every field is 4 bytes, so that a device sees the array as an
# int32 matrix [tokens, len(TOKEN.names)] and takes columns of it.
TOKEN = np.dtype(
    [
        ("input_id", np.int32),  # 0 where the token is not known yet
        ("carry_row", np.int32),  # row whose last sampled token to take instead; -1: input_id
        ("position", np.int32),  # in its sequence, from 0
        ("cache_slot", np.int32),  # block * block_size + offset, where key and value are written
    ]
)

# One record per sequence of the step, decoding sequences (one token each) first.
SEQUENCE = np.dtype(
    [
        ("query_start", np.int32),  # its first token in the step
        ("query_len", np.int32),  # its tokens in the step
        ("context_len", np.int32),  # positions to attend to, this step's included
        ("row", np.int32),  # where the sampled token goes; 0 (scratch): the chunk samples nothing
        ("sample_position", np.int32),  # position of the token to sample, key of its noise
        ("seed_low", np.int32),
        ("seed_high", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("penalty_row", np.int32),  # whose counts and biases apply; 0: nobody's, as it asks for none
    ]
)

SCRATCH_ROW = 0
SCRATCH_BLOCK = 0


class History(NamedTuple):
    """What a request with penalties or biases brings to its row, wherever its tokens were computed."""

    row: int
    prompt: npt.NDArray[np.int32]
    generated: npt.NDArray[np.int32]
    bias_ids: npt.NDArray[np.int32]
    """Different tokens, at most `engine.request.MAX_BIASES`."""
    biases: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What one step computes."""

    step: int
    """Counts up from 0, without gaps."""
    tokens: npt.NDArray[np.void]
    """TOKEN [T], sequence by sequence."""
    sequences: npt.NDArray[np.void]
    """SEQUENCE [S]."""
    block_tables: npt.NDArray[np.int32]
    """[S, B], B the blocks of the longest sequence; unused entries are 0."""
    num_decodes: int
    """The first `num_decodes` sequences have one token each; those after them may have more."""
    greedy: bool
    """No sequence draws noise."""
    filtered: bool
    """Some sequence uses top_k, top_p or min_p."""
    penalised: bool = False
    """Some sequence that samples has penalties or biases."""
    histories: tuple[History, ...] = ()
    """Rows whose counts and biases begin anew before this step samples."""
    scored: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Places of the sequences whose tokens' log-probabilities are wanted."""
    likeliest: int = 0
    """And of so many others in each of these."""
    constrained: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Places of the sequences whose tokens have to follow a grammar. Where there are any, the step samples
    once it is told what they may be, which takes the tokens of the steps before."""


class StepTiming(NamedTuple):
    """When one step was where. Seconds; the lanes' own clocks differ from the host's, so differences only."""

    prepared: float
    """When its inputs stood in the slot, by the host's `time.perf_counter`."""
    gap: float
    """From the end of the compute of the step before to the beginning of this one's; 0 for the first."""
    ready: float
    """How long before its compute its upload was through."""
    compute: float
    """In a step with grammars its wait for their masks included."""
    download: float
    """From the end of its compute until its tokens were on the host."""


class Scores(NamedTuple):
    """Log-probabilities that a step found."""

    places: npt.NDArray[np.int32]
    """[W]: the plan's `scored`."""
    ids: npt.NDArray[np.int32]
    """[W, 1 + likeliest]: the sampled token, then the likeliest in order."""
    values: npt.NDArray[np.float32]
    """Theirs, natural logarithms."""

    def told(self, outputs: list[Output], requests: list[Request]) -> list[Output]:
        """The outputs of the step, each with what its request wants of them; `requests` are the plan's."""
        rows = zip(self.places.tolist(), self.ids.tolist(), self.values.tolist(), strict=True)
        found = {requests[place]: (ids, values) for place, ids, values in rows}
        return [
            _with_logprobs(output, *found[output.request]) if output.request in found else output
            for output in outputs
        ]


def _with_logprobs(output: Output, ids: list[int], values: list[float]) -> Output:
    most = output.request.sampling.logprobs
    assert most is not None
    ids, values = ids[: most + 1], values[: most + 1]  # others of the step may want more
    return msgspec.structs.replace(output, logprobs=(Logprobs(values[0], ids[1:], values[1:]),))


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one step sampled."""

    step: int
    tokens: npt.NDArray[np.int32]
    """[S], in the plan's order; meaningless where the plan's row is 0."""
    timing: StepTiming | None = None
    scores: Scores | None = None
    """If any are wanted."""


def scratch_plan(
    num_tokens: int, sequences: int, context: int, max_blocks: int, *, everything: bool = False
) -> StepPlan:
    """A step for warming up and measuring: all in the scratch row and block, with every filter.

    It has `num_tokens` tokens, or as many as `sequences` of at most `context` tokens hold. With
    `everything` it has penalties and log-probabilities, too.
    """
    lengths = np.ones(sequences, np.int32)
    rest = num_tokens - sequences
    for i in reversed(range(sequences)):  # the longest chunks there can be, after the decodes
        lengths[i] += min(rest, context - 1)
        rest -= lengths[i] - 1
    starts = np.cumsum(lengths) - lengths
    tokens = np.zeros(int(lengths.sum()), TOKEN)
    tokens["carry_row"] = -1
    tokens["position"] = np.arange(len(tokens)) - np.repeat(starts, lengths)
    seqs = np.zeros(sequences, SEQUENCE)
    seqs["query_start"] = starts
    seqs["query_len"] = seqs["context_len"] = lengths
    seqs["temperature"] = seqs["top_p"] = seqs["repetition_penalty"] = 1
    return StepPlan(
        step=0,
        tokens=tokens,
        sequences=seqs,
        block_tables=np.zeros((sequences, max_blocks), np.int32),
        num_decodes=int((lengths == 1).sum()),
        greedy=False,
        filtered=True,
        penalised=everything,
        scored=np.arange(sequences if everything else 0, dtype=np.int32),
        likeliest=MAX_LOGPROBS,
    )
