"""Which tokens may come next in texts that have to follow a grammar, given all that each has so far."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from engine.request import FinishReason, Output, Request, RequestError

if TYPE_CHECKING:  # a benchmark goes without it
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

THREADS = 8
"""That compute masks, at most: some 20 µs each, while the device computes what they are for."""


class Grammars:
    """What is known of a model's tokens. Safe to use from several threads."""

    def __init__(self, load: Callable[[], LLTokenizer | None] = lambda: None) -> None:
        """`load` takes long: it runs in a thread, and whoever needs a grammar first waits for it."""
        loading = ThreadPoolExecutor(1, "vocabulary")
        self._loaded = loading.submit(load)
        loading.shutdown(wait=False)
        self._executor: LLExecutor | None = None

    def start(self, request: Request) -> LLMatcher | None:
        """What follows the text of a request, if that has a grammar; what it has generated, taken in.

        Raises `RequestError` naming the field.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        vocabulary = self._loaded.result()
        if vocabulary is None:
            raise RequestError("there is no tokenizer with this model that grammars could use", "grammar")
        from llguidance import LLMatcher

        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the grammar is wrong: {matcher.get_error()}", "grammar")
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
    """Its token taken in by the grammar of its request, if that has one and goes on."""
    matcher = output.request.matcher
    if matcher is None or output.finish_reason is not None or matcher.consume_token(output.tokens[0]):
        return output
    return msgspec.structs.replace(output, finish_reason=FinishReason.ERROR, error=matcher.get_error())
