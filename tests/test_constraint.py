"""What a request asks its text to be, and the texts that its grammar takes."""

from __future__ import annotations

import json
import signal
import sys
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from deployments import constraint, demo_model
from deployments.api_error import ApiError
from deployments.constraint import MAX_GRAMMAR_CHARS, ResponseFormat, StructuredOutputs, from_choices
from tests.small_tokenizers import wrapped


@cache
def tokenizers() -> list[LLTokenizer]:
    """One that can write any text, and a real model's, which has no token for some control characters."""
    demo: Any = AutoTokenizer.from_pretrained(demo_model.resolve("demo"))
    return [from_tokenizer(wrapped("byte_level")), from_tokenizer(demo)]


def takes(grammar: str, text: str) -> bool:
    """Whether the text may come, and may end there."""
    answers = []
    for tokenizer in tokenizers():
        tokens = tokenizer.greedy_tokenize(text)
        if tokenizer.decode_bytes(tokens) == text.encode():
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            answers.append(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
    [answer] = {*answers}
    return answer


def response_format(schema: Any, **more: Any) -> ResponseFormat:
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}
    return ResponseFormat.model_validate(format)


def outputs(**field: Any) -> StructuredOutputs:
    return StructuredOutputs.model_validate(field)


def refusal(asked: ResponseFormat | StructuredOutputs) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked.grammar()
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")
    assert f"'{caught.value.param}'" in caught.value.message
    assert len(caught.value.body()) < 2500
    return caught.value


ANY_OBJECT = [
    ResponseFormat(type="json_object"),
    response_format(None),
    outputs(json_object=True),
    outputs(json='{"type": "object"}'),
]


@pytest.mark.parametrize("asked", ANY_OBJECT)
def test_any_object_of_json(asked: ResponseFormat | StructuredOutputs) -> None:
    grammar = asked.grammar()
    for text in ("{}", '{"a": [1, {"é": null}], "b": "\\n"}', '{\n  "a": 1\n}'):
        assert takes(grammar, text), text
    for text in ("", "[]", "3", '"a"', "{", "{'a': 1}", '{"a": 1,}', "{} {}"):
        assert not takes(grammar, text), text


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "asked",
    [
        response_format(PERSON),
        response_format(PERSON, strict=False),
        response_format(PERSON, strict=True, description="Someone."),
        outputs(json=PERSON),
        outputs(json=json.dumps(PERSON)),
    ],
)
def test_a_schema(asked: ResponseFormat | StructuredOutputs) -> None:
    """Followed in any case, and its properties come in its order."""
    grammar = asked.grammar()
    assert takes(grammar, '{"name": "Ann", "age": 3}')
    for text in ('{"name": "Ann"}', '{"age": 3, "name": "Ann"}', '{"name": "Ann", "age": -3}', "{}"):
        assert not takes(grammar, text), text


def test_a_regex() -> None:
    grammar = outputs(regex='[a-z]+/"\\d{2}\n\\.é').grammar()
    assert takes(grammar, 'ab/"12\n.é')
    for text in ("", 'ab/"12\n.', 'ab/"12\n.éé', 'AB/"12\n.é', 'ab/"12\nxé'):
        assert not takes(grammar, text), text


def test_a_grammar_of_lark() -> None:
    grammar = outputs(grammar='start: "(" start ")" | NUMBER\nNUMBER: /[0-9]+/').grammar()
    assert takes(grammar, "((12))")
    assert not takes(grammar, "((12)")


# Special tokens have no text to be matched; the tokenizer would read them where a choice has their names.
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8) | st.text('"\\/\n|&%{}()[]\x7f~`ab', max_size=6)


@given(
    choices=st.lists(TEXTS, min_size=1, max_size=6), others=st.lists(TEXTS, max_size=3), cut=st.integers(0, 8)
)
@example(['a"b', "\\n", "\n", "é🎊\u2028", "a\x00b", "\x7f", "%json {}", "{", "'"], ["\\", "n", "\\\\n"], 1)
@example(["ab", "a"], ["aba", "A", "a ", " a"], 1)
@example(["", "a"], ["aa", " "], 1)
def test_choices_are_taken_and_nothing_else(choices: list[str], others: list[str], cut: int) -> None:
    grammar = from_choices(choices)
    for text in choices:
        assert takes(grammar, text)
    for text in [*others, *(text[:cut] for text in choices), *(text + choices[0] for text in choices)]:
        assert takes(grammar, text) == (text in choices), text


