"""Clients of the streaming benchmark, a process of their own: reads a job on stdin, writes what came.

While tokens come it does nothing but `recv`; time stamps, events and texts are found in the bytes
afterwards, so that on two cores the load generator leaves the cores to what is measured.
"""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import time
from bisect import bisect_left
from itertools import accumulate
from typing import Any, TypedDict

_EVENT = re.compile(rb"data: (\{.*?\})\n\n")
_TIMEOUT = 120.0  # seconds without a byte


class Job(TypedDict):
    """What to ask for; stream i goes to `ports[i % len(ports)]`."""

    ports: list[int]
    path: str
    bodies: list[str]
    texts: list[str]
    """What each stream must say; each token is a blank and a word."""


class Came(TypedDict):
    arrivals: list[list[float]]
    """Per stream, the time of each token, in seconds of `time.perf_counter`, the same for all processes."""
    events: int
    reads: int
    """Those that brought something: fewer than the pieces written where these came together."""
    began: float
    """When the first bytes came."""
    cpu_s: float
    """CPU seconds of this process between the first and the last byte."""


def _connect(port: int, path: str, body: str) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    sock.setblocking(False)
    return sock


def _receive(job: Job) -> tuple[list[list[tuple[float, bytes]]], float]:
    socks = [
        _connect(job["ports"][i % len(job["ports"])], job["path"], body)
        for i, body in enumerate(job["bodies"])
    ]
    streams: dict[int, tuple[socket.socket, list[tuple[float, bytes]]]] = {
        sock.fileno(): (sock, []) for sock in socks
    }
    read = [streams[sock.fileno()][1] for sock in socks]
    poll = select.epoll()
    for fd in streams:
        poll.register(fd, select.EPOLLIN)
    cpu = None
    left = len(streams)
    while left:
        ready = poll.poll(_TIMEOUT)
        if not ready:
            raise TimeoutError(f"{left} streams are silent")
        if cpu is None:
            cpu = time.process_time()
        now = time.perf_counter()
        for fd, _ in ready:
            sock, pieces = streams[fd]
            data = sock.recv(1 << 18)
            pieces.append((now, data))
            if not data or data.endswith(b"\r\n0\r\n\r\n"):
                poll.unregister(fd)
                left -= 1
    used = time.process_time() - (cpu or 0.0)
    for sock in socks:
        sock.close()
    return read, used


def _unchunked(data: bytes) -> tuple[bytes, list[int], list[int]]:
    """The body of a chunked response; where each of its chunks ends, and where that is in `data`."""
    place = data.index(b"\r\n\r\n") + 4
    parts: list[bytes] = []
    ends, places = [0], [place]
    while size := int(data[place : (line := data.index(b"\r\n", place))], 16):
        parts.append(data[line + 2 : line + 2 + size])
        place = line + 2 + size + 2
        ends.append(ends[-1] + size)
        places.append(place - 2)
    return b"".join(parts), ends, places


def _arrivals(pieces: list[tuple[float, bytes]], text: str) -> tuple[list[float], int]:
    data = b"".join(piece for _, piece in pieces)
    read = list(accumulate(len(piece) for _, piece in pieces))
    body, ends, places = _unchunked(data)
    arrivals: list[float] = []
    came, events = "", 0
    for found in _EVENT.finditer(body):
        event: dict[str, Any] = json.loads(found[1])
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        piece = event["choices"][0]["text"]
        if piece:
            events += 1
            came += piece
            chunk = bisect_left(ends, found.end())
            place = places[chunk] - (ends[chunk] - found.end())
            arrivals += [pieces[bisect_left(read, place)][0]] * piece.count(" ")
    if came != text:
        raise RuntimeError(
            f"{len(came)} of {len(text)} characters came, or wrong ones; it ended {data[-200:]!r}"
        )
    return arrivals, events


def main() -> None:
    job: Job = json.load(sys.stdin)
    streams, cpu = _receive(job)
    found = [_arrivals(pieces, text) for pieces, text in zip(streams, job["texts"], strict=True)]
    came: Came = {
        "arrivals": [arrivals for arrivals, _ in found],
        "events": sum(events for _, events in found),
        "reads": sum(len(pieces) for pieces in streams),
        "began": min(pieces[0][0] for pieces in streams),
        "cpu_s": cpu,
    }
    json.dump(came, sys.stdout)


if __name__ == "__main__":
    main()
