"""Which tokens may come next in texts that have to follow a grammar, given all that each has so far."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.request import FinishReason, Output, Request, RequestError

if TYPE_CHECKING:  # a benchmark goes without it
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

THREADS = 8
"""That compute masks, at most, while the device computes what they are for: some 20 µs each, 0.4 ms for the
first of a schema of 200 properties."""

REMEMBERED = 128
"""Grammars that are compiled once for all their requests, the last."""


class Grammars:
    """What is known of a model's tokens. Safe to use from several threads."""

    def __init__(self, load: Callable[[], LLTokenizer | None] = lambda: None) -> None:
        """`load` takes long: it runs in a thread, and whoever needs a grammar first waits for it."""
        loading = ThreadPoolExecutor(1, "vocabulary")
        self._loaded = loading.submit(load)
        loading.shutdown(wait=False)
        self._executor: LLExecutor | None = None
        self._compiled = lru_cache(REMEMBERED)(self._compile)

    def wait(self) -> None:
        """Until the vocabulary is loaded."""
        self._loaded.result()

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        vocabulary = self._loaded.result()
        assert vocabulary is not None
        return LLMatcher(vocabulary, grammar, log_level=0)

    def start(self, request: Request) -> LLMatcher | None:
        """What follows the text of a request, if that has a grammar; what it has generated, taken in.

        Raises `RequestError` naming the field.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if self._loaded.result() is None:
            raise RequestError("there is no tokenizer with this model that grammars could use", "grammar")
        matcher = self._compiled(grammar).deep_copy()
        if matcher.is_error():
            raise RequestError(f"the grammar is wrong: {_reason(matcher)}", "grammar")
        if not matcher.consume_tokens([int(token) for token in request.generated]):
            raise RequestError("what was generated does not follow the grammar", "generated")
        return matcher

    def masks(self, matchers: Sequence[LLMatcher]) -> npt.NDArray[np.int32]:
        """[n, words]: bit i of a row is 1 if token i may come next; in any way for a text that has ended."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        vocabulary = self._loaded.result()
        assert vocabulary is not None
        masks = np.empty((len(matchers), -(-vocabulary.vocab_size // 32)), np.int32)
        if self._executor is None:
            self._executor = LLExecutor(num_threads=min(THREADS, len(os.sched_getaffinity(0))))
        fill_next_token_bitmask_par(self._executor, [(each, i) for i, each in enumerate(matchers)], masks)
        return masks


def matched(output: Output) -> Output:
    """Its token taken in by the grammar of its request, if that has one and goes on.

    A mask that could not be computed allows the end alone: such a text is no answer.
    """
    matcher = output.request.matcher
    if matcher is None:
        return output
    goes_on = output.finish_reason is None
    if not matcher.is_error() and not (goes_on and not matcher.consume_token(output.tokens[0])):
        return output
    error = f"its grammar cannot be followed: {_reason(matcher)}"
    return Output(output.request, output.position, (), FinishReason.ERROR, error)


def _reason(matcher: LLMatcher) -> str:
    """Without the state that llguidance adds."""
    return matcher.get_error().partition("\n")[0]
