"""Texts, places and values of tokens, whatever these are parts of."""

from __future__ import annotations

import json
from math import inf, nan
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.token_logprobs import LogprobsReader, chat_logprobs, completion_logprobs
from engine.request import Logprobs

HALVES = [b"a", b"\xc3", b"\xa9", b"\xbf", b""]
"""The second and third are é together."""


def sent(body: dict[str, Any]) -> Any:
    return json.loads(msgspec.json.encode(body))


@given(
    text=st.text(st.characters(codec="utf-8"), max_size=12),
    cuts=st.lists(st.integers(0, 40)),
    prompt=st.integers(0, 5),
    calls=st.lists(st.integers(1, 3), max_size=30),
)
@example(text="🎉b", cuts=[1, 2, 3, 4], prompt=1, calls=[])
def test_offsets_are_those_of_characters(text: str, cuts: list[int], prompt: int, calls: list[int]) -> None:
    """However the text is cut into tokens, and these into calls; a prompt may end within a character, too."""
    data = text.encode()
    ends = sorted({cut for cut in cuts if cut < len(data)} | {len(data)})
    pieces = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    tokens, values = list(range(len(pieces))), [Logprobs(-1, [], [])] * len(pieces)
    before, tokens = tokens[:prompt], tokens[prompt:]
    reader = LogprobsReader(pieces.__getitem__, before)
    read = []
    while tokens:
        now, tokens = tokens[: (count := calls.pop() if calls else 1)], tokens[count:]
        read += reader.read(now, values[: len(now)])

    def characters(end: int) -> int:
        return len(b"".join(pieces[:end]).decode(errors="ignore"))

    assert [each.offset for each in read] == [
        characters(place) - characters(len(before)) for place in range(len(before), len(pieces))
    ]
    chat = sent(chat_logprobs(read))
    assert [bytes(entry["bytes"]) for entry in chat["content"]] == pieces[len(before) :]


def test_parts_of_characters() -> None:
    """A text stands for what is none; the bytes are the true ones. Of names alike, the chosen token's counts
    and then the likeliest's."""
    reader = LogprobsReader(HALVES.__getitem__, [])
    read = reader.read(
        [1, 2, 4], [Logprobs(-3, [3, 2, 0], [-1, -2, -4])] * 2 + [Logprobs(-1, [1, 2], [-2, -3])]
    )
    [first, _, last] = sent(chat_logprobs(read))["content"]
    assert first == {
        "token": "\ufffd",
        "logprob": -3,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -1, "bytes": [0xBF]},
            {"token": "\ufffd", "logprob": -2, "bytes": [0xA9]},
            {"token": "a", "logprob": -4, "bytes": [0x61]},
        ],
    }
    assert (last["token"], last["bytes"]) == ("", [])
    assert sent(completion_logprobs(read)) == {
        "text_offset": [0, 0, 1],
        "token_logprobs": [-3, -3, -1],
        "tokens": ["\ufffd", "\ufffd", ""],
        "top_logprobs": [{"\ufffd": -3, "a": -4}] * 2 + [{"": -1, "\ufffd": -2}],
    }


def test_values_that_json_has_not() -> None:
    read = LogprobsReader(HALVES.__getitem__, []).read([1], [Logprobs(-inf, [0, 4], [-0.5, nan])])
    assert sent(completion_logprobs(read))["token_logprobs"] == [-9999]
    assert sent(completion_logprobs(read))["top_logprobs"] == [{"\ufffd": -9999, "a": -0.5, "": -9999}]
    assert sent(chat_logprobs(read))["content"][0]["top_logprobs"][1]["logprob"] == -9999
