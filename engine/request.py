"""A request, what it asks of the sampler, and how it ends."""

from __future__ import annotations

import enum
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.account import Account

_arrivals = count()

MAX_BIASES = 300
"""Tokens that one request may have a `logit_bias` for, as in OpenAI's API."""

MAX_LOGPROBS = 20
"""Of the likeliest tokens in each place, those that a request may ask about, as in OpenAI's API."""


class RequestError(ValueError):
    """A request that cannot be served. `field` names what is wrong with it, as in the HTTP API."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str | None]]:
        return type(self), (str(self), self.field)


class QueueFull(RuntimeError):
    """No room to wait. Nothing is wrong with the request: it may be sent again later.

    `retry_after`: seconds in which there should be room, if that is known.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailable(RuntimeError):
    """The engine is not started, draining, stopped or broken: another one may serve the request."""


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop token was sampled (a stop string too, found by the Router)
    LENGTH = "length"  # max_tokens, or the context length, is reached
    TIMEOUT = "timeout"  # its time is over, in the queue or altogether
    ABORT = "abort"  # the client went away or asked for it
    ERROR = "error"  # the engine failed


class State(enum.Enum):
    WAITING = enum.auto()  # for its first admission, or preempted
    RUNNING = enum.auto()  # owns a row and blocks
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    Raises `RequestError` naming the field that is out of range.
    """

    max_tokens: int | None = None
    """Tokens to generate at most; None means up to the context length."""
    temperature: float = 1.0
    """0 is greedy, and so is anything below 1e-5."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches p."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    seed: int = 0
    """64 bits; with the position it determines the noise of a token, whatever the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request. The model's own end tokens belong here too."""
    ignore_eos: bool = False
    """Do not stop at any of `stop_token_ids`."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of a token that was generated before."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it was generated."""
    repetition_penalty: float = 1.0
    """Divides a logit above 0 of a token of prompt or output, multiplies one below."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each token once."""
    logprobs: int | None = None
    """Tell the log-probability of each token, and of so many of the likeliest in its place. They are the
    model's own: before biases, penalties, temperature and filters. None: nothing of it."""
    grammar: str | None = None
    """What the text has to be, as llguidance writes it down: `LLMatcher.grammar_from_json_schema`, say."""

    @property
    def penalised(self) -> bool:
        """Whether logits are to be changed before the token is chosen."""
        neutral = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0, 0, 1)
        return bool(self.logit_bias) or not neutral

    def __post_init__(self) -> None:
        def check(good: bool, name: str, wanted: str) -> None:
            if not good:
                raise RequestError(f"{name} must be {wanted}, got {getattr(self, name)!r}", name)

        check(
            self.max_tokens is None or (isinstance(self.max_tokens, int) and self.max_tokens > 0),
            "max_tokens",
            "an integer, at least 1",
        )
        check(0 <= self.temperature <= 1e6, "temperature", "between 0 and 1,000,000")
        check(0 <= self.top_k < 2**31, "top_k", "at least 0 (0 keeps all)")
        check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        check(-(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        check(
            isinstance(self.stop_token_ids, Collection)
            and all(isinstance(token, int) for token in self.stop_token_ids),
            "stop_token_ids",
            "a tuple of integers",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            check(-2 <= getattr(self, name) <= 2, name, "between -2 and 2")
        check(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "between 0.01 and 100")
        biased = {token for token, _ in self.logit_bias}
        check(
            len(biased) == len(self.logit_bias) <= MAX_BIASES
            and all(isinstance(token, int) and token >= 0 for token in biased)
            and all(-100 <= bias <= 100 for _, bias in self.logit_bias),
            "logit_bias",
            f"at most {MAX_BIASES} different token ids with values between -100 and 100",
        )
        check(
            self.logprobs is None or (isinstance(self.logprobs, int) and 0 <= self.logprobs <= MAX_LOGPROBS),
            "logprobs",
            f"an integer from 0 to {MAX_LOGPROBS}",
        )
        check(self.grammar is None or isinstance(self.grammar, str), "grammar", "a string")


@dataclass(slots=True, eq=False)
class Request:
    """One sequence, from arrival to finish. The engine's thread alone changes it after `submit`.

    `prompt` holds token ids; `generated` those that an earlier attempt has already produced
    (resumption): they count as output, so limits and noise go on where they stopped. Both are arrays
    where they came from another process.
    Compared by identity, so an id used again is another request.
    """

    id: str
    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    generated: list[int] = field(default_factory=list)
    priority: int = 0
    """Lower runs first."""
    cache_salt: bytes = b""
    """Requests share cached prefixes only under an equal salt."""
    client: str = ""
    """Whose it is: within one priority, clients that wait get equal shares of the tokens."""
    timeout: float | None = None
    """Seconds from `arrived` after which it ends, wherever it is."""
    queue_timeout: float | None = None
    """Seconds from `arrived` after which it ends unless it has begun to run."""

    # Below: the scheduler's own.
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    arrival: int = field(default_factory=lambda: next(_arrivals))
    arrived: float = field(default_factory=time.monotonic)
    account: Account = field(default_factory=Account)
    limit: int = 0
    """Tokens at which the request ends by length, prompt included."""
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Prompt and output, `num_tokens` of them valid, room for `limit`."""
    num_tokens: int = 0
    """Tokens whose ids the host knows."""
    late: int = 0
    """Sampled tokens still in flight when the request lost its row."""
    row: int = 0
    """Its row while running; 0 otherwise."""
    hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of its full blocks, as far as computed."""
    matcher: Any = None
    """What knows which tokens may come next, if it has a grammar. See `engine/grammar.py`."""
    admissions: int = 0
    """How often it was given a row: more than once if it was preempted."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache at first admission."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_output(self) -> int:
        """Tokens generated, those of an earlier attempt included."""
        return self.num_tokens - len(self.prompt) if self.num_tokens else len(self.generated)

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: priority, then arrival (kept across preemption)."""
        return self.priority, self.arrival


class Logprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Natural logarithms of probabilities in one place."""

    token: float
    """Of the token that was chosen."""
    likeliest: list[int]
    """Token ids, the likeliest first."""
    values: list[float]
    """Theirs."""


class Output(msgspec.Struct, frozen=True, gc=False):
    """What one step brought for one request.

    There is one for each token, so it is of the kind that is made fastest, and the garbage collector
    does not look at: nothing that it refers to refers to it.

    `position` is the index of the first of `tokens` among the generated tokens of the request, so
    a reader can tell a gap or a repetition. The last output of a request, and only that, has a
    `finish_reason`; it may have no token.
    """

    request: Request
    position: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[Logprobs, ...] = ()
    """One for each of `tokens`, if the request asks for them."""
