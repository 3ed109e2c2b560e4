"""What the benchmark's clients make of the bytes, whatever the pieces in which these come."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.streaming_clients import _arrivals
from deployments.responses import DONE, StreamedAnswer

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]


@given(
    events=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    chunks=st.lists(st.integers(0, 5000), max_size=8),
    reads=st.lists(st.integers(0, 6000), max_size=8),
)
def test_a_token_came_with_the_read_that_completed_its_event(
    events: list[int], chunks: list[int], reads: list[int]
) -> None:
    """HAProxy writes other chunks than it reads; an event may lie in two of them."""
    answer = StreamedAnswer("demo", False, False, 1)
    pieces = [answer.delta(0, " word" * tokens) for tokens in events]
    body = cut(b"".join(pieces) + answer.finish(0, "length") + DONE, chunks)
    wire = HEAD + b"".join(b"%x\r\n" % len(chunk) + chunk + b"\r\n" for chunk in body) + b"0\r\n\r\n"
    came = [(float(i), piece) for i, piece in enumerate(cut(wire, reads))]
    arrivals, found = _arrivals(came, " word" * sum(events))
    assert (len(arrivals), found) == (sum(events), len(events))
    read = [body_bytes(body, end) for end in accumulate(len(piece) for _, piece in came)]
    ends = accumulate(len(piece) for piece in pieces)
    times = [next(float(i) for i, had in enumerate(read) if had >= end) for end in ends]
    expected = [time for time, tokens in zip(times, events, strict=True) for _ in range(tokens)]
    assert arrivals == expected


def body_bytes(chunks: list[bytes], place: int) -> int:
    """Bytes of the body among the first `place` bytes of the response."""
    place -= len(HEAD)
    found = 0
    for chunk in chunks:
        place -= len(b"%x\r\n" % len(chunk))
        found += max(0, min(place, len(chunk)))
        place -= len(chunk) + 2
    return found


def test_a_stream_that_says_something_else_is_an_error() -> None:
    answer = StreamedAnswer("demo", False, False, 1)
    event = answer.delta(0, " word")
    wire = HEAD + b"%x\r\n" % len(event) + event + b"\r\n0\r\n\r\n"
    with pytest.raises(RuntimeError, match="5 of 10 characters"):
        _arrivals([(0.0, wire)], " word word")
