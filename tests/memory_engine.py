"""An engine without a model: tokens follow from what they must follow from, and steps run when told."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

from engine.request import (
    EngineUnavailable,
    FinishReason,
    Logprobs,
    Output,
    QueueFull,
    Request,
    RequestError,
)
from engine.stats import EngineStats

VOCABULARY = 94
EOS = 0


def token_at(prompt: list[int], seed: int, position: int) -> int:
    """What a real engine's keyed noise does: prompt, seed and position determine a token. Never EOS."""
    digest = hashlib.blake2b(repr((prompt, seed, position)).encode(), digest_size=4).digest()
    return 1 + int.from_bytes(digest) % (VOCABULARY - 1)


def text_of(prompt: list[int], seed: int, length: int) -> list[int]:
    return [token_at(prompt, seed, position) for position in range(length)]


def logprobs_at(token: int, position: int, likeliest: int) -> Logprobs:
    """Made up of these alone: the token that is chosen is the third likeliest. No rounding in JSON."""
    values = [-rank / 2 - position / 64 for rank in range(max(3, likeliest))]
    return Logprobs(values[2], [token ^ 2 ^ rank for rank in range(likeliest)], values[:likeliest])


class MemoryEngine:
    """`step()` gives every running request one token, as one callback's worth of outputs."""

    eos_token_ids = (EOS,)

    def __init__(self, capacity: int = 100) -> None:
        self.capacity = capacity
        self.failure: str | None = None
        self.running: dict[str, tuple[Request, Callable[[Output], None], list[int]]] = {}
        self.aborts: list[str] = []
        self.requests: list[Request] = []
        self.submitted = asyncio.Event()

    @property
    def healthy(self) -> bool:
        return self.failure is None

    async def submit(
        self, request: Request, sink: Callable[[Output], None], *, promised: bool = False
    ) -> None:
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        if len(self.running) >= self.capacity and not promised:
            raise QueueFull("no room")
        if max(request.prompt) >= VOCABULARY:
            raise RequestError(f"token {max(request.prompt)} is unknown", "prompt")
        self.running[request.id] = request, sink, list(request.generated)
        self.requests.append(request)
        self.submitted.set()

    def abort(self, request_id: str, cause: str = "cancelled") -> None:
        self.aborts.append(request_id)
        if request_id in self.running:
            request, sink, output = self.running.pop(request_id)
            sink(Output(request, len(output), (), FinishReason.ABORT))

    def step(self) -> None:
        for id, (request, sink, output) in list(self.running.items()):
            token = self.token(request, len(output))
            output.append(token)
            reason = None
            if token in request.sampling.stop_token_ids:
                reason = FinishReason.STOP
            elif len(output) == request.sampling.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                del self.running[id]
            position, likeliest = len(output) - 1, request.sampling.logprobs
            logprobs = () if likeliest is None else (logprobs_at(token, position, likeliest),)
            sink(Output(request, position, (token,), reason, logprobs=logprobs))

    def token(self, request: Request, position: int) -> int:
        return token_at(request.prompt, request.sampling.seed, position)

    def stats(self) -> EngineStats:
        none: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 0) | {"finished": {}}
        return EngineStats(**none | {"running": len(self.running)})

    def fail(self, why: str) -> None:
        self.failure = why
        for request, sink, output in self.running.values():
            sink(Output(request, len(output), (), FinishReason.ERROR, why))
        self.running.clear()

    async def run(self) -> None:
        """Step whenever there is something to do."""
        while True:
            await self.submitted.wait()
            while self.running:
                self.step()
                await asyncio.sleep(0)
            self.submitted.clear()
