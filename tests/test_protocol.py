"""Each field is served, neutral, harmless or refused by its name."""

from __future__ import annotations

import json
import pickle
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params, shared_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionMessage,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.shared_params import response_format_json_schema
from pydantic import ValidationError

from deployments.api_error import ApiError
from deployments.constraint import JsonSchema, ResponseFormat
from deployments.protocol import (
    MAX_BODY_BYTES,
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    Message,
    StreamOptions,
    TextPart,
    parse,
)
from deployments.wire import Wire
from tests.api_fields import CASES, HARMLESS, KINDS, UNSERVED, USER, Kind

CHAT: dict[str, Any] = {"model": "demo", "messages": [USER]}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "Hi"}
BASES: dict[Kind, dict[str, Any]] = {ChatRequest: CHAT, CompletionRequest: COMPLETION}
both = pytest.mark.parametrize("kind", KINDS)


def refused(body: bytes | dict[str, Any], kind: Kind) -> ApiError:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse(body, kind)
    error = json.loads(caught.value.body())
    assert list(error) == ["error"]
    assert list(error["error"]) == ["message", "type", "param", "code"]
    assert error["error"]["type"] == "invalid_request_error"
    return caught.value


def accepted(body: dict[str, Any], kind: Kind) -> Any:
    return parse(json.dumps(body).encode(), kind)


# Bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"{'model': 'demo'}",
        b'{"model": "demo",}',
        b'{"model": "demo"} {}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',  # half of a character
        b'{"model": "\\udc00\\ud800"}',
        b'{"model": "a\nb"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"metadata":' * 100_000,
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:24]),
)
@both
def test_malformed_json(body: bytes, kind: Kind) -> None:
    error = refused(body, kind)
    assert (error.status, error.param, error.code) == (400, None, "invalid_json")


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"demo"', b"true"])
def test_json_that_is_no_object(body: bytes) -> None:
    assert refused(body, ChatRequest).code == "invalid_type"


def test_a_body_above_the_limit() -> None:
    """However right it would be otherwise."""
    body = json.dumps(CHAT).encode().ljust(MAX_BODY_BYTES)
    assert parse(body, ChatRequest)
    error = refused(body + b" ", ChatRequest)
    assert (error.status, error.code) == (413, "request_too_large")


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
        max_leaves=8,
    ),
    field=st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})),
)
@both
def test_whatever_is_sent_is_served_or_refused_by_name(kind: Kind, field: str, value: Any) -> None:
    try:
        accepted(BASES[kind] | {field: value}, kind)
    except ApiError as error:
        named = (error.param or "").startswith((field, "stream_options"))
        # Lone surrogates, which Python writes, are no JSON at all.
        if error.status != 400 or not (named or error.code == "invalid_json"):
            raise


# Names


@both
def test_unknown_fields(kind: Kind) -> None:
    error = refused(BASES[kind] | {"temprature": 1}, kind)
    assert (error.status, error.param, error.code) == (400, "temprature", "unknown_parameter")
    assert "temprature" in error.message


@pytest.mark.parametrize(
    ("field", "inner"),
    [
        ("messages[0].contant", {"messages": [{"role": "user", "content": "", "contant": ""}]}),
        (
            "messages[0].content[0].txt",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "txt": 1}]}]},
        ),
        ("stream_options.usage", {"stream": True, "stream_options": {"usage": True}}),
    ],
)
def test_unknown_fields_of_parts(field: str, inner: dict[str, Any]) -> None:
    error = refused(CHAT | inner, ChatRequest)
    assert (error.param, error.code) == (field, "unknown_parameter")


