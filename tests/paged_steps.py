"""Drives a PagedModel by hand, as the scheduler would: sequences over shuffled, poisoned pages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from engine.attention import PagedBatch
from engine.model import PagedModel


@dataclass(eq=False)
class Text:
    """One sequence: its tokens, how many are in the cache, and where."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class PagedSteps:
    """Steps of any mix of sequences. `pages_of(i)` and `position_of(p)` exist to be overridden wrongly."""

    def __init__(
        self, model: PagedModel, *, block_size: int = 8, num_blocks: int = 96, seed: int = 0
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.caches = model.allocate_cache(num_blocks, block_size)
        for cache in self.caches:
            cache.key[1:] = torch.nan
            cache.value[1:] = torch.nan
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)

    def add(self, prompt: list[int]) -> Text:
        return Text(list(prompt), [])

    def pages_of(self, text: Text) -> list[int]:
        return text.blocks

    def position_of(self, position: int) -> int:
        return position

    def step(self, work: list[tuple[Text, int]]) -> torch.Tensor:
        """Compute the next n tokens of each text, and append the greedy token to those that are through.

        Returns the logits after each text's last computed token, in the order given.
        """
        order = sorted(work, key=lambda item: item[1] > 1)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sequences: list[tuple[int, int, int]] = []
        for text, n in order:
            end = text.computed + n
            while len(text.blocks) * self.block_size < end:
                text.blocks.append(self.free.pop())
            sequences.append((len(ids), n, end))
            for p in range(text.computed, end):
                ids.append(text.tokens[p])
                positions.append(self.position_of(p))
                slots.append(text.blocks[p // self.block_size] * self.block_size + p % self.block_size)
        width = max(len(text.blocks) for text, _ in order)
        tables = [self.pages_of(text) + [0] * (width - len(text.blocks)) for text, _ in order]
        device = self.model.device
        starts, counts, ends = (
            torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*sequences, strict=True)
        )
        chunks = [n for _, n in order if n > 1]
        batch = PagedBatch(
            cache_slots=torch.tensor(slots, dtype=torch.int32, device=device),
            query_start=starts,
            query_len=counts,
            context_len=ends,
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            num_decodes=len(order) - len(chunks),
            num_prefills=len(chunks),
        )
        logits = self.model.forward(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            batch,
            self.caches,
            (starts + counts - 1).long(),
        )
        for (text, n), row in zip(order, logits, strict=True):
            text.computed += n
            if text.computed == len(text.tokens):
                text.tokens.append(int(row.argmax()))
        place = {text: i for i, (text, _) in enumerate(order)}
        return logits[[place[text] for text, _ in work]]

    def alone(self, prompt: list[int], n: int, chunk: int = 10**6) -> list[int]:
        """`n` greedy tokens of one prompt, computed in chunks of at most `chunk` tokens."""
        text = self.add(prompt)
        while len(text.generated) < n:
            self.step([(text, min(chunk, len(text.tokens) - text.computed))])
        return text.generated

    def together(self, prompts: list[list[int]], n: int, chunk: int, stagger: int = 2) -> list[list[int]]:
        """The same for several, a new one every `stagger` steps: some decode while others are in a prompt."""
        texts = [self.add(prompt) for prompt in prompts]
        step = 0
        while any(len(text.generated) < n for text in texts):
            started = texts[: step // stagger + 1]
            work = [(t, min(chunk, len(t.tokens) - t.computed)) for t in started if len(t.generated) < n]
            if work:
                self.step(work)
            step += 1
        return [text.generated for text in texts]
