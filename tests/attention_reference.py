"""Random steps with the attention that they must give, computed densely in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.attention import LayerCache, PagedBatch


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One sequence: query [n, heads, head_dim] at its last n positions, key and value of all of them.

    Returns float64 [n, heads, head_dim].
    """
    heads_per_kv = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(heads_per_kv, dim=1)
    value = value.double().repeat_interleave(heads_per_kv, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    context, new = key.shape[0], query.shape[0]
    at = torch.arange(context - new, context, device=query.device)[:, None]
    seen = torch.arange(context, device=query.device)[None, :]
    hidden = seen > at
    if window is not None:
        hidden |= seen <= at - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


@dataclass(frozen=True)
class Step:
    """One step's inputs, and what must come of them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: LayerCache
    batch: PagedBatch
    scale: float
    window: int | None
    softcap: float | None
    expected: torch.Tensor
    """float64 [T, heads, head_dim]; NaN for padded entries, of which only finiteness is asked."""
    cache_after: LayerCache
    """NaN, the poison, wherever no sequence of the step owns the place."""

    def check(self, out: torch.Tensor, *, atol: float, rtol: float = 0.0) -> None:
        """Raise AssertionError unless `out` and the cache are what this step must leave behind."""
        assert out.shape == self.query.shape
        assert out.dtype == self.query.dtype
        assert torch.isfinite(out).all()
        real = ~self.expected.isnan()
        torch.testing.assert_close(out.double()[real], self.expected[real], atol=atol, rtol=rtol)
        for got, want in (
            (self.cache.key, self.cache_after.key),
            (self.cache.value, self.cache_after.value),
        ):
            # Block 0 is scratch: what is left there is nobody's.
            torch.testing.assert_close(got[1:], want[1:], atol=0.0, rtol=0.0, equal_nan=True)


def random_step(
    sequences: Sequence[tuple[int, int]],
    *,
    num_decodes: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    padded: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    strided: bool = True,
    table_width: int | None = None,
    seed: int = 0,
) -> Step:
    """A step of `sequences` (context_len, query_len), the first `num_decodes` with query_len 1.

    `padded` adds that many padded decode entries after the real decodes. Pages are shuffled over a
    cache twice as large as needed. Every place that no sequence owns is NaN, as are the positions a
    window leaves behind for good. `strided` cuts query, key and value out of one fused tensor.
    """
    assert all(new == 1 for _, new in sequences[:num_decodes])
    generator = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def cut(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return rows[:, :heads], rows[:, heads:-kv_heads], rows[:, -kv_heads:]

    scale = head_dim**-0.5 if scale is None else scale
    sequences = [*sequences[:num_decodes], *[(1, 0)] * padded, *sequences[num_decodes:]]
    blocks = [-(-context // block_size) if new else 0 for context, new in sequences]
    width = max(1, *blocks) if table_width is None else table_width
    num_blocks = 1 + 2 * sum(blocks)
    free = (1 + torch.randperm(num_blocks - 1, generator=generator, device=device)).tolist()

    shape = (num_blocks, block_size, kv_heads, head_dim)
    key_cache, value_cache = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    tables = torch.zeros(len(sequences), width, dtype=torch.int32, device=device)
    fused, slots, starts, expected, written = [], [], [], [], []
    total = 0
    for index, (context, new) in enumerate(sequences):
        starts.append(total)
        count = max(new, 1)
        total += count
        rows = randn(count, heads + 2 * kv_heads, head_dim)
        fused.append(rows)
        if new == 0:
            slots.append(torch.zeros(1, dtype=torch.int64, device=device))
            expected.append(torch.full((1, heads, head_dim), torch.nan, dtype=torch.float64, device=device))
            continue
        owned = torch.tensor([free.pop() for _ in range(blocks[index])], device=device)
        tables[index, : len(owned)] = owned
        position = torch.arange(context, device=device)
        slot = owned[position // block_size] * block_size + position % block_size
        query, key, value = cut(rows)
        past = context - new
        keys, values = (
            torch.cat((randn(past, kv_heads, head_dim), key)),
            torch.cat((randn(past, kv_heads, head_dim), value)),
        )
        live = 0 if window is None else max(0, past - window + 1)
        key_cache.view(-1, kv_heads, head_dim)[slot[live:past]] = keys[live:past]
        value_cache.view(-1, kv_heads, head_dim)[slot[live:past]] = values[live:past]
        written.append((slot[past:], key, value))
        slots.append(slot[past:])
        expected.append(dense_attention(query, keys, values, scale=scale, window=window, softcap=softcap))

    key_after, value_after = key_cache.clone(), value_cache.clone()
    for slot, key, value in written:
        key_after.view(-1, kv_heads, head_dim)[slot] = key
        value_after.view(-1, kv_heads, head_dim)[slot] = value
    query, key, value = cut(torch.cat(fused))
    if not strided:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()

    def int32(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    decodes = num_decodes + padded
    batch = PagedBatch(
        cache_slots=torch.cat(slots).int(),
        query_start=int32(starts),
        query_len=int32([max(new, 1) for _, new in sequences]),
        context_len=int32([context for context, _ in sequences]),
        block_tables=tables,
        num_decodes=decodes,
        num_prefills=len(sequences) - decodes,
    )
    return Step(
        query=query,
        key=key,
        value=value,
        cache=LayerCache(key_cache, value_cache),
        batch=batch,
        scale=scale,
        window=window,
        softcap=softcap,
        expected=torch.cat(expected),
        cache_after=LayerCache(key_after, value_after),
    )


def split_step(step: Step, at: int) -> Step:
    """The one sequence of `step` as two that share its blocks: one computes its tokens before `at`, and one,
    in the same step, those from there on, which see the former. It is a decode if that is one token.
    """
    [new], [context] = step.batch.query_len.tolist(), step.batch.context_len.tolist()
    order = torch.arange(new, device=step.query.device)
    starts, lengths, contexts = [0, at], [at, new - at], [context - new + at, context]
    decodes = int(new - at == 1)
    if decodes:  # decodes come first
        order = order.roll(1)
        starts, lengths, contexts = [0, 1], [1, at], [context, context - 1]

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=step.query.device)

    batch = replace(
        step.batch,
        cache_slots=step.batch.cache_slots[order],
        query_start=int32(starts),
        query_len=int32(lengths),
        context_len=int32(contexts),
        block_tables=step.batch.block_tables.repeat(2, 1),
        num_decodes=decodes,
        num_prefills=2 - decodes,
    )
    tensors = {name: getattr(step, name)[order] for name in ("query", "key", "value", "expected")}
    return replace(step, batch=batch, **tensors)


def captured_step(step: Step, tokens: int, sequences: int) -> Step:
    """`step` as a captured one has it, of so many tokens and sequences, whatever it is that they are.

    What is added belongs to nobody; `expected` stays that of the tokens of `step`.
    """
    batch = step.batch
    more = sequences - len(batch.query_len)

    def grown(tensor: torch.Tensor, rows: int, value: float = 0) -> torch.Tensor:
        return torch.cat((tensor, tensor.new_full((rows, *tensor.shape[1:]), value)))

    batch = PagedBatch(
        cache_slots=grown(batch.cache_slots, tokens - len(step.query)),
        query_start=grown(batch.query_start, more, 1),
        query_len=grown(batch.query_len, more),
        context_len=grown(batch.context_len, more),
        block_tables=grown(batch.block_tables, more),
        num_decodes=sequences,
        num_prefills=sequences,
    )
    query, key, value = (grown(each, tokens - len(each)) for each in (step.query, step.key, step.value))
    return replace(step, batch=batch, query=query, key=key, value=value)