MANY = dict.fromkeys(map(str, range(1000)), 0)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, MANY),
        (ChatRequest, {"messages": [USER | MANY]}),
        (ChatRequest, {"messages": [{}] * 1000}),
        (ChatRequest, {"stop": [1] * 30}),
        (CompletionRequest, {"prompt": [1, *["a"] * 1000]}),
        (CompletionRequest, {"prompt": ["a", *[1] * 1000]}),
        (CompletionRequest, {"prompt": [[1], *["a"] * 1000]}),
        (CompletionRequest, {"prompt": [[1, *["a"] * 1000]]}),
    ],
)
def test_a_thousand_mistakes_make_few_errors(kind: Kind, fields: dict[str, Any]) -> None:
    """A body of a million would take a gigabyte to refuse."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(BASES[kind] | fields)
    assert caught.value.error_count() <= 2


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ResponseFormat, shared_params.ResponseFormatText),
        (ResponseFormat, shared_params.ResponseFormatJSONObject),
        (ResponseFormat, shared_params.ResponseFormatJSONSchema),
        (JsonSchema, response_format_json_schema.JSONSchema),
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (StreamOptions, ChatCompletionStreamOptionsParam),
        (TextPart, ChatCompletionContentPartTextParam),
        (Message, ChatCompletionSystemMessageParam),
        (Message, ChatCompletionDeveloperMessageParam),
        (Message, ChatCompletionUserMessageParam),
        (Message, ChatCompletionAssistantMessageParam),
        (Message, ChatCompletionToolMessageParam),
    ],
)
def test_every_field_of_openais_client_is_known(ours: type[Wire], theirs: type) -> None:
    """Decided on one by one, that is; which way is in the tests below."""
    assert typing.get_type_hints(theirs).keys() <= ours.names()


# Values


@pytest.mark.parametrize(
    ("kind", "field", "right", "wrong"), CASES, ids=[f"{case[0].__name__}.{case[1]}" for case in CASES]
)
def test_values(kind: Kind, field: str, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert getattr(accepted(BASES[kind] | {field: value}, kind), field) is not ...
    for value in wrong:
        error = refused(BASES[kind] | {field: value}, kind)
        assert (error.status, error.param) == (400, field), value
        assert error.code in ("invalid_value", "invalid_type", "unsupported_parameter")
        assert f"'{field}'" in error.message
        assert (error.code == "unsupported_parameter") == ((kind, field) in UNSERVED)


def test_every_field_has_its_cases() -> None:
    for kind in KINDS:
        with_cases = {case[1] for case in [*CASES, *HARMLESS] if case[0] is kind}
        assert with_cases == kind.model_fields.keys()


@pytest.mark.parametrize(("kind", "field"), HARMLESS)
def test_harmless_fields(kind: Kind, field: str) -> None:
    for value in ["x", 1, True, None, {"a": [1.5]}]:
        accepted(BASES[kind] | {field: value}, kind)


@both
def test_missing_fields(kind: Kind) -> None:
    for field in BASES[kind]:
        error = refused({name: value for name, value in BASES[kind].items() if name != field}, kind)
        assert (error.param, error.code) == (field, "missing_required_parameter")


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "seed"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_json_has_not_are_refused_by_field(field: str, number: str) -> None:
    body = json.dumps(CHAT)[:-1] + f', "{field}": {number}}}'
    assert refused(body.encode(), ChatRequest).param == field


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (["a", ""], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, 1.5], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([None], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], [2, "a"]], "prompt[1][1]"),
        ([[1], [2, -1]], "prompt[1][1]"),
        ([[[1]]], "prompt[0][0]"),
        ([{}], "prompt[0]"),
    ],
)
def test_lists_of_prompts_name_the_wrong_one(prompt: Any, param: str) -> None:
    assert refused(COMPLETION | {"prompt": prompt}, CompletionRequest).param == param


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stop", ["a", ""], "stop[1]"),
        ("stop", ["a", 1], "stop[1]"),
        ("stop_token_ids", [1, -1], "stop_token_ids[1]"),
    ],
)
def test_lists_name_the_wrong_element(field: str, value: Any, param: str) -> None:
    assert refused(CHAT | {field: value}, ChatRequest).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, ".content"),
        ({"content": "a"}, ".role"),
        ({"role": "robot", "content": "a"}, ".role"),
        ({"role": 3, "content": "a"}, ".role"),
        ({"role": "user", "content": 3}, ".content"),
        ({"role": "user", "content": None}, ".content"),
        ({"role": "assistant", "content": None}, ".content"),
        ({"role": "user", "content": []}, ".content"),
        ({"role": "user", "content": {"type": "text", "text": "a"}}, ".content"),
        ({"role": "user", "content": ["a"]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text"),
        ({"role": "user", "content": [{"text": "a"}]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, ".content[0].text"),
        ({"role": "user", "content": "a", "name": 3}, ".name"),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, ".tool_calls"),
        ({"role": "assistant", "content": "a", "function_call": {}}, ".function_call"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, ".audio"),
        ({"role": "assistant", "content": "a", "refusal": "No."}, ".refusal"),
        ("a", ""),
        (None, ""),
    ],
)
def test_messages(message: Any, param: str) -> None:
    error = refused(CHAT | {"messages": [USER, message]}, ChatRequest)
    assert (error.status, error.param) == (400, f"messages[1]{param}")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "refusal", "refusal": "No."},
    ],
)
def test_parts_that_are_no_text(part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "What is this?"}, part]
    error = refused(CHAT | {"messages": [{"role": "user", "content": content}]}, ChatRequest)
    assert (error.param, error.code) == ("messages[0].content[1].type", "unsupported_value")
    assert part["type"] in error.message


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_roles(role: str) -> None:
    """Which of them a model takes, its template says."""
    messages = [{"role": role, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    [message] = accepted(CHAT | {"messages": messages}, ChatRequest).messages
    assert (message.role, message.text) == (role, "a\nb")


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    answer = ChatCompletionMessage(role="assistant", content="Hello.").model_dump()
    assert len(answer) > 2
    request = accepted(CHAT | {"messages": [USER, answer]}, ChatRequest)
    assert request.messages[1].text == "Hello."


# What fields mean together


def test_two_names_of_one_limit() -> None:
    accepted(CHAT | {"max_tokens": 5, "max_completion_tokens": 5}, ChatRequest)
    error = refused(CHAT | {"max_tokens": 5, "max_completion_tokens": 6}, ChatRequest)
    assert error.param == "max_tokens"


def test_log_probabilities() -> None:
    """A chat asks for those of the chosen tokens first, and may then ask for others."""
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ]
    for fields, expected in cases:
        assert accepted(CHAT | fields, ChatRequest).num_logprobs == expected
    for fields in ({"top_logprobs": 1}, {"top_logprobs": 1, "logprobs": False}):
        error = refused(CHAT | fields, ChatRequest)
        assert (error.param, error.code) == ("top_logprobs", "invalid_value")
    assert refused(CHAT | {"logprobs": True, "top_logprobs": 21}, ChatRequest).param == "top_logprobs"
    assert accepted(COMPLETION, CompletionRequest).num_logprobs is None
    assert accepted(COMPLETION | {"logprobs": 0}, CompletionRequest).num_logprobs == 0


@both
def test_log_probabilities_of_prompts_are_unknown(kind: Kind) -> None:
    error = refused(BASES[kind] | {"prompt_logprobs": 1}, kind)
    assert (error.param, error.code) == ("prompt_logprobs", "unknown_parameter")


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": fields}


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        ({}, ".type", "missing_required_parameter"),
        ({"type": "xml"}, ".type", "invalid_value"),
        ({"type": "structural_tag"}, ".type", "invalid_value"),
        ({"type": "text", "schema": {}}, ".schema", "unknown_parameter"),
        ({"type": "text", "json_schema": {"name": "a"}}, ".json_schema", "invalid_value"),
        ({"type": "json_schema"}, ".json_schema", "missing_required_parameter"),
        ({"type": "json_schema", "json_schema": {}}, ".json_schema.name", "missing_required_parameter"),
        *(
            (json_schema(name=name), ".json_schema.name", "invalid_value")
            for name in ("", "a b", "é", "a\n", "a" * 65)
        ),
        (json_schema(name="a", schema="{}"), ".json_schema.schema", "invalid_type"),
        (json_schema(name="a", schema=True), ".json_schema.schema", "invalid_type"),
        (json_schema(name="a", strict=1), ".json_schema.strict", "invalid_type"),
        (json_schema(name="a", description=1), ".json_schema.description", "invalid_type"),
        (json_schema(name="a", schema_={}), ".json_schema.schema_", "unknown_parameter"),
    ],
)
@both
def test_response_formats(kind: Kind, value: Any, param: str, code: str) -> None:
    error = refused(BASES[kind] | {"response_format": value}, kind)
    assert (error.status, error.param, error.code) == (400, f"response_format{param}", code)


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        ({"json": 3}, ".json", "invalid_type"),
        ({"json": [1]}, ".json", "invalid_type"),
        ({"regex": 3}, ".regex", "invalid_type"),
        ({"choice": "a"}, ".choice", "invalid_type"),
        ({"choice": []}, ".choice", "invalid_value"),
        ({"choice": ["a", 3]}, ".choice[1]", "invalid_type"),
        ({"grammar": {}}, ".grammar", "invalid_type"),
        ({"json_object": False}, ".json_object", "unsupported_parameter"),
        ({"json_object": 1}, ".json_object", "unsupported_parameter"),
        ({"structural_tag": "{}"}, ".structural_tag", "unsupported_parameter"),
        ({"whitespace_pattern": " "}, ".whitespace_pattern", "unsupported_parameter"),
        ({"disable_any_whitespace": True}, ".disable_any_whitespace", "unsupported_parameter"),
        ({"disable_additional_properties": True}, ".disable_additional_properties", "unsupported_parameter"),
        ({"regexp": "a"}, ".regexp", "unknown_parameter"),
        ({"json_": {}}, ".json_", "unknown_parameter"),
    ],
)
@both
def test_structured_outputs(kind: Kind, value: Any, param: str, code: str) -> None:
    error = refused(BASES[kind] | {"structured_outputs": value}, kind)
    assert (error.status, error.param, error.code) == (400, f"structured_outputs{param}", code)


@both
def test_one_constraint_at_most(kind: Kind) -> None:
    """And none is None, so that nothing is paid for it."""
    outputs, anything, an_object = {"regex": "a"}, {"type": "text"}, {"type": "json_object"}
    nothing: list[dict[str, Any]] = [
        {},
        {"response_format": anything},
        {"response_format": None, "structured_outputs": None},
    ]
    for fields in nothing:
        assert accepted(BASES[kind] | fields, kind).constraint is None
    request = accepted(BASES[kind] | {"response_format": an_object}, kind)
    assert request.constraint is request.response_format
    request = accepted(BASES[kind] | {"response_format": anything, "structured_outputs": outputs}, kind)
    assert request.constraint is request.structured_outputs
    error = refused(BASES[kind] | {"response_format": an_object, "structured_outputs": outputs}, kind)
    assert (error.param, error.code) == ("structured_outputs", "invalid_value")


@both
def test_older_names_of_structured_outputs_are_unknown(kind: Kind) -> None:
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        assert refused(BASES[kind] | {name: "a"}, kind).code == "unknown_parameter"


def test_best_of_those_that_are_returned() -> None:
    assert accepted(COMPLETION | {"n": 3, "best_of": 3}, CompletionRequest).choices == 3
    assert refused(COMPLETION | {"n": 3, "best_of": 4}, CompletionRequest).param == "best_of"


def test_choices_of_all_prompts_are_limited() -> None:
    prompt = ["a"] * (MAX_CHOICES // 4)
    accepted(COMPLETION | {"prompt": prompt, "n": 4}, CompletionRequest)
    assert refused(COMPLETION | {"prompt": prompt, "n": 5}, CompletionRequest).param == "n"


def test_options_of_a_stream() -> None:
    request = accepted(CHAT | {"stream": True, "stream_options": {"include_usage": True}}, ChatRequest)
    assert request.include_usage
    request = accepted(CHAT | {"stream": True, "stream_options": {"include_obfuscation": False}}, ChatRequest)
    assert not request.include_usage
    assert not accepted(CHAT | {"stream": True}, ChatRequest).include_usage
    error = refused(CHAT | {"stream": True, "stream_options": {"include_usage": 1}}, ChatRequest)
    assert error.param == "stream_options.include_usage"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_prompts_one_by_one(prompt: Any, prompts: list[Any]) -> None:
    assert accepted(COMPLETION | {"prompt": prompt}, CompletionRequest).prompts == prompts


@pytest.mark.parametrize(("stop", "strings"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([], []), (None, [])])
def test_stop_strings(stop: Any, strings: list[str]) -> None:
    assert accepted(CHAT | {"stop": stop}, ChatRequest).stop_strings == strings


# Errors


def test_an_error_travels_between_processes() -> None:
    error = ApiError(400, "No.", param="n", code="invalid_value")
    again = pickle.loads(pickle.dumps(error))
    assert (again.status, again.body(), str(again)) == (400, error.body(), "No.")


def test_other_errors() -> None:
    assert (ApiError.model_not_found("x").status, ApiError.model_not_found("x").param) == (404, "model")
    assert len(ApiError.model_not_found("x" * 10**6).body()) < 1000
    assert (ApiError.server_error().status, ApiError.server_error(status=503).status) == (500, 503)


def test_an_error_does_not_repeat_what_it_was_sent() -> None:
    """A megabyte of wrong value makes no megabyte of error."""
    long = "x" * 10**6
    fields: list[dict[str, Any]] = [
        {long: 1},
        {"temperature": long},
        {"tools": [long]},
        {"messages": [{"role": long, "content": ""}]},
        {"messages": [{"role": "user", "content": [{"type": long}]}]},
    ]
    for each in fields:
        assert len(refused(CHAT | each, ChatRequest).body()) < 1000
