"""Log-probabilities as a client reads them: with texts for tokens, in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.detokenizer import Detokenizer
from engine.request import Logprobs

LEAST = -9999.0
"""What stands for no probability at all, as in OpenAI's API: JSON has no infinities."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A token that could be chosen. `text` is its UTF-8 amid a text: part of a character, maybe."""

    text: bytes
    logprob: float

    def named(self) -> tuple[str, float]:
        return self.text.decode(errors="replace"), self.logprob

    def body(self) -> dict[str, Any]:
        token, logprob = self.named()
        return {"token": token, "logprob": logprob, "bytes": list(self.text)}


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """What there is to tell of one generated token."""

    chosen: Candidate
    likeliest: list[Candidate]
    offset: int
    """Characters of the generated text before the one that the token begins in."""


class LogprobsReader:
    """Gives the tokens of one sequence their texts."""

    def __init__(self, token_bytes: Callable[[int], bytes], prompt: Sequence[int]) -> None:
        """As of a `Detokenizer`."""
        self._bytes = token_bytes
        self._text = Detokenizer(token_bytes, prompt=prompt)  # holds nothing back for a stop string
        self._offset = 0

    def read(self, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> list[TokenLogprobs]:
        """For each of the next tokens; `logprobs` is as long as `tokens`."""
        read = []
        for token, each in zip(tokens, logprobs, strict=True):
            likeliest = list(map(self._candidate, each.likeliest, each.values))
            read.append(TokenLogprobs(self._candidate(token, each.token), likeliest, self._offset))
            self._offset += len(self._text.push([token]))
        return read

    def _candidate(self, token: int, logprob: float) -> Candidate:
        return Candidate(self._bytes(token), max(LEAST, logprob))


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`logprobs` of a choice of a chat."""
    content = [
        each.chosen.body() | {"top_logprobs": [other.body() for other in each.likeliest]} for each in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`logprobs` of a choice of a completion."""
    chosen = [each.chosen.named() for each in tokens]
    return {
        "text_offset": [each.offset for each in tokens],
        "token_logprobs": [logprob for _, logprob in chosen],
        "tokens": [token for token, _ in chosen],
        "top_logprobs": [_by_name(each) for each in tokens],
    }


def _by_name(token: TokenLogprobs) -> dict[str, float]:
    """Of the chosen token in any case, then of the likeliest."""
    named = dict([token.chosen.named()])
    for each in token.likeliest:
        named.setdefault(*each.named())  # parts of characters read the same: the likeliest of them counts
    return named
