"""The demo model on this machine's CPU: the engine, `transformers.generate`, and transformers' batching.

    python -m benchmarks.cpu [--requests 1 8 32] [--output 64] [--out benchmarks/results/cpu.jsonl]

One process, the same float32 weights, prompts and greedy tokens for all. transformers.generate
answers the requests one by one; `generate_batch` is transformers' own continuous batching. Rounds
alternate between the systems, so that what else the machine does falls on all alike. Checks that
all give the same tokens, and prints tokens per second with the spread over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.arguments import count, file
from deployments.demo_model import resolve
from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.request import Request, SamplingParams

TOPICS = ("rivers", "bread", "the moon", "chess", "bees", "trains", "glass", "opera")


def prompts_of(tokenizer: Any, n: int) -> list[list[int]]:
    chats = [
        [{"role": "user", "content": f"Tell me {i} things about {TOPICS[i % 8]}."}] for i in range(2, n + 2)
    ]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


class Systems:
    """The three ways, each a coroutine from prompts to tokens."""

    def __init__(self, directory: str, output: int, largest: int, threads: int) -> None:
        self.output = output
        auto: Any = AutoModelForCausalLM
        self.model = auto.from_pretrained(directory, dtype=torch.float32)
        # Continuous batching changes the attention of its model.
        self.batching_model = auto.from_pretrained(directory, dtype=torch.float32)
        self.engine = AsyncEngine(
            EngineConfig(
                model=directory,
                device="cpu",
                max_running_requests=largest,
                max_tokens_per_step=512,
                cpu_threads=threads,
                prefix_caching=False,
            )
        )

    def config(self, **changes: Any) -> GenerationConfig:
        kind: Any = GenerationConfig
        config: GenerationConfig = kind(
            max_new_tokens=self.output,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            use_cache=True,
            **changes,
        )
        return config

    async def stepahead(self, prompts: list[list[int]]) -> list[list[int]]:
        async def one(i: int, prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            sampling = SamplingParams(max_tokens=self.output, temperature=0, ignore_eos=True)
            async for each in self.engine.generate(Request(str(i), prompt, sampling)):
                tokens += each.tokens
            return tokens

        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))

    async def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        config = self.config()
        outputs = [self.model.generate(torch.tensor([p]), generation_config=config) for p in prompts]
        return [out[0, len(p) :].tolist() for out, p in zip(outputs, prompts, strict=True)]

    async def generate_batch(self, prompts: list[list[int]]) -> list[list[int]]:
        outputs = self.batching_model.generate_batch(
            inputs=prompts, generation_config=self.config(), progress_bar=False, warmup=False
        )
        return [list(each.generated_tokens) for each in outputs.values()]


async def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    directory = resolve("demo")
    prompts = prompts_of(AutoTokenizer.from_pretrained(directory), max(args.requests))
    systems = Systems(directory, args.output, max(args.requests), args.threads)
    await systems.engine.start()
    ways: dict[str, Callable[[list[list[int]]], Awaitable[list[list[int]]]]] = {
        "stepahead": systems.stepahead,
        "transformers.generate": systems.generate,
        "transformers.generate_batch": systems.generate_batch,
    }
    lines = []
    for n in args.requests:
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            texts = {}
            for way, run in ways.items():
                begin = time.perf_counter()
                texts[way] = await run(prompts[:n])
                speeds[way].append(n * args.output / (time.perf_counter() - begin))
            for way, tokens in texts.items():
                different = [i for i in range(n) if tokens[i] != texts["transformers.generate"][i]]
                if different:
                    raise RuntimeError(f"{way} gives other tokens for requests {different}")
        for way, found in speeds.items():
            lines.append(
                {
                    "requests": n,
                    "system": way,
                    "output_tokens_per_s": statistics.median(found),
                    "min": min(found),
                    "max": max(found),
                    "stepahead_is_times_faster": statistics.median(
                        ours / theirs for ours, theirs in zip(speeds["stepahead"], found, strict=True)
                    ),
                    "output": args.output,
                    "rounds": args.rounds,
                    "threads": args.threads,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                }
            )
    await systems.engine.stop()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=count, nargs="*", default=[1, 8, 32])
    parser.add_argument("--output", type=count, default=64)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--out", type=file, help="append the JSON lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = asyncio.run(compare(args))
    if args.out:
        with args.out.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
    print(f"{'requests':>8}  {'system':28} {'tokens/s':>8}  {'min':>7} {'max':>7}  stepahead is")
    for x in lines:
        print(
            f"{x['requests']:8}  {x['system']:28} {x['output_tokens_per_s']:8.1f}  "
            f"{x['min']:7.1f} {x['max']:7.1f}  {x['stepahead_is_times_faster']:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
