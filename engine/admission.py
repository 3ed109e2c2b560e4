"""Which requests an engine takes: those that it can serve at all, as long as not too many wait."""

from __future__ import annotations

import math

from engine.request import QueueFull, Request, RequestError, State

MEMORY = 60.0
"""Busy seconds after which a measurement of the rate counts half."""


def token_limit(request: Request, context_length: int) -> int:
    """Tokens at which the request ends by length, prompt included."""
    if request.sampling.max_tokens is None:
        return context_length
    return request.num_prompt + request.sampling.max_tokens


def check_request(request: Request, context_length: int) -> None:
    """Raise `RequestError` naming the field for a request that can never be served."""
    sampling, n = request.sampling, request.num_prompt
    if request.num_tokens or request.state is not State.WAITING:
        raise RequestError("the request was submitted before; make a new one", "id")
    for name, kind in (("priority", int), ("client", str), ("cache_salt", bytes)):
        if not isinstance(value := getattr(request, name), kind):
            raise RequestError(f"{name} must be of type {kind.__name__}, got {value!r}", name)
    for name in ("timeout", "queue_timeout"):
        seconds = getattr(request, name)
        if seconds is not None and not seconds > 0:
            raise RequestError(f"{name} must be above 0 seconds, got {seconds!r}", name)
    if n == 0:
        raise RequestError("the prompt is empty", "prompt")
    if n >= context_length:
        raise RequestError(
            f"the prompt has {n} tokens; with one to generate, at most "
            f"{context_length - 1} fit into the context of {context_length}",
            "prompt",
        )
    if sampling.max_tokens is not None and n + sampling.max_tokens > context_length:
        raise RequestError(
            f"{n} prompt tokens and max_tokens {sampling.max_tokens} exceed the context length "
            f"of {context_length}",
            "max_tokens",
        )
    if n + len(request.generated) >= token_limit(request, context_length):
        raise RequestError("every token asked for was already generated", "generated")


class Backlog:
    """The requests that wait for their first token, and how fast they get one.

    Kept where requests arrive and outputs are delivered, so one thread has the whole truth.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        """`max_requests`: that run or wait. `max_tokens`: of prompts and earlier attempts, that wait."""
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.tokens = 0
        self.waiting: dict[Request, int] = {}
        """Those without a token yet, and how many each brought."""
        self._served = 0.0  # tokens of requests that got their first token ...
        self._seconds = 0.0  # ... in so many seconds in which somebody waited
        self._unserved = 0.0  # such seconds since the last of them
        self._since = 0.0

    def check(self, request: Request, live: int, now: float) -> None:
        """Raise `QueueFull` where `live` requests, or the tokens that wait, leave no room for one more.

        `now`: seconds of any clock. Where nobody waits, a request may have any number of tokens.
        """
        tokens = _tokens(request)
        if live >= self.max_requests:
            why = f"{live} requests are running or waiting already"
        elif self.waiting and self.tokens + tokens > self.max_tokens:
            why = f"{self.tokens} prompt tokens wait already, and {tokens} more are too many"
        else:
            return
        self._pass(now)
        seconds = self._seconds + self._unserved
        raise QueueFull(why, max(1.0, self.tokens / self._served * seconds) if self._served else 1.0)

    def add(self, request: Request, now: float) -> None:
        self._pass(now)
        self.waiting[request] = tokens = _tokens(request)
        self.tokens += tokens

    def remove(self, request: Request, now: float, served: bool) -> None:
        """It got its first token, or (not `served`) it ended without one. Nothing if it does not wait."""
        if request in self.waiting:
            self._pass(now)
            tokens = self.waiting.pop(request)
            self.tokens -= tokens
            if served:  # only then is anything forgotten, or a rate would seem to fall without end in between
                fade = math.exp2(-self._unserved / MEMORY)
                self._served = self._served * fade + tokens
                self._seconds = self._seconds * fade + self._unserved
                self._unserved = 0.0

    def _pass(self, now: float) -> None:
        if self.waiting:
            self._unserved += now - self._since
        self._since = now


def _tokens(request: Request) -> int:
    return request.num_prompt + len(request.generated)
