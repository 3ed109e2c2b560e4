"""What OpenAI's own client makes of the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from deployments.api_error import ApiError
from deployments.responses import (
    DONE,
    FinishedChoice,
    StreamedAnswer,
    Usage,
    WholeAnswer,
    error_event,
    finish_reason,
    model_card,
    model_list,
    stop_reason,
)
from deployments.token_logprobs import LogprobsReader, TokenLogprobs
from engine.request import FinishReason, Logprobs

TEXT = st.text(st.characters(codec="utf-8"))
USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=3)


def data(event: bytes) -> Any:
    """The JSON of one server-sent event, checked to be exactly one."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event.removeprefix(b"data: "))


def nothing_unknown(model: BaseModel) -> None:
    """OpenAI's types take any field; here each is one that they name."""
    assert not model.model_extra
    for name in type(model).model_fields:
        value = getattr(model, name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, BaseModel):
                nothing_unknown(inner)


def logprobs(values: list[list[float]]) -> list[TokenLogprobs]:
    """Of tokens that are parts of characters, with these values of the likeliest."""
    reader = LogprobsReader(lambda token: bytes([0xE4 + token]), [])
    return reader.read([0] * len(values), [Logprobs(-1, list(range(len(each))), each) for each in values])


@given(texts=st.lists(TEXT, min_size=1, max_size=3))
def test_a_chat_completion(texts: list[str]) -> None:
    body = WholeAnswer("demo", chat=True).body([FinishedChoice(text, "stop") for text in texts], USAGE)
    answer = ChatCompletion.model_validate_json(body)
    nothing_unknown(answer)
    assert [choice.message.content for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert (answer.model, answer.object) == ("demo", "chat.completion")
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


@given(texts=st.lists(TEXT, min_size=1, max_size=3))
def test_a_completion(texts: list[str]) -> None:
    body = WholeAnswer("demo", chat=False).body([FinishedChoice(text, "length") for text in texts], USAGE)
    answer = Completion.model_validate_json(body)
    nothing_unknown(answer)
    assert [choice.text for choice in answer.choices] == texts
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.object, answer.id[:5]) == ("text_completion", "cmpl-")


@given(texts=st.lists(TEXT, max_size=4), choices=st.integers(1, 3), include_usage=st.booleans())
def test_a_streamed_chat(texts: list[str], choices: int, include_usage: bool) -> None:
    answer = StreamedAnswer("demo", True, include_usage, choices)
    index = choices - 1
    events = [
        answer.start(index),
        *(answer.delta(index, text) for text in texts),
        answer.finish(index, "stop"),
    ]
    chunks = [ChatCompletionChunk.model_validate(data(event)) for event in events if event]
    assert len(chunks) == 2 + sum(text != "" for text in texts)
    for chunk in chunks:
        nothing_unknown(chunk)
        assert (chunk.id, chunk.created, chunk.model) == (answer.id, answer.created, "demo")
        assert chunk.choices[0].index == index
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(texts)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


@given(texts=st.lists(TEXT, max_size=4))
def test_a_streamed_completion(texts: list[str]) -> None:
    answer = StreamedAnswer("demo", False, False, 1)
    assert answer.start(0) == b""
    events = [*(answer.delta(0, text) for text in texts), answer.finish(0, "length")]
    # As the client makes them: OpenAI's type does not allow for the null that OpenAI's server sends.
    chunks = [Completion.construct(**data(event)) for event in events if event]
    for chunk in chunks:
        nothing_unknown(chunk)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "".join(texts)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@given(values=st.lists(st.lists(st.floats(-9999, 0), max_size=4), min_size=1, max_size=3), text=TEXT)
def test_log_probabilities(values: list[list[float]], text: str) -> None:
    """The same in a stream and in a whole answer, where a token brings no text, too."""
    tokens = logprobs(values)
    choice = FinishedChoice(text, "stop", None, tokens)

    body = WholeAnswer("demo", chat=True).body([choice, FinishedChoice(text, "stop")], USAGE)
    whole = ChatCompletion.model_validate_json(body)
    nothing_unknown(whole)
    assert whole.choices[1].logprobs is None
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content
    assert entries is not None
    assert [(entry.token, entry.logprob) for entry in entries] == [("\ufffd", -1)] * len(values)
    assert [[each.logprob for each in entry.top_logprobs] for entry in entries] == values
    chunk = ChatCompletionChunk.model_validate(
        data(StreamedAnswer("demo", True, True, 1).delta(0, text, tokens))
    )
    nothing_unknown(chunk)
    [streamed] = chunk.choices
    assert streamed.logprobs is not None and streamed.delta.content == text
    assert streamed.logprobs.content == entries

    body = WholeAnswer("demo", chat=False).body([choice], USAGE)
    completion = Completion.model_validate_json(body)
    nothing_unknown(completion)
    legacy = completion.choices[0].logprobs
    assert legacy is not None
    assert legacy.tokens == ["\ufffd"] * len(values)
    assert legacy.token_logprobs == [-1] * len(values)
    streamed_event = data(StreamedAnswer("demo", False, False, 1).delta(0, text, tokens))
    assert streamed_event["choices"][0]["text"] == text
    assert Completion.construct(**streamed_event).choices[0].logprobs == legacy


def test_without_log_probabilities_each_event_says_so() -> None:
    for chat in (True, False):
        answer = StreamedAnswer("demo", chat, False, 1)
        for event in (answer.start(0), answer.delta(0, "a"), answer.finish(0, "stop")):
            assert not event or data(event)["choices"][0]["logprobs"] is None
        assert answer.delta(0, "", []) == b""


@pytest.mark.parametrize("chat", [True, False])
def test_usage_in_a_stream(chat: bool) -> None:
    """A last chunk of no choice; the others say that it is to come, and without asking there is none."""
    answer = StreamedAnswer("demo", chat, True, 1)
    assert data(answer.delta(0, "a"))["usage"] is None
    last = data(answer.usage(USAGE))
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 12)
    assert last["id"] == answer.id
    answer = StreamedAnswer("demo", chat, False, 1)
    assert answer.usage(USAGE) == b""
    assert "usage" not in data(answer.delta(0, "a"))


@pytest.mark.parametrize("model", ["\x00", 'a"b\\', "org/name", "é"])
def test_a_models_name_may_hold_anything(model: str) -> None:
    answer = StreamedAnswer(model, True, False, 1)
    assert data(answer.delta(0, "\x00"))["choices"][0]["delta"]["content"] == "\x00"
    assert data(answer.delta(0, "a"))["model"] == model


def test_ids_differ() -> None:
    assert len({WholeAnswer("demo", True).id for _ in range(100)}) == 100


def test_an_error_inside_a_stream() -> None:
    assert data(error_event(ApiError.server_error("Gone.")))["error"]["message"] == "Gone."
    assert DONE == b"data: [DONE]\n\n"


def test_finish_reasons() -> None:
    assert finish_reason(FinishReason.STOP) == "stop"
    assert finish_reason(FinishReason.LENGTH) == "length"
    assert finish_reason(FinishReason.TIMEOUT) == "length"
    assert [stop_reason(reason) for reason in (FinishReason.STOP, FinishReason.TIMEOUT)] == [None, "timeout"]


def test_models() -> None:
    body = json.loads(model_list("demo", 1_700_000_000, 8192))
    assert body == {"object": "list", "data": [model_card("demo", 1_700_000_000, 8192)]}
    model = Model.model_validate(body["data"][0])
    assert (model.id, model.object, model.created) == ("demo", "model", 1_700_000_000)
    assert body["data"][0]["max_model_len"] == 8192  # as vLLM has it
