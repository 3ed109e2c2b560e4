"""What a client may send to the OpenAI HTTP API.

One rule decides about fields of OpenAI's and vLLM's APIs. What this serves is a field with a type. What would
change the text, and is not served, is refused unless its value is neutral. What changes nothing is accepted.
A name that this does not know is refused: it is most likely a misspelt one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from deployments.api_error import ApiError
from deployments.constraint import ResponseFormat, StructuredOutputs
from deployments.wire import Wire, only, refusal
from engine.request import MAX_BIASES, MAX_LOGPROBS

MAX_BODY_BYTES = 8 << 20
"""A longer body is refused unread. Parsing this much takes 0.02 s for a text, 0.5 s at the very worst."""
MAX_CHOICES = 1024
"""Sequences that one HTTP request may ask for: prompts times `n`."""
MAX_MESSAGES = 2048
MAX_STOP = 32

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def _biases(value: Any) -> tuple[tuple[int, float], ...] | None:
    """From token ids as text, as JSON has them. One error for all, since a body may have a million."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "it must map token ids to numbers")
    good = len(value) <= MAX_BIASES and all(
        _TOKEN_ID.fullmatch(token) and type(bias) in (int, float) and -100 <= bias <= 100
        for token, bias in value.items()
    )
    if not good:
        raise PydanticCustomError(
            "invalid_value",
            "it must map at most {most} token ids to numbers from -100 to 100",
            {"most": MAX_BIASES},
        )
    return tuple((int(token), bias) for token, bias in value.items())


class TextPart(Wire):
    """One text of several in a message."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = None  # without effect on the text

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(kind := data.get("type"), str) and kind != "text":
            raise PydanticCustomError(
                "unsupported_value",
                "only parts of type 'text' are supported, not '{kind}'",
                {"name": "type", "kind": kind[:100]},
            )
        return data


def _one_or_list(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<one>"


class Message(Wire):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag("<one>")]
        | Annotated[list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True), Tag("<list>")],
        Discriminator(_one_or_list),
    ]
    name: str | None = None
    tool_call_id: str | None = None
    # What an assistant's message carries when a client sends it back as it came.
    tool_calls: Annotated[Any, only([])] = None
    annotations: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only()] = None
    audio: Annotated[Any, only()] = None
    refusal: Annotated[Any, only()] = None
    reasoning_content: Annotated[Any, only()] = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return (
            self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        )


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: Any = None


StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class GenerationRequest(Wire):
    """What both kinds of request have in common. None is 'as the model or the API has it by default'."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: (
        Annotated[
            Annotated[StopString, Tag("<one>")]
            | Annotated[list[StopString], Field(max_length=MAX_STOP, fail_fast=True), Tag("<list>")],
            Discriminator(_one_or_list),
        ]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[Any, AfterValidator(_biases)] = None
    # vLLM's own.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    # Seconds from here to its end, and to its first step. No API has a name for them.
    timeout: Annotated[float, Field(gt=0)] | None = None
    queue_timeout: Annotated[float, Field(gt=0)] | None = None
    # Who asks, for fair shares: OpenAI's older and its newer name.
    user: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    # What the text has to be: OpenAI's and vLLM's.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Known, not served.
    min_tokens: Annotated[Any, only(0)] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    # Without effect on the text.
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "invalid_value", "it needs 'stream' to be true", {"name": "stream_options"}
            )
        return self

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        if self.structured_outputs is not None and self.constraint is not self.structured_outputs:
            raise PydanticCustomError(
                "invalid_value",
                "'response_format' constrains the text already",
                {"name": "structured_outputs"},
            )
        return self

    @property
    def constraint(self) -> ResponseFormat | StructuredOutputs | None:
        """What the text has to be, where it may not be anything."""
        if self.response_format is not None and self.response_format.type != "text":
            return self.response_format
        return self.structured_outputs

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    # Known, not served.
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None
    moderation: Annotated[Any, only()] = None
    # Without effect on the text.
    parallel_tool_calls: Any = None
    prediction: Any = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                "invalid_value",
                "it differs from 'max_completion_tokens', whose older name it is",
                {"name": "max_tokens"},
            )
        return self

    @model_validator(mode="after")
    def _likeliest_beside_the_chosen(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "invalid_value", "it needs 'logprobs' to be true", {"name": "top_logprobs"}
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Of the likeliest tokens, those to be told beside each chosen one; None tells of none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<ids>"


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag("<text>")]
        | Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
            Tag("<texts>"),
        ]
        | Annotated[TokenIds, Tag("<ids>")]
        | Annotated[
            list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), Tag("<lists>")
        ],
        Discriminator(_kind_of_prompt),
    ]
    logprobs: NumLogprobs | None = None
    # Known, not served.
    best_of: int | None = None
    suffix: Annotated[Any, only("")] = None
    echo: Annotated[Any, only(False)] = None

    @model_validator(mode="after")
    def _choices(self) -> Self:
        if self.best_of not in (None, self.choices):
            raise PydanticCustomError(
                "unsupported_parameter",
                "this server supports only the value of 'n' here",
                {"name": "best_of"},
            )
        if len(self.prompts) * self.choices > MAX_CHOICES:
            raise PydanticCustomError(
                "invalid_value", f"prompts times n must be at most {MAX_CHOICES}", {"name": "n"}
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """As of a `ChatRequest`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, each a text or token ids."""
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse(body: bytes, kind: type[RequestT]) -> RequestT:
    """The request in a body of JSON.

    Raises `ApiError`: 413 above `MAX_BODY_BYTES`, else 400 whose `param` names the field.
    """
    if len(body) > MAX_BODY_BYTES:
        raise ApiError.too_large(MAX_BODY_BYTES)
    try:
        data = from_json(body)  # takes NaN, which the fields then refuse by name
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_type")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise refusal(error) from None
