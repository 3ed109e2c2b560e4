"""The check of a grammar as its own process: what it says, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from llguidance import LLMatcher

from deployments import grammar_check
from deployments.grammar_check import CPU_SECONDS, problem


def check(grammar: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, grammar_check.__file__], input=grammar, capture_output=True)


def intersection(patterns: int) -> str:
    return f"start: A\nA: {' & '.join(f'/.*a{i}.*/' for i in range(patterns))}"


def chain(links: int) -> str:
    """Terminals, each made of the one before."""
    return "\n".join(["start: A0", *(f'A{i}: A{i + 1} "b"' for i in range(links)), f'A{links}: "a"'])


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("a{99999999}"),
        'start: "a" start',  # never ends
        'start: /[a-z]{6,9}/ " and " t\nt: "a" t',  # nor does this, once it is there
        LLMatcher.grammar_from_json_schema(
            json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}})
        ),
    ],
    ids=["huge", "endless", "endless-later", "wide"],
)
def test_what_breaks_as_a_text_begins_is_found(grammar: str) -> None:
    assert "too many" in problem(grammar).lower() or "max is" in problem(grammar)


@pytest.mark.parametrize(
    "grammar", ['start: "é🎊"', chain(50), intersection(5), '{"grammars":[{"json_schema":{}}]}']
)
def test_nothing_is_said_of_what_compiles(grammar: str) -> None:
    done = check(grammar.encode())
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_what_is_wrong_is_said() -> None:
    done = check(b"start: nothing")
    assert done.returncode == 0
    assert b'unknown name: "nothing"' in done.stdout


def test_a_matcher_is_made_and_not_only_the_grammar_read() -> None:
    """What a grammar without a tokenizer passes."""
    grammar = intersection(16)
    assert not LLMatcher.validate_grammar(grammar)
    assert problem(grammar)


def test_what_would_take_hours_is_ended() -> None:
    """By the kernel, and not by the SIGKILL that says that a machine has no memory left."""
    assert CPU_SECONDS < 5  # or this test takes as long
    schema = {"allOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(40)]}
    assert (
        check(LLMatcher.grammar_from_json_schema(json.dumps(schema)).encode()).returncode == -signal.SIGXCPU
    )


def test_an_overflow_of_the_stack_ends_this_process_alone() -> None:
    assert check(chain(4000).encode()).returncode == -signal.SIGSEGV


def test_a_broken_check_approves_of_nothing() -> None:
    done = check(b"\xff")
    assert done.returncode == 1
    assert b"UnicodeDecodeError" in done.stderr
