"""OpenAI's HTTP API as a FastAPI application. It knows text and sequences, and nothing of Ray."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from math import ceil
from typing import Any, TypeAlias

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from deployments.answering import Answering, Delta, Refused
from deployments.api_error import ApiError
from deployments.api_keys import CLIENT, KeyGuard
from deployments.generation import Dispatcher
from deployments.protocol import (
    MAX_BODY_BYTES,
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    parse,
)
from deployments.responses import (
    DONE,
    FinishedChoice,
    StreamedAnswer,
    WholeAnswer,
    error_event,
    finish_reason,
    model_card,
    model_list,
    stop_reason,
)
from deployments.submission import Refusal, SchedulingParams
from deployments.telemetry import Telemetry
from deployments.text import Tokenizer
from deployments.token_logprobs import TokenLogprobs
from engine.request import FinishReason

Timelines: TypeAlias = Callable[[int], Awaitable[dict[str, list[dict[str, Any]]]]]
"""Gives the events of the last so many steps, by replica."""

MOST_STEPS = 512
"""To write them down, an engine's process stops for some 20 ms. It keeps four times as many."""

RETRY_AFTER = "1"
"""Seconds, where the engine that refuses has not measured how long it will take."""


_SEND = "stepahead.send"


class _App(FastAPI):
    """Lets a response have the `send` that comes from outside, with nothing of the framework around it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SEND] = send
        await super().__call__(scope, receive, send)


class EventStream(StreamingResponse):
    """Server-sent events. However the connection ends, `close` is called then."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # In a task of its own, or each token resumes the dozen of the framework's frames around this
            # one. Ray Serve cancels it when the client leaves.
            await asyncio.create_task(self._write(send, scope[_SEND]))
        finally:
            self._close()

    async def _write(self, send: Send, outer: Send) -> None:
        # What the framework wraps around `send` looks at the first and the last message only.
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self.body_iterator:
            await outer({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Api:
    """The routes. `check_health` raises `ApiError` where no engine answers; `keys`: see `read_keys`."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        check_health: Callable[[], Awaitable[None]],
        keys: frozenset[bytes] | None = None,
        max_sequences: int = MAX_CHOICES,
        telemetry: Telemetry | None = None,
        timelines: Timelines | None = None,
    ) -> None:
        """`max_sequences`: what the queue of an engine holds; a request for more can never be served."""
        self._timelines = timelines
        self._telemetry = telemetry
        self._model = model
        self._tokenizer = tokenizer
        self._tokenizing = ThreadPoolExecutor(tokenizer.threads, "tokenizer")  # while the loop goes on
        self._compiling = ThreadPoolExecutor(2, "grammar")  # grammars that take long leave prompts alone
        self._dispatcher = dispatcher
        self._check_health = check_health
        self._keys = keys
        self._max_sequences = max_sequences
        self._created = int(time.time())

    def app(self) -> FastAPI:
        app = _App(openapi_url=None, redirect_slashes=False)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        app.add_api_route("/v1/models", self.list_models, methods=["GET"])
        app.add_api_route("/v1/models/{model:path}", self.show_model, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"])
        if self._timelines is not None:
            app.add_api_route("/debug/timeline", self.timeline, methods=["GET"])
        if self._keys is not None:
            app.add_middleware(KeyGuard, keys=self._keys)
        if self._telemetry is not None:
            app.add_middleware(self._telemetry.middleware)  # outside: it sees what is refused, too
        app.add_exception_handler(ApiError, _answer_api_error)
        app.add_exception_handler(HTTPException, _answer_http_error)
        app.add_exception_handler(ClientDisconnect, _answer_nobody)
        app.add_exception_handler(Exception, _answer_bug)
        return app

    async def chat(self, http: Request) -> Response:
        return await self._answer(http, parse(await _body(http), ChatRequest))

    async def complete(self, http: Request) -> Response:
        return await self._answer(http, parse(await _body(http), CompletionRequest))

    async def list_models(self) -> Response:
        return _json(model_list(self._model, self._created, self._tokenizer.context_length))

    async def show_model(self, model: str) -> Response:
        self._check(model)
        card = model_card(self._model, self._created, self._tokenizer.context_length)
        return _json(msgspec.json.encode(card))

    async def health(self) -> Response:
        await self._check_health()
        return Response()

    async def timeline(self, http: Request) -> Response:
        """A Chrome trace of the last `steps` steps, of the engine `replica` or of all."""
        assert self._timelines is not None
        steps, wanted = http.query_params.get("steps", "200"), http.query_params.get("replica")
        if not (re.fullmatch("[0-9]{1,9}", steps) and 0 < int(steps) <= MOST_STEPS):
            raise ApiError(400, f"steps must be from 1 to {MOST_STEPS}", param="steps", code="invalid_value")
        found = await self._timelines(int(steps))
        if wanted is not None and wanted not in found:
            names = ", ".join(sorted(found)) or "none answers"
            raise ApiError(404, f"no replica {wanted!r}: {names}", param="replica", code="not_found")
        events = [
            event | {"pid": pid}
            for pid, (name, each) in enumerate(sorted(found.items()), 1)
            if wanted in (None, name)
            for event in each
        ]
        return _json(msgspec.json.encode({"traceEvents": events}))

    def _check(self, model: str) -> None:
        if model != self._model:
            raise ApiError.model_not_found(model)

    async def _answer(self, http: Request, request: ChatRequest | CompletionRequest) -> Response:
        self._check(request.model)
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._tokenizing, self._tokenizer.prompts, request)
        if len(prompts) * request.choices > self._max_sequences:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with {request.choices} choices each are more than the "
                f"{self._max_sequences} sequences that may run or wait at once",
                param="prompt" if len(prompts) > self._max_sequences else "n",
                code="invalid_value",
            )
        constraint, grammar = request.constraint, None
        if constraint is not None:
            grammar = await loop.run_in_executor(self._compiling, constraint.grammar)
        answering = Answering(
            self._dispatcher,
            [(prompt, self._tokenizer.sampling(request, len(prompt), grammar)) for prompt in prompts],
            self._tokenizer.token_bytes,
            request.stop_strings,
            SchedulingParams(
                request.priority or 0,
                # Users are named by whoever has the key: naming many must not get it more.
                http.scope.get(CLIENT) or request.user or request.safety_identifier or "",
                (request.cache_salt or "").encode(),
                request.timeout,
                request.queue_timeout,
                request.user or "",
            ),
        )
        chat = isinstance(request, ChatRequest)
        streams = False
        try:
            if not request.stream:
                return _json(await _whole(WholeAnswer(self._model, chat), answering))
            await answering.admitted()  # it decides on the status: an error must not come inside a 200
            first = await answering.news()
            answer = StreamedAnswer(self._model, chat, request.include_usage, len(answering.choices))
            streams = True
            field = constraint.field if constraint else None
            return EventStream(_events(answer, answering, first, field), answering.close)
        except Refused as error:
            raise _api_error(error.refusal, chat, constraint.field if constraint else None) from None
        finally:
            if not streams:
                answering.close()


async def _whole(answer: WholeAnswer, answering: Answering) -> bytes:
    texts: list[list[str]] = [[] for _ in answering.choices]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in answering.choices]
    reasons = [FinishReason.STOP] * len(texts)
    while news := await answering.news():
        for delta in news:
            texts[delta.index].append(delta.text)
            logprobs[delta.index] += delta.logprobs
            if delta.finish_reason is not None:
                reasons[delta.index] = delta.finish_reason
    choices = [
        FinishedChoice("".join(text), finish_reason(reason), stop_reason(reason), tokens)
        for text, reason, tokens in zip(texts, reasons, logprobs, strict=True)
    ]
    return answer.body(choices, answering.usage())


async def _events(
    answer: StreamedAnswer, answering: Answering, news: list[Delta], constraint: str | None
) -> AsyncIterator[bytes]:
    yield b"".join(answer.start(index) for index in range(len(answering.choices)))
    try:
        while news:
            events = []
            for delta in news:
                events.append(answer.delta(delta.index, delta.text, delta.logprobs))
                if (reason := delta.finish_reason) is not None:
                    events.append(answer.finish(delta.index, finish_reason(reason), stop_reason(reason)))
            if piece := b"".join(events):
                yield piece
            news = await answering.news()
        yield answer.usage(answering.usage()) + DONE
    except Refused as error:
        yield error_event(_api_error(error.refusal, answer.chat, constraint))


def _api_error(refusal: Refusal, chat: bool, constraint: str | None = None) -> ApiError:
    """`constraint`: the field that a grammar comes from."""
    match refusal.reason:
        case "invalid" if refusal.field == "generated":  # by us: two replicas that disagree
            return ApiError.server_error(refusal.message)
        case "invalid":
            field = "messages" if chat and refusal.field == "prompt" else refusal.field
            field = constraint if field == "grammar" else field
            return ApiError(400, refusal.message, param=field, code="invalid_value")
        case "full":
            wait = {} if refusal.retry_after is None else {"Retry-After": str(ceil(refusal.retry_after))}
            return ApiError(429, refusal.message, "rate_limit_error", code="overloaded", headers=wait)
        case "unavailable" | "other model" | "moved" | "lost":
            return ApiError.server_error(refusal.message, 503)
        case "timeout":  # to try again would be to do more than was asked for
            no_retry = {"x-should-retry": "false"}  # OpenAI's clients look at it
            return ApiError(504, refusal.message, "server_error", code="timeout", headers=no_retry)
        case "failed":
            return ApiError.server_error(refusal.message)


async def _body(http: Request) -> bytes:
    """The body, of which no more is held than may be sent. Raises `ApiError` (413)."""
    if int(http.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise ApiError.too_large(MAX_BODY_BYTES)
    body = bytearray()
    try:
        async for chunk in http.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise ApiError.too_large(MAX_BODY_BYTES)
    except ApiError:
        raise
    except Exception as error:  # what carries the body has errors of its own for a client that left
        raise ClientDisconnect from error
    return bytes(body)


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Retry-After": RETRY_AFTER} if error.status in (429, 503) else {}
    return _json(error.body(), error.status, headers | error.headers)


async def _answer_http_error(http: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    message = f"{HTTPStatus(error.status_code).phrase}: {http.method} {http.url.path}"
    return _json(ApiError(error.status_code, message).body(), error.status_code, dict(error.headers or {}))


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # the client left while it was sending


async def _answer_bug(_: Request, __: Exception) -> Response:
    return _json(ApiError.server_error().body(), 500)  # Starlette raises the error again, to be logged
