"""Paged attention in Triton, as one custom op that whole-model compilation takes as it stands."""

from __future__ import annotations

import torch

from engine.attention import LayerCache, PagedBatch
from engine.attention.flashinfer_decode import flashinfer_decode, takes
from engine.attention.rotary import Rotary
from engine.attention.triton_decode import Fresh, decode
from engine.attention.triton_prefill import prefill
from engine.attention.triton_rotary import rotate_and_write
from engine.attention.triton_splits import SplitScratch
from engine.attention.triton_write import write_cache
from engine.triton_launch import multiprocessors

MAX_FRESH = 64
"""Decodes for which their kernel rotates and writes what is new itself: more make several waves of programs,
each of which would do so before it asks for its pages."""


@torch.library.custom_op(
    "stepahead::paged_attention",
    mutates_args=("key_cache", "value_cache", "partial", "partial_lse", "arrivals"),
)
def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_slots: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    context_len: torch.Tensor,
    block_tables: torch.Tensor,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    arrivals: torch.Tensor,
    programs: int,
    num_decodes: int,
    num_prefills: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    flashinfer: bool,
) -> torch.Tensor:
    """Write key and value into the caches, then attend; tokens that no sequence names stay undefined.

    cos, sin, query_norm, key_norm and eps are those of a `Rotary`, or None and 0 where there is none.
    `flashinfer`: decode by its kernel, which knows neither window nor soft cap.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    scratch = SplitScratch(partial, partial_lse, arrivals, programs)
    all_decodes = num_decodes + num_prefills == query_len.shape[0]
    flashinfer &= all_decodes
    fresh = None
    if cos is None or sin is None:
        write_cache(key, value, key_cache, value_cache, cache_slots)
    else:
        rotary = Rotary(cos, sin, query_norm, key_norm, eps)
        if num_prefills or flashinfer or num_decodes > MAX_FRESH:
            query = rotate_and_write(query, key, value, rotary, key_cache, value_cache, cache_slots)
        else:
            fresh = Fresh(key, value, cache_slots, rotary)
    if num_decodes and flashinfer:
        flashinfer_decode(
            out,
            query,
            key_cache,
            value_cache,
            context_len,
            block_tables,
            arrivals,
            num_decodes=num_decodes,
            scale=scale,
        )
    elif num_decodes:
        decode(
            out,
            query,
            key_cache,
            value_cache,
            query_start,
            query_len,
            context_len,
            block_tables,
            scratch,
            num_decodes=num_decodes,
            every=all_decodes,
            fresh=fresh,
            scale=scale,
            window=window,
            softcap=softcap,
        )
    if num_prefills:
        prefill(
            out,
            query,
            key_cache,
            value_cache,
            query_start,
            query_len,
            context_len,
            block_tables,
            scratch,
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            scale=scale,
            window=window,
            softcap=softcap,
        )
    return out


@paged_attention.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


class TritonAttention:
    """The backend. One instance serves every layer of a model, on one stream at a time.

    Nothing it does depends on a length as the host knows it, so a captured graph stays right while
    contexts grow.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        programs: int | None = None,
        flashinfer: bool = False,
    ) -> None:
        """Room for `max_sequences` decoding at once; head counts and dimension are the largest of any layer.

        One alone is padded to two where steps are captured, so there is room for two.

        `programs`: multiprocessors to fill, by default all. `flashinfer`: its kernel decodes in the layers
        that it takes (see `check_flashinfer`).
        """
        device = torch.device(device)
        if programs is None:
            programs = multiprocessors(device)
        self.flashinfer = flashinfer
        sequences = max(max_sequences, 2)
        self.scratch = SplitScratch.allocate(sequences, heads, kv_heads, head_dim, programs, device)

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
        """See `PagedAttention`. ValueError: a layout or scale that the kernels do not take."""
        if scale <= 0 or (softcap is not None and softcap <= 0):
            raise ValueError(f"scale and softcap must be positive, not {scale} and {softcap}")
        if cache.key.stride() != cache.value.stride():
            raise ValueError("the key and value caches must be laid out alike")
        for name, tensor in (("query", query), ("key", key), ("value", value), ("cache", cache.key)):
            if tensor.stride(-1) != 1:
                raise ValueError(f"{name}: the elements of one head must be contiguous")
        if rotary is not None and (rotary.cos.stride(-1) != 1 or rotary.sin.stride(-1) != 1):
            raise ValueError("rotary: the elements of one token must be contiguous")
        scratch, group = self.scratch, query.shape[1] // key.shape[1]
        out: torch.Tensor = paged_attention(
            query,
            key,
            value,
            *(rotary or (None, None, None, None, 0.0)),
            cache.key,
            cache.value,
            batch.cache_slots,
            batch.query_start,
            batch.query_len,
            batch.context_len,
            batch.block_tables,
            scratch.partial,
            scratch.partial_lse,
            scratch.arrivals,
            scratch.programs,
            batch.num_decodes,
            batch.num_prefills,
            scale,
            window,
            softcap,
            self.flashinfer and takes(group, query.shape[2], window, softcap),
        )
        return out
