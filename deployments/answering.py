"""The choices of one HTTP request: their sequences as text, until each ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from deployments.generation import Dispatcher, Generation
from deployments.responses import Usage
from deployments.submission import Refusal, SchedulingParams
from deployments.token_logprobs import LogprobsReader, TokenLogprobs
from engine.detokenizer import Detokenizer
from engine.request import FinishReason, SamplingParams


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What is new of one choice."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: Sequence[TokenLogprobs] = ()
    """Of the tokens read for it, also where they bring no text yet; nothing unless asked for."""


TOO_LATE = Refusal("timeout", "the time that the request was given ended before it had a token")


class Refused(Exception):
    """A sequence came to nothing, and with it the whole request."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Choice:
    """One sequence and its text."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        detokenizer: Detokenizer,
        logprobs: LogprobsReader | None,
    ) -> None:
        self.index = index
        self.generation = generation
        self._detokenizer = detokenizer
        self._logprobs = logprobs
        self._read = 0

    def read(self) -> Delta:
        """What has come since the last call. Raises `Refused`."""
        generation = self.generation
        if generation.refusal is not None:
            raise Refused(generation.refusal)
        stopped = generation.finish_reason is FinishReason.STOP
        text = self._detokenizer.push(generation.tokens[self._read :], ended=stopped)
        logprobs: Sequence[TokenLogprobs] = ()
        if self._logprobs is not None:
            new = slice(self._read, self.num_tokens)
            logprobs = self._logprobs.read(generation.tokens[new], generation.logprobs[new])
        self._read = len(generation.tokens)
        if self._detokenizer.stopped:
            return Delta(self.index, text, FinishReason.STOP, logprobs)
        if generation.finish_reason is not None:
            text += self._detokenizer.finish()
        return Delta(self.index, text, generation.finish_reason, logprobs)

    @property
    def num_tokens(self) -> int:
        """Tokens generated for the text read so far; what came after a stop string is not of it."""
        return self._detokenizer.num_tokens


class Answering:
    """All choices of a request: one for each element of `sampling`, for each prompt.

    `close` it in any case: it aborts what still runs.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        prompts: Sequence[tuple[list[int], Sequence[SamplingParams]]],
        token_bytes: Callable[[int], bytes],
        stop: Sequence[str],
        scheduling: SchedulingParams,
    ) -> None:
        self._dispatcher = dispatcher
        self._grown: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None
        self.choices: list[Choice] = []
        for prompt, samplings in prompts:
            for sampling in samplings:
                index = len(self.choices)
                # Before there is anything that would have to be stopped.
                text = Detokenizer(token_bytes, stop, prompt)
                logprobs = None if sampling.logprobs is None else LogprobsReader(token_bytes, prompt)
                generation = dispatcher.start(prompt, sampling, partial(self._grow, index), scheduling)
                self.choices.append(Choice(index, generation, text, logprobs))
        self._open = set(range(len(self.choices)))

    def _grow(self, index: int) -> None:
        self._grown.add(index)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def admitted(self) -> None:
        """Return when replicas have accepted every sequence. Raises `Refused` if none accepts one."""
        for choice in self.choices:
            await choice.generation.admitted.wait()
            if choice.generation.refusal is not None:
                raise Refused(choice.generation.refusal)

    async def news(self) -> list[Delta]:
        """Wait until there is something new; nothing once all have ended. Raises `Refused`."""
        if not self._open:
            return []
        if not self._grown:
            self._news = self._loop.create_future()
            await self._news
        grown = sorted(self._grown)
        self._grown.clear()
        deltas = [self.choices[index].read() for index in grown]
        for delta in deltas:
            if delta.finish_reason is not None:
                self._end(delta.index, delta.finish_reason)
                if delta.finish_reason is FinishReason.TIMEOUT and not self._has_tokens:
                    raise Refused(TOO_LATE)
        return deltas

    def usage(self) -> Usage:
        """Token counts; a prompt counts once, whatever the number of its answers."""
        usage = Usage(completion_tokens=sum(choice.num_tokens for choice in self.choices))
        by_prompt: dict[int, list[Generation]] = {}
        for choice in self.choices:
            by_prompt.setdefault(id(choice.generation.prompt), []).append(choice.generation)
        for generations in by_prompt.values():
            usage.prompt_tokens += len(generations[0].prompt)
            # One of them computed what the others then found.
            usage.cached_tokens += min(each.num_cached for each in generations)
        return usage

    @property
    def _has_tokens(self) -> bool:
        return any(choice.generation.tokens for choice in self.choices)

    def _end(self, index: int, reason: FinishReason | None = None) -> None:
        self._open.discard(index)
        self._dispatcher.stop(self.choices[index].generation, reason)

    def close(self) -> None:
        for index in list(self._open):
            self._end(index)
