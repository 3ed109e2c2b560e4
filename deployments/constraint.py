"""What a text has to be: from the fields of a request to a grammar as llguidance writes it down."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from deployments.api_error import ApiError
from deployments.wire import Wire, only

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_GRAMMAR_CHARS = 1 << 16
"""Of a schema (as JSON), regex, grammar or all choices. To check that many takes 0.35 s of a processor where
they are 2,000 optional properties, the worst of what is no attack and too many then, 0.12 s where all are
required, 0.09 s for 400 optional ones, 0.08 s for an `enum`. 200 properties with descriptions have 20,000."""

CHECK = Path(__file__).with_name("grammar_check.py")

_ANY_OBJECT = '{"type": "object"}'


class JsonSchema(Wire):
    """OpenAI's. It says nothing here whether it is `strict`: the text follows the schema in any case."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Wire):
    """OpenAI's way to constrain a text, which is an object of JSON then, or 'text' for not at all."""

    field: ClassVar[str] = "response_format"
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "Field required", {"name": "json_schema"})
        if self.type != "json_schema" and self.json_schema is not None:
            raise PydanticCustomError(
                "invalid_value", "it needs 'type' to be 'json_schema'", {"name": "json_schema"}
            )
        return self

    def grammar(self) -> str:
        """Raises `ApiError` (400) naming the field. Takes as long as `checked`."""
        if self.json_schema is None or self.json_schema.schema_ is None:
            return checked(_from_schema(_ANY_OBJECT), self.field)
        field = f"{self.field}.json_schema.schema"
        return checked(_from_schema(_written(self.json_schema.schema_), field), field)


def _text_or_object(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<object>"


_Schema: TypeAlias = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(_text_or_object),
]


class StructuredOutputs(Wire):
    """vLLM's way. Exactly one of the first five."""

    field: ClassVar[str] = "structured_outputs"
    json_: Annotated[_Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar_: Annotated[str | None, Field(alias="grammar")] = None
    json_object: Annotated[Any, only(True)] = None
    # Known, not served.
    structural_tag: Annotated[Any, only()] = None
    whitespace_pattern: Annotated[Any, only()] = None
    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False)] = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = (self.json_, self.regex, self.choice, self.grammar_, self.json_object)
        if sum(each is not None for each in given) != 1:
            raise PydanticCustomError(
                "invalid_value", "exactly one of json, regex, choice, grammar and json_object is needed"
            )
        return self

    def grammar(self) -> str:
        """As of a `ResponseFormat`."""
        if self.json_ is not None:
            field = f"{self.field}.json"
            schema = self.json_ if isinstance(self.json_, str) else _written(self.json_)
            return checked(_from_schema(schema, field), field)
        if self.regex is not None:
            field = f"{self.field}.regex"
            return checked(_llguidance().grammar_from_regex(_bounded(self.regex, field)), field)
        if self.choice is not None:
            field = f"{self.field}.choice"
            return checked(from_choices(self.choice, field), field)
        if self.grammar_ is not None:
            field = f"{self.field}.grammar"
            # Said to be Lark: what begins as JSON would be taken for llguidance's own form otherwise.
            lark = json.dumps({"grammars": [{"lark_grammar": _bounded(self.grammar_, field)}]})
            return checked(lark, field)
        return checked(_from_schema(_ANY_OBJECT), f"{self.field}.json_object")


def from_choices(choices: list[str], field: str = "choice") -> str:
    """The grammar of exactly these texts. Raises `ApiError` (400): together they are too long.

    They are one terminal, as a parser takes 2,000 alternatives at most; its strings are written as in JSON,
    but of ASCII alone.
    """
    _bounded_length(sum(map(len, choices)), field)
    return _llguidance().grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}")


def checked(grammar: str, field: str) -> str:
    """The grammar, if llguidance compiles it. Raises `ApiError` (400) naming the field.

    Takes about 0.07 s in another process, and 2 s of a processor at most; nothing if it was among the last.
    """
    if problem := _problem(grammar):
        raise _refusal(problem, field)
    return grammar


@lru_cache(maxsize=128)  # applications have a few schemas each; these are 16 MiB at most
def _problem(grammar: str) -> str:
    check = [sys.executable, "-P", str(CHECK)]
    done = subprocess.run(check, input=grammar.encode(), capture_output=True)
    if -done.returncode in (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT):  # its time, stack, memory
        return "too complex to compile"
    if done.returncode:
        raise RuntimeError(f"{check} failed: {done.stderr.decode()[-1000:]}")
    lines = done.stdout.decode().splitlines()
    reasons = [line for line in lines[1:] if line.startswith("error:")]  # a regex is quoted before them
    said = " ".join(line[:400] for line in [*lines[:1], *reasons[:1]])
    return said.replace("NoExtensionBias", "no text follows it")


def _from_schema(schema: str, field: str = "") -> str:
    # A schema may ask llguidance to ignore what it does not know. Nobody is to get a text that only
    # looks as if it followed the schema.
    strict: Any = {"lenient": False, "coerce_one_of": False}
    try:
        return _llguidance().grammar_from_json_schema(_bounded(schema, field), overrides=strict)
    except ValueError as error:
        raise _refusal(str(error), field) from None


def _llguidance() -> type[LLMatcher]:
    from llguidance import LLMatcher  # a server without it serves all other requests

    return LLMatcher


def _written(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)  # NaN as it is, for llguidance to refuse


def _bounded(text: str, field: str) -> str:
    _bounded_length(len(text), field)
    return text


def _bounded_length(length: int, field: str) -> None:
    if length > MAX_GRAMMAR_CHARS:
        raise _refusal(f"{length} characters are more than {MAX_GRAMMAR_CHARS}", field)


def _refusal(why: str, field: str) -> ApiError:
    return ApiError(400, f"Invalid value for '{field}': {why[:900]}.", param=field, code="invalid_value")
