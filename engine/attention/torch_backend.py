"""Paged attention in plain torch: the backend of a CPU, and the reference on a GPU.

The blocks of each sequence are gathered into dense keys and values, and torch's own attention does
the rest. What layers of a step share (indices, masks) is derived once a step. Lengths are read on the
host, so on a GPU this synchronises and can't be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention import LayerCache, PagedBatch
from engine.attention.rotary import Rotary

GROUP_TOKENS = 1536  # gathered at once: keys and values of a group should stay in a core's cache
QUERY_TILE = 512  # queries of a prompt computed at once, which bounds the mask


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the layers that share indices and masks have in common."""

    window: int | None
    block_size: int
    kv_heads: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Group:
    """`n` sequences with equally many queries each, over equally many blocks each."""

    n: int
    tokens: torch.Tensor | slice
    """int64 [n * queries], or the same as a slice."""
    rows: torch.Tensor
    """int64 [n * kv_heads * blocks]: block * kv_heads + head."""
    mask: torch.Tensor
    """[n, 1, queries, blocks * block_size]: 0 where a query sees a position, otherwise -inf."""
    unseen: torch.Tensor
    """int64: places in the gathered [n * kv_heads * blocks * block_size] that no query sees."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """What layers of one kind share."""

    place: tuple[torch.Tensor, torch.Tensor]
    """int64 [T] each: block and offset of each token's key and value."""
    groups: list[_Group]


@dataclass(frozen=True, slots=True)
class _TorchBatch(PagedBatch):
    sequences: list[tuple[int, int, int]]
    """(query_start, query_len, context_len) of each sequence."""
    shared: dict[_Kind, _Shared] = field(default_factory=dict)
    """Made when the first layer of a kind asks."""

    def of_kind(self, kind: _Kind) -> _Shared:
        if kind not in self.shared:
            slots = self.cache_slots.long()
            place = slots // kind.block_size, slots % kind.block_size
            self.shared[kind] = _Shared(place, list(_groups(self, kind)))
        return self.shared[kind]


