"""What a client gets: whole answers, the events of a stream, the list of models. All as encoded JSON."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.api_error import ApiError
from deployments.token_logprobs import TokenLogprobs, chat_logprobs, completion_logprobs
from engine.request import FinishReason

DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""

encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One finished answer."""

    text: str
    finish_reason: str
    """`stop` or `length`, all that OpenAI's clients know."""
    stop_reason: str | None = None
    """See `stop_reason` below."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of each token, if asked for."""


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, over all its prompts and answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _Answer:
    """Identity of one answer, the same in all its events."""

    def __init__(self, model: str, chat: bool) -> None:
        self.chat = chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not tokens:
            return None
        return chat_logprobs(tokens) if self.chat else completion_logprobs(tokens)


class WholeAnswer(_Answer):
    """An answer that is sent when it is complete."""

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """JSON of a chat completion or a completion; `choices` in the order of their index."""
        kind = "chat.completion" if self.chat else "text_completion"
        body = self._body(kind, [self._choice(index, choice) for index, choice in enumerate(choices)])
        return encode(body | {"usage": usage.body()})

    def _choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"text": choice.text}
        if self.chat:
            message = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {"index": index, **message, "logprobs": self._logprobs(choice.logprobs)} | _ending(
            choice.finish_reason, choice.stop_reason
        )


class StreamedAnswer(_Answer):
    """An answer that is sent as server-sent events, one for each piece of text.

    Per choice: `start`, any number of `delta`s, `finish`; then `usage` if asked for, and `DONE`.
    """

    def __init__(self, model: str, chat: bool, include_usage: bool, choices: int) -> None:
        super().__init__(model, chat)
        self._include_usage = include_usage
        # An event for one token differs from the next in its text alone: encode the rest once.
        mark = "\x00"
        self._around = [
            tuple(self._event(index, mark).rsplit(encode(mark), maxsplit=1)) for index in range(choices)
        ]

    def start(self, index: int) -> bytes:
        """The event that opens a choice: a chat's role; nothing for a completion."""
        return self._event(index, "", role="assistant") if self.chat else b""

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        """The event that adds `text` and `logprobs` to a choice; nothing if both are empty."""
        if logprobs:
            return self._event(index, text, logprobs=logprobs)
        if not text:
            return b""
        head, tail = self._around[index]
        return head + encode(text) + tail

    def finish(self, index: int, reason: str, stop_reason: str | None = None) -> bytes:
        """The last event of a choice."""
        return self._event(index, None, reason=reason, stop_reason=stop_reason)

    def usage(self, usage: Usage) -> bytes:
        """The event of the token counts, after all choices; nothing if the client didn't ask for it."""
        if not self._include_usage:
            return b""
        return self._sse(self._chunk([]) | {"usage": usage.body()})

    def _event(
        self,
        index: int,
        text: str | None,
        role: str | None = None,
        reason: str | None = None,
        stop_reason: str | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> bytes:
        piece: dict[str, Any] = {"text": text or ""}
        if self.chat:
            delta = {"role": role, "content": text}
            piece = {"delta": {key: value for key, value in delta.items() if value is not None}}
        choice = {"index": index, **piece, "logprobs": self._logprobs(logprobs)}
        choice |= _ending(reason, stop_reason)
        return self._sse(self._chunk([choice]))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body("chat.completion.chunk" if self.chat else "text_completion", choices)
        return body | {"usage": None} if self._include_usage else body

    @staticmethod
    def _sse(body: dict[str, Any]) -> bytes:
        return b"data: " + encode(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event that ends a stream which failed after it began; nothing follows it, not `DONE` either."""
    return b"data: " + error.body() + b"\n\n"


def finish_reason(reason: FinishReason) -> str:
    """OpenAI's word for how a sequence ended. ABORT and ERROR are no answers: the caller sends an error."""
    return "stop" if reason is FinishReason.STOP else "length"


def stop_reason(reason: FinishReason) -> str | None:
    """vLLM's field for more than OpenAI's word tells: which limit it was, where it was not one of length."""
    return "timeout" if reason is FinishReason.TIMEOUT else None


def _ending(reason: str | None, more: str | None) -> dict[str, str | None]:
    return {"finish_reason": reason} | ({"stop_reason": more} if more else {})


def model_list(model: str, created: int, context_length: int) -> bytes:
    """The body of `/v1/models`. `created`: Unix time in seconds; `context_length`: tokens."""
    card = model_card(model, created, context_length)
    return encode({"object": "list", "data": [card]})


def model_card(model: str, created: int, context_length: int) -> dict[str, Any]:
    """One entry of the list, and the body of `/v1/models/{model}`."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "stepahead",
        "max_model_len": context_length,
    }
