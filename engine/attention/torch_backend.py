"""Paged attention in plain torch: the backend of a CPU, and the reference on a GPU.

The blocks of each sequence are gathered into dense keys and values, and torch's own attention does
the rest. What the layers of a step share (indices, masks) is derived once, in `prepare`. Lengths are
read on the host, so on a GPU this synchronises and can't be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention import LayerCache, PagedBatch

GROUP_TOKENS = 2048  # gathered at once: the keys and values of one group should stay in the CPU's cache
QUERY_TILE = 512  # queries of a prompt computed at once, which bounds the mask


@dataclass(frozen=True, slots=True)
class _Group:
    """`n` sequences with `length` queries each, which attend over `m` blocks each."""

    tokens: torch.Tensor | slice
    """int64 [n * length] or the same as a slice: the queries."""
    blocks: torch.Tensor
    """int64 [n * m]"""
    count: int
    mask: torch.Tensor
    """bool [n, 1, length, m * block_size]: True where a query sees a position."""
    unseen: torch.Tensor
    """int64: gathered positions that no query sees. Their content is arbitrary, NaN included."""


@dataclass(frozen=True, slots=True)
class _TorchBatch(PagedBatch):
    slots: torch.Tensor
    """int64 [T]"""
    sequences: list[tuple[int, int, int]]
    """(query_start, query_len, context_len) of each sequence."""
    groups: dict[tuple[int | None, int], list[_Group]] = field(default_factory=dict)
    """By (window, block_size); made when the first layer of that kind asks."""


class TorchAttention:
    """Implements `engine.attention.PagedAttention`."""

    def prepare(self, batch: PagedBatch) -> PagedBatch:
        columns = torch.stack([batch.query_start, batch.query_len, batch.context_len], dim=1)
        return _TorchBatch(
            **{name: getattr(batch, name) for name in PagedBatch.__dataclass_fields__},
            slots=batch.cache_slots.long(),
            sequences=[(start, length, max(context, 1)) for start, length, context in columns.tolist()],
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `PagedAttention`. A batch that did not go through `prepare` is prepared here."""
        shared = batch if isinstance(batch, _TorchBatch) else self.prepare(batch)
        assert isinstance(shared, _TorchBatch)
        block_size = cache.key.shape[1]
        _write(cache.key, shared.slots, key)
        _write(cache.value, shared.slots, value)
        kind = (window, block_size)
        if kind not in shared.groups:
            shared.groups[kind] = list(_groups(shared, window, block_size))
        out = torch.zeros_like(query)
        for group in shared.groups[kind]:
            tokens = query[group.tokens].view(group.count, -1, *query.shape[1:]).transpose(1, 2)
            attended = _attend(
                tokens,
                _gather(cache.key, group),
                _gather(cache.value, group),
                group.mask,
                scale,
                softcap,
            )
            out[group.tokens] = attended.transpose(1, 2).flatten(0, 1)
        return out


def _write(cache: torch.Tensor, slots: torch.Tensor, states: torch.Tensor) -> None:
    cache.flatten(0, 1).index_copy_(0, slots, states)


def _gather(cache: torch.Tensor, group: _Group) -> torch.Tensor:
    """[n, kv_heads, m * block_size, head_dim], with zeros where nobody looks: 0 * NaN is NaN."""
    states = cache.index_select(0, group.blocks).flatten(0, 1)
    if len(group.unseen):
        states.index_fill_(0, group.unseen, 0)
    return states.view(group.count, -1, *states.shape[1:]).transpose(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[n, heads, length, head_dim] over [n, kv_heads, kv, head_dim] -> [n, heads, length, head_dim]."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads
        )
    n, _, length, head_dim = query.shape
    packed = query.reshape(n, kv_heads, heads // kv_heads, length, head_dim)
    scores = (packed @ key.transpose(-1, -2).unsqueeze(2)).float() * scale
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask.unsqueeze(2), float("-inf"))
    weights = scores.softmax(dim=-1).to(value.dtype)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


def _groups(batch: _TorchBatch, window: int | None, block_size: int) -> Iterator[_Group]:
    """Decodes of like length together, then each prompt tile by tile."""
    decodes = sorted(range(batch.num_decodes), key=lambda i: batch.sequences[i][2])
    begin = 0
    while begin < len(decodes):
        end = begin + 1
        while end < len(decodes) and (end + 1 - begin) * batch.sequences[decodes[end]][2] <= GROUP_TOKENS:
            end += 1
        members = decodes[begin:end]
        yield _group(
            batch, members, members, [batch.sequences[i][2] - 1 for i in members], 1, window, block_size
        )
        begin = end
    for i in range(batch.num_decodes, len(batch.sequences)):
        start, length, context = batch.sequences[i]
        for done in range(0, length, QUERY_TILE):
            size = min(QUERY_TILE, length - done)
            tokens = slice(start + done, start + done + size)
            yield _group(batch, [i], tokens, [context - length + done], size, window, block_size)


def _group(
    batch: _TorchBatch,
    sequences: list[int],
    tokens: list[int] | slice,
    first_positions: list[int],
    length: int,
    window: int | None,
    block_size: int,
) -> _Group:
    """`first_positions`: of the first query of each sequence."""
    device = batch.block_tables.device
    first = torch.tensor(first_positions, device=device)
    # The first block that any query of a sequence sees, and how many blocks from there.
    skipped = [0 if window is None else max(0, p - window + 1) // block_size for p in first_positions]
    width = max((p + length - 1) // block_size + 1 - s for p, s in zip(first_positions, skipped, strict=True))
    offset = torch.tensor(skipped, device=device)
    columns = offset[:, None] + torch.arange(width, device=device)
    inside = columns.clamp(max=batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables[torch.tensor(sequences, device=device)].long().gather(1, inside)
    position = (offset * block_size)[:, None, None] + torch.arange(width * block_size, device=device)
    queries = first[:, None, None] + torch.arange(length, device=device)[None, :, None]
    mask = position <= queries
    if window is not None:
        mask &= position > queries - window
    unseen = (~mask.any(dim=1)).flatten().nonzero().flatten()
    return _Group(
        tokens=tokens if isinstance(tokens, slice) else torch.tensor(tokens, device=device),
        blocks=blocks.flatten(),
        count=len(sequences),
        mask=mask.unsqueeze(1),
        unseen=unseen,
    )
