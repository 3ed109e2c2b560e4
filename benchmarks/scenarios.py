"""Named kinds of traffic, each with what it is to show. All sizes in tokens, all times in seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import arrivals as generate
from benchmarks.arrivals import Arrival, Lengths
from benchmarks.latency import gaps_between, quantiles, summary, ttft
from benchmarks.targets import Seen, Target, now


@dataclass(frozen=True)
class Sizes:
    """How much of everything; one set for each shape of model."""

    vocab: int
    rate: float
    """Requests a second, about what one engine of this shape can answer of the recorded lengths."""
    seconds: float = 12.0
    """Of arrivals."""
    longest: int = 8192
    """Recorded prompts are cut to this."""
    most_output: int = 1024
    chats: int = 64
    chat_prompt: int = 256
    long_prompt: int = 32768
    long_repeats: int = 2
    pause: float = 1.5
    """Chats alone, before and after each long prompt."""
    prefix: int = 8192
    suffix: int = 64
    answer: int = 16
    shared_requests: int = 256
    cold_requests: int = 40
    cold_rate: float = 3.0
    """Low, so that cold requests hardly wait for each other; shared ones come at four times this."""
    small_cache: int = 131072
    """Of `overload`: about half of what a full batch of recorded requests would use."""
    ttft_target: float = 0.5
    gap_target: float = 0.05

    @property
    def context(self) -> int:
        """What an engine must take: the longest request of any scenario, with chats that go on and on."""
        return max(self.long_prompt + 2048, self.prefix + 1024, self.longest + self.most_output + 1024)


SIZES = {
    "8b": Sizes(vocab=128256, rate=14),
    "0.6b": Sizes(vocab=151936, rate=80, cold_rate=8),
    "tiny": Sizes(
        vocab=1000,
        rate=40,
        seconds=3,
        longest=256,
        most_output=32,
        chats=4,
        chat_prompt=16,
        long_prompt=1024,
        long_repeats=2,
        pause=0.3,
        prefix=1024,
        suffix=16,
        answer=4,
        shared_requests=16,
        cold_requests=8,
        cold_rate=4,
        small_cache=2048,
    ),
}


@dataclass
class Traffic:
    """What a scenario is given: where to send, how much, which chance."""

    target: Target
    play: Callable[[list[Arrival]], Awaitable[list[Seen]]]
    """Sends all to the target, each when it is due."""
    sizes: Sizes
    process: str = "gamma"
    rate: float | None = None
    """In place of that of `sizes`."""
    seed: int = 0

    def line(self, part: str, seen: list[Seen], **more: Any) -> dict[str, Any]:
        return {"part": part, **summary(seen, self.sizes.ttft_target, self.sizes.gap_target), **more}

    def recorded(self, trace: str, factor: float, share: float = 0.0) -> list[Arrival]:
        """Arrivals with recorded lengths, `share` of them behind one of eight prefixes of 1,024 tokens."""
        sizes, rng = self.sizes, np.random.default_rng([self.seed, len(trace)])
        rate = factor * (self.rate or sizes.rate)
        times = generate.PROCESSES[self.process](rng, rate, sizes.seconds)
        lengths, outputs = Lengths(trace).draw(rng, len(times), sizes.longest)
        prompts = generate.random_prompts(rng, lengths, sizes.vocab)
        prefixes = generate.random_prompts(rng, [min(1024, sizes.longest)] * 8, sizes.vocab)
        prompts = generate.with_prefixes(rng, prompts, prefixes, share)
        outputs = np.minimum(outputs, sizes.most_output)
        return [
            Arrival(at, prompt, output, trace)
            for at, prompt, output in zip(times.tolist(), prompts, outputs.tolist(), strict=True)
        ]


async def long_beside_chats(traffic: Traffic) -> list[dict[str, Any]]:
    """Chats that decode, and long prompts that arrive one after the other among them.

    Shows what a long prompt does to the gaps between the chats' tokens: p99 of those that end while it
    prefills, over p99 of those that end while the chats are alone, in one run.
    """
    sizes, rng = traffic.sizes, np.random.default_rng(traffic.seed)
    room = sizes.context - sizes.chat_prompt - 1
    chats = [
        Arrival(0.0, prompt, room, "chat")
        for prompt in generate.random_prompts(rng, [sizes.chat_prompt] * sizes.chats, sizes.vocab)
    ]
    begin = now()
    seen = [Seen("chat", len(chat.prompt), chat.output, begin, begin) for chat in chats]
    tasks = [asyncio.create_task(traffic.target.send(a, s)) for a, s in zip(chats, seen, strict=True)]
    alone: list[float] = []
    beside: list[float] = []
    longs: list[Seen] = []
    try:
        while any(len(one.times) < 8 for one in seen):
            await asyncio.sleep(0.01)
        for prompt in generate.random_prompts(rng, [sizes.long_prompt] * sizes.long_repeats, sizes.vocab):
            start = now()
            await asyncio.sleep(sizes.pause)
            alone += gaps_between(seen, start, now())
            (long,) = await traffic.play([Arrival(0.0, prompt, 1, "long")])
            if not long.complete:
                raise RuntimeError(f"the long prompt failed: {long.error}")
            beside += gaps_between(seen, long.sent, long.times[0])
            longs.append(long)
        if any(task.done() for task in tasks):
            raise RuntimeError("a chat ended too early")
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
    figures = {"itl_alone_ms": quantiles("", alone), "itl_beside_ms": quantiles("", beside)}
    line: dict[str, Any] = {"part": "chats beside long prompts", "chats": sizes.chats}
    line |= {"long_prompt": sizes.long_prompt, "requests": len(seen) + len(longs)}
    line |= {f"{name}{key}": value for name, found in figures.items() for key, value in found.items()}
    line |= {f"itl_ms{key}": value for key, value in quantiles("", beside).items()}
    line |= quantiles("ttft_ms", map(ttft, longs))
    line |= {"gaps_alone": len(alone), "gaps_beside": len(beside)}
    line["ratio"] = line["itl_beside_ms_p99"] / line["itl_alone_ms_p99"]
    line["ratio_target"] = "<= 2"
    return [line]


async def shared_prefix(traffic: Traffic) -> list[dict[str, Any]]:
    """Requests with one long prefix, against requests of that length without: the ratio of TTFT p50."""
    sizes, rng = traffic.sizes, np.random.default_rng(traffic.seed)

    def requests(n: int, rate: float, prefixes: list[list[int]], group: str) -> list[Arrival]:
        times = np.cumsum(rng.exponential(1 / rate, n)).tolist()
        ends = generate.random_prompts(rng, [sizes.suffix] * n, sizes.vocab)
        return [
            Arrival(at, prefixes[i % len(prefixes)] + end, sizes.answer, group)
            for i, (at, end) in enumerate(zip(times, ends, strict=True))
        ]

    many = generate.random_prompts(rng, [sizes.prefix] * sizes.cold_requests, sizes.vocab)
    cold = await traffic.play(requests(sizes.cold_requests, sizes.cold_rate, many, "cold"))
    (prefix,) = generate.random_prompts(rng, [sizes.prefix], sizes.vocab)
    await traffic.play([Arrival(0.0, prefix, 1, "first")])
    rate = 4 * sizes.cold_rate
    shared = await traffic.play(requests(sizes.shared_requests, rate, [prefix], "shared"))
    lines = [
        traffic.line("cold", cold, rate=sizes.cold_rate, prefix=sizes.prefix),
        traffic.line("shared", shared, rate=rate, prefix=sizes.prefix),
    ]
    lines[1]["ratio"] = lines[0]["ttft_ms_p50"] / lines[1]["ttft_ms_p50"]
    lines[1]["ratio_target"] = ">= 8"
    return lines


async def overload(traffic: Traffic) -> list[dict[str, Any]]:
    """Nearly twice what the engine can answer, a small cache, a short queue: who is served, and how well."""
    factor = 1.8
    seen = await traffic.play(traffic.recorded("azure-2023-conversation", factor))
    return [traffic.line("all", seen, factor=factor, process=traffic.process)]


async def mixed(traffic: Traffic) -> list[dict[str, Any]]:
    """A busy engine: conversations, half of them behind system prompts, and completions."""
    conversations = traffic.recorded("azure-2023-conversation", 0.6, share=0.5)
    completions = traffic.recorded("azure-2023-code", 0.2)
    seen = await traffic.play(conversations + completions)
    return [traffic.line("all", seen, factor=0.8, process=traffic.process)]


@dataclass(frozen=True)
class Scenario:
    run: Callable[[Traffic], Awaitable[list[dict[str, Any]]]]
    max_tokens_per_step: int
    """Prompt chunks of a step are what is left of this beside the decoding requests."""
    max_running: int = 256
    small_cache: bool = False
    max_waiting: int = 4096


SCENARIOS = {
    "long-beside-chats": Scenario(long_beside_chats, 128, max_running=96),
    "shared-prefix": Scenario(shared_prefix, 8192),
    "overload": Scenario(overload, 1024, small_cache=True, max_waiting=128),
    "mixed": Scenario(mixed, 1024),
}