def test_many_choices() -> None:
    """More than a parser takes alternatives."""
    choices = [f"{i:05}" for i in range(MAX_GRAMMAR_CHARS // 5)]
    grammar = outputs(choice=choices).grammar()
    assert takes(grammar, choices[-1])
    assert not takes(grammar, "99999")


# What is refused


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True},
        {"not": {}},
        {"properties": {"a": {"if": {}, "then": {}}}},
        {"oneOf": [{"type": "string"}, {"minLength": 3}]},
        {"type": "string", "format": "no such format"},
        {"type": "string", "pattern": "(?=a)"},
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"$ref": "http://localhost/schema"},
        {"$ref": "file:///etc/hostname"},
        {"minimum": float("nan")},
        {"uniqueItems": True, "x-guidance": {"lenient": True}},
        {"oneOf": [{"type": "string"}, {"minLength": 3}], "x-guidance": {"coerce_one_of": True}},
        {"x-guidance": {"nonsense": 1}},
    ],
    ids=str,
)
def test_what_is_unknown_in_a_schema_is_refused_and_not_ignored(schema: dict[str, Any]) -> None:
    assert refusal(response_format(schema)).param == "response_format.json_schema.schema"
    assert refusal(outputs(json=schema)).param == "structured_outputs.json"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("json", "{", "EOF"),
        ("json", "[1]", "object"),
        ("json", '{"minimum": NaN}', "expected"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "[", "unclosed character class"),
        ("grammar", "start: nothing", 'unknown name: "nothing"'),
        ("grammar", "", "no start rule"),
        (
            "grammar",
            '{"grammars":[{"json_schema":{}}]}',
            "expecting rule",
        ),  # llguidance's own form is no Lark
    ],
)
def test_the_reason_is_told(field: str, value: str, reason: str) -> None:
    error = refusal(outputs(**{field: value}))
    assert error.param == f"structured_outputs.{field}"
    assert reason in error.message


LONG = "a" * MAX_GRAMMAR_CHARS


@pytest.mark.parametrize(
    ("field", "fits", "too_long"),
    [
        ("regex", LONG, LONG + "a"),
        ("choice", [LONG], ["a", LONG]),
        ("grammar", f'start: "{LONG[9:]}"', f'start: "{LONG[8:]}"'),
        ("json", json.dumps({"const": LONG[13:]}), json.dumps({"const": LONG[12:]})),
        ("json", {"const": LONG[13:]}, {"const": LONG[12:]}),
    ],
    ids=["regex", "choice", "grammar", "json as text", "json"],
)
def test_lengths(field: str, fits: Any, too_long: Any) -> None:
    assert outputs(**{field: fits}).grammar()
    error = refusal(outputs(**{field: too_long}))
    assert error.param == f"structured_outputs.{field}"
    assert str(MAX_GRAMMAR_CHARS) in error.message


def test_what_does_not_end_well_is_refused_once_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    overflow = "\n".join(["start: A0", *(f'A{i}: A{i + 1} "b"' for i in range(3000)), 'A3000: "a"'])
    assert "too complex" in refusal(outputs(grammar=overflow)).message
    monkeypatch.setattr(sys, "executable", "/nowhere")  # no other process is asked
    assert "too complex" in refusal(outputs(grammar=overflow)).message


def test_an_approval_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = outputs(regex="approved").grammar()
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert outputs(regex="approved").grammar() == grammar
    with pytest.raises(FileNotFoundError):
        outputs(regex="not asked about yet").grammar()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_check_that_others_end_says_nothing_of_the_grammar(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """As where a machine has no memory left: a later request is checked again."""
    script = tmp_path / "dies.py"
    script.write_text(f"import os\nos.kill(os.getpid(), {int(number)})")
    with monkeypatch.context() as patch:
        patch.setattr(constraint, "CHECK", script)
        with pytest.raises(RuntimeError, match="failed"):
            outputs(regex=f"killed by {number}").grammar()
    assert outputs(regex=f"killed by {number}").grammar()


def test_no_more_are_remembered_than_fit() -> None:
    assert constraint._problem.cache_info().maxsize == 128
