"""What a model's attention is like, found by running the model, and why some models are refused.

Pages hold keys and values and nothing else, so a model can be served only if its tokens meet nowhere
but in causal attention that goes through transformers' attention interface. Two tiny forwards show it:
the first records every call of that interface, the second has the tokens in reverse order. In both,
attention is replaced by something that looks at each token alone; so the second must give the outputs
of the first in reverse order, unless the model mixes tokens elsewhere (state space, convolution) or
does not take its positions from `position_ids`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

TOKENS = 8
IMPLEMENTATION = "stepahead_probe"
OTHER_MASK = -1  # what fills a mask that is neither causal nor a causal window
# Arguments of an attention call of which paged attention need not know.
HARMLESS = {"scaling", "softcap", "sliding_window", "is_causal", "dropout", "position_ids", "use_cache"}
HARMLESS |= {
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
}


class ModelError(ValueError):
    """The model that `EngineConfig.model` names can't be loaded."""


class UnsupportedModelError(ModelError):
    """The engine can't serve this architecture correctly."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(f"model: {architecture} is not supported: {reason}")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores before softmax."""
    window: int | None
    """Positions that a token sees, itself included; None: all before it."""
    softcap: float | None


@dataclass(slots=True)
class _Probe:
    """Travels through the model to each attention call, as the keyword argument `probe`."""

    architecture: str
    layers: dict[int, LayerSpec] = field(default_factory=dict)
    recording: bool = True

    def refuse(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(self.architecture, reason)


@torch.inference_mode()
def find_layers(model: PreTrainedModel) -> list[LayerSpec]:
    """The attention layers of a causal language model, in order of `layer_idx`.

    Raises `UnsupportedModelError` for a model that paged attention can't serve.
    """
    probe = _Probe(type(model).__name__)
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    tokens = torch.arange(TOKENS, device=model.device)
    ids = (tokens * 7919 + 1) % model.config.get_text_config().vocab_size
    try:
        forward = model(input_ids=ids[None], position_ids=tokens[None], use_cache=False, probe=probe).logits[
            0
        ]
        probe.recording = False
        reverse = model(
            input_ids=ids.flip(0)[None], position_ids=tokens.flip(0)[None], use_cache=False, probe=probe
        ).logits[0]
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise probe.refuse(f"a trial run failed: {type(error).__name__}: {error}") from error
    finally:
        model.set_attn_implementation(before)
    if sorted(probe.layers) != list(range(len(probe.layers))) or not probe.layers:
        raise probe.refuse(
            f"some layer is not attention through transformers' interface: {len(probe.layers)} of them are"
        )
    if not _close(forward, reverse.flip(0)):
        raise probe.refuse(
            "tokens influence each other outside attention, or positions are not taken from position_ids"
        )
    return [probe.layers[index] for index in range(len(probe.layers))]


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    tolerance = 1e-3 if a.dtype == torch.float32 else 5e-2
    scale = a.abs().nan_to_num(0, 0, 0).max().item()
    return torch.allclose(a, b, rtol=0, atol=tolerance * max(scale, 1e-6), equal_nan=True)


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    probe: _Probe | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Stands for attention: looks at each token alone, its position included."""
    if probe is None:
        raise UnsupportedModelError(
            type(module).__name__, "it does not hand keyword arguments on to the attention interface"
        )
    if probe.recording:
        _add_layer(probe, module, query, key, value, attention_mask, kwargs)
    ratio = query.shape[1] // key.shape[1]
    local = value.repeat_interleave(ratio, dim=1) + torch.tanh(query + key.repeat_interleave(ratio, dim=1))
    return local.transpose(1, 2).contiguous(), None


def _add_layer(
    probe: _Probe,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise probe.refuse("an attention layer has no layer_idx")
    if index in probe.layers:
        raise probe.refuse(f"attention layer {index} is used more than once in a forward")
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in HARMLESS)
    if unknown:
        raise probe.refuse(f"its attention takes arguments unknown here: {', '.join(unknown)}")
    if kwargs.get("is_causal") is False:
        raise probe.refuse("its attention is not causal")
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    if key.shape != value.shape or key.shape[2:] != query.shape[2:] or heads % kv_heads:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise probe.refuse(f"query, key and value do not fit each other ({shapes}), as in latent attention")
    scale, softcap = kwargs.get("scaling"), kwargs.get("softcap")
    if not isinstance(scale, float | int | None) or not isinstance(softcap, float | int | None):
        raise probe.refuse("the scale or soft cap of its attention is not a constant")
    # A model that computes with its mask changes the dtype or the content of what `_mask` made.
    codes = [] if mask is None or mask.dtype != torch.int64 else torch.unique(mask).tolist()
    if len(codes) != 1 or codes[0] < 0:
        raise probe.refuse("its attention mask is neither causal nor a causal window")
    probe.layers[index] = LayerSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=codes[0] or None,
        softcap=None if softcap is None else float(softcap),
    )


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Callable[..., torch.Tensor],
    config: Any,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor:
    """In place of a mask, a tensor filled with what it means: the window, 0 for all, or `OTHER_MASK`."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    meaning = _window(mask_function, int(limit), torch.device(device))
    return torch.full((batch_size, 1, q_length, kv_length), meaning, device=device)


def _window(visible: Callable[..., torch.Tensor], limit: int, device: torch.device) -> int:
    """Positions that `visible(batch, head, query, key)` grants; 0 if all up to the query."""
    keys = torch.arange(limit, device=device)
    zero = keys[0]

    def seen(query: int) -> torch.Tensor:
        return visible(zero, zero, keys[query], keys).expand(limit)

    try:
        window = int(seen(limit - 1).sum())
        for query in {0, 1, limit // 2, min(window, limit - 1), window - 1, limit - 1}:
            wanted = (keys <= query) & (keys > query - window)
            if not torch.equal(seen(query), wanted):
                return OTHER_MASK
    except (IndexError, RuntimeError):  # it looks things up for the tokens at hand
        return OTHER_MASK
    return 0 if window == limit else window


AttentionInterface.register(IMPLEMENTATION, _record)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
