"""What a Router tells of its requests: metrics, spans, and a line in the log for each sequence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import INVALID_SPAN, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.span import Span
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.metrics import Recorder
from deployments.tracing import Carrier, child_of, received, sent_with, tracer_to
from engine import metrics as m
from engine.request import FinishReason

logger = logging.getLogger(__name__)

ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}

GAP_EVERY = 16
"""Of so many tokens one gap is observed: 256 requests at 70 steps a second are 18,000 gaps a second."""

_ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The HTTP request that is being answered."""

    time: float
    span: Span


_arrival: ContextVar[Arrival | None] = ContextVar("arrival", default=None)


class Watch:
    """Follows one sequence. `ended` must be called, exactly once."""

    def __init__(
        self, record: Recorder, arrival: Arrival, span: Span, prompt: int, clock: Callable[[], float]
    ) -> None:
        self._record = record
        self._arrival = arrival
        self._span = span
        self._prompt = prompt
        self._clock = clock
        self._tokens = 0
        self._first = self._last = 0.0
        self._attempts = 0
        record.add(m.SEQUENCES_STARTED)
        record.observe(m.PROMPT_LENGTH, prompt)

    def submitted(self, cause: str | None) -> Carrier:
        """Another attempt begins, because of `cause` if it is not the first. Returns what goes with it."""
        self._attempts += 1
        if cause is not None:
            self._record.add(m.RESUMPTIONS, cause=cause)
        self._span.add_event("submitted", {"attempt": self._attempts, "cause": cause or ""})
        return sent_with(self._span)

    def took(self, tokens: int) -> None:
        """So many have come, at once."""
        now = self._clock()
        if not self._tokens:
            self._first = now
            self._record.observe(m.TIME_TO_FIRST_TOKEN, now - self._arrival.time)
            self._span.add_event("first token")
        for token in range(self._tokens + (-self._tokens % GAP_EVERY), self._tokens + tokens, GAP_EVERY):
            if token:  # the first of those that came together waited for, the others not
                self._record.observe(m.INTER_TOKEN_SECONDS, now - self._last if token == self._tokens else 0)
        self._tokens += tokens
        self._last = now

    def ended(self, reason: str, message: str = "") -> None:
        """`reason` is a finish reason, or that of a refusal."""
        took = self._clock() - self._arrival.time
        self._record.add(m.SEQUENCES_FINISHED, reason=reason)
        if reason in _ENDED_WELL:
            self._record.observe(m.REQUEST_SECONDS, took)
            self._record.observe(m.OUTPUT_LENGTH, self._tokens)
        facts: dict[str, Any] = {
            "finish_reason": reason,
            "prompt_tokens": self._prompt,
            "output_tokens": self._tokens,
            "attempts": self._attempts,
            "seconds": round(took, 6),
        }
        if self._tokens:
            facts["seconds_to_first_token"] = round(self._first - self._arrival.time, 6)
        if context := self._span.get_span_context().trace_id:
            facts["trace_id"] = f"{context:032x}"
        logger.info("sequence ended: %s %s", reason, message, extra=facts)
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": self._prompt,
                    "gen_ai.usage.output_tokens": self._tokens,
                    "gen_ai.response.finish_reasons": [reason],
                }
            )
            if message:
                self._span.set_status(Status(StatusCode.ERROR, message))
            self._span.end()


class Telemetry:
    """Of one Router. `tracer`: where spans go; nowhere by default."""

    def __init__(
        self,
        record: Recorder,
        model: str,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._record = record
        self._model = model
        self._tracer = tracer or tracer_to(None)
        self._clock = clock

    def watch(self, prompt: int) -> Watch:
        """Follow a sequence with so many prompt tokens, begun for the HTTP request that is being answered."""
        arrival = _arrival.get() or Arrival(self._clock(), INVALID_SPAN)
        attributes = {"gen_ai.operation.name": "generate", "gen_ai.request.model": self._model}
        span = self._tracer.start_span("generate", child_of(arrival.span), attributes=attributes)
        return Watch(self._record, arrival, span, prompt, self._clock)

    def decided(self, reason: str, score: float, seconds: float) -> None:
        """The Router has chosen a replica."""
        self._record.add(m.ROUTER_DECISIONS, reason=reason)
        self._record.observe(m.ROUTER_SCORE, score)
        self._record.observe(m.ROUTER_SECONDS, seconds)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Counts and times the requests for completions on their way to `app`."""

        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            endpoint = ENDPOINTS.get(scope["path"]) if scope["type"] == "http" else None
            if endpoint is None:
                return await app(scope, receive, send)
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            span = self._tracer.start_span(
                f"{scope['method']} {scope['path']}",
                received(headers),
                SpanKind.SERVER,
                {"http.request.method": scope["method"], "url.path": scope["path"]},
            )
            status = 499  # unless something is answered: the client has left

            async def noting(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            token = _arrival.set(Arrival(self._clock(), span))
            try:
                await app(scope, receive, noting)
            except Exception:
                status = 500
                raise
            finally:
                _arrival.reset(token)
                self._record.add(m.HTTP_REQUESTS, endpoint=endpoint, status=str(status))
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(StatusCode.ERROR)
                span.end()

        return observed