class TorchAttention:
    """Implements `engine.attention.PagedAttention` and `PreparesBatch`.

    Fastest where the cache lies in memory as [num_blocks, kv_heads, block_size, head_dim].
    """

    def prepare(self, batch: PagedBatch) -> PagedBatch:
        columns = torch.stack([batch.query_start, batch.query_len, batch.context_len], dim=1)
        return _TorchBatch(
            **{each.name: getattr(batch, each.name) for each in fields(PagedBatch)},
            # A padded entry may have no context; looking at one position keeps it finite.
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
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """See `PagedAttention`. A batch that did not go through `prepare` is prepared here."""
        if rotary is not None:
            query, key = rotary.apply(query, key)
        prepared = batch if isinstance(batch, _TorchBatch) else self.prepare(batch)
        assert isinstance(prepared, _TorchBatch)
        _, block_size, kv_heads, _ = cache.key.shape
        shared = prepared.of_kind(_Kind(window, block_size, kv_heads, query.dtype))
        cache.key.index_put_(shared.place, key)
        cache.value.index_put_(shared.place, value)
        out = torch.zeros_like(query)
        for group in shared.groups:
            queries = query[group.tokens].view(group.n, -1, *query.shape[1:]).transpose(1, 2)
            keys, values = _gather(cache.key, group), _gather(cache.value, group)
            attended = _attend(queries, keys, values, group.mask, scale, softcap)
            out[group.tokens] = attended.transpose(1, 2).flatten(0, 1)
        return out


def _gather(cache: torch.Tensor, group: _Group) -> torch.Tensor:
    """[n, kv_heads, blocks * block_size, head_dim], with zeros where nobody looks: 0 * NaN is NaN."""
    kv_heads, head_dim = cache.shape[2:]
    by_head = cache.transpose(1, 2)
    if by_head.is_contiguous():
        states = by_head.flatten(0, 1).index_select(0, group.rows)
    else:
        states = by_head[group.rows // kv_heads, group.rows % kv_heads]
    states.view(-1, head_dim).index_fill_(0, group.unseen, 0)
    return states.view(group.n, kv_heads, -1, head_dim)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[n, heads, queries, head_dim] over [n, kv_heads, keys, head_dim] -> [n, heads, queries, head_dim]."""
    n, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    if softcap is not None:
        grouped = query.reshape(n, kv_heads, heads // kv_heads, queries, head_dim)
        scores = (grouped @ key.unsqueeze(2).transpose(-1, -2)).float() * scale
        scores = softcap * torch.tanh(scores / softcap) + mask.unsqueeze(2)
        return (scores.softmax(dim=-1).to(value.dtype) @ value.unsqueeze(2)).flatten(1, 2)
    if queries == 1:  # heads that share keys are like queries at one position
        shared = query.reshape(n, kv_heads, heads // kv_heads, head_dim)
        out = scaled_dot_product_attention(shared, key, value, attn_mask=mask, scale=scale)
        return out.reshape(query.shape)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads
    )


def _groups(batch: _TorchBatch, kind: _Kind) -> Iterator[_Group]:
    """Decodes of like length together, then each prompt tile by tile."""
    decodes = sorted(range(batch.num_decodes), key=lambda i: batch.sequences[i][2])
    members: list[int] = []
    for i in decodes:
        context = batch.sequences[i][2]
        if members and (len(members) + 1) * min(context, kind.window or context) > GROUP_TOKENS:
            yield _decode_group(batch, kind, members)
            members = []
        members.append(i)
    if members:
        yield _decode_group(batch, kind, members)
    for i in range(batch.num_decodes, len(batch.sequences)):
        start, length, context = batch.sequences[i]
        for done in range(0, length, QUERY_TILE):
            size = min(QUERY_TILE, length - done)
            tokens = slice(start + done, start + done + size)
            yield _group(batch, kind, [i], tokens, [context - length + done], size)


def _decode_group(batch: _TorchBatch, kind: _Kind, members: list[int]) -> _Group:
    tokens = torch.tensor(members, device=batch.block_tables.device)
    return _group(batch, kind, members, tokens, [batch.sequences[i][2] - 1 for i in members], 1)


def _group(
    batch: _TorchBatch,
    kind: _Kind,
    members: list[int],
    tokens: torch.Tensor | slice,
    positions: list[int],
    queries: int,
) -> _Group:
    """Of `queries` queries of each of `members`, the first of them at `positions`."""
    size, n, device = kind.block_size, len(members), batch.block_tables.device
    # Blocks that a window has left behind are skipped.
    skipped = [0 if kind.window is None else max(0, p - kind.window + 1) // size for p in positions]
    width = max((p + queries - 1) // size + 1 - s for p, s in zip(positions, skipped, strict=True))
    offset = torch.tensor(skipped, device=device)[:, None]
    columns = (offset + torch.arange(width, device=device)).clamp(max=batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables[torch.tensor(members, device=device)].long().gather(1, columns)
    heads = torch.arange(kind.kv_heads, device=device)[:, None]

    key_at = (offset * size + torch.arange(width * size, device=device))[:, None, :]
    query_at = (
        torch.tensor(positions, device=device)[:, None, None] + torch.arange(queries, device=device)[:, None]
    )
    seen = key_at <= query_at
    if kind.window is not None:
        seen &= key_at > query_at - kind.window
    unseen = ~seen.any(dim=1, keepdim=True).expand(n, kind.kv_heads, -1)
    mask = torch.zeros(seen.shape, dtype=kind.dtype, device=device).masked_fill_(~seen, float("-inf"))
    return _Group(
        n=n,
        tokens=tokens,
        rows=(blocks[:, None, :] * kind.kv_heads + heads).flatten(),
        mask=mask[:, None],
        unseen=unseen.flatten().nonzero().flatten(),
    )
