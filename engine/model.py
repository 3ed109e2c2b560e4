"""A Hugging Face causal language model whose attention goes through pages.

transformers' own modelling code runs unchanged; the attention interface hands queries, keys and values
of each layer to a backend. Batch and caches travel with the call as a keyword argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from engine.attention import LayerCache, PagedAttention, PagedBatch, PreparesBatch, get_backend
from engine.attention.flashinfer_decode import check_flashinfer
from engine.attention.rotary import Rotary
from engine.config import EngineConfig
from engine.probe import LayerSpec, ModelError, UnsupportedModelError, find_layers

__all__ = ["LayerSpec", "ModelError", "PagedModel", "UnsupportedModelError"]

IMPLEMENTATION = "stepahead"
_AUTO: Any = AutoModelForCausalLM  # untyped, or typed wrongly, in part
ATTENTION_KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class _Pages:
    """What an attention call needs beside its layer's tensors."""

    batch: PagedBatch
    caches: list[LayerCache]
    layers: list[LayerSpec]
    backend: PagedAttention

    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Attention of layer `index`, as `PagedAttention` has it."""
        layer = self.layers[index]
        return self.backend(
            query,
            key,
            value,
            self.caches[index],
            self.batch,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            rotary=rotary,
        )


class PagedModel:
    """Turns the tokens of one step into logits.

    Attributes:
        layers: the attention layers, in order.
        vocab_size: width of the logits.
        context_length: tokens of prompt and output together, at most.
        eos_token_ids: tokens that end a text, by the checkpoint's configuration.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: list[LayerSpec],
        attention: PagedAttention,
        context_length: int,
    ) -> None:
        """Of a model in evaluation mode whose attention implementation is "stepahead"; see `load`."""
        self.model = model
        self._call: Any = model
        self.layers = layers
        self.attention = attention
        self.context_length = context_length
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.eos_token_ids = _eos_token_ids(model)
        self.device = model.device
        self.dtype = model.dtype

    @classmethod
    def load(cls, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> PagedModel:
        """Read (or draw) the weights of `config.model`, in `dtype`, onto `device`.

        Raises `ModelError` if there is no such model, its files are broken or its context is shorter
        than `config.context_length`; `UnsupportedModelError` if its architecture can't be served;
        `ValueError` if `config.attention` can't.
        """
        model_config = _read_config(config)
        _check(model_config)
        context_length = _context_length(model_config, config.context_length)
        make = _draw if config.load_format == "random" else _read
        model = make(model_config, config, device, dtype)
        model.train(False).requires_grad_(False)
        _freeze_rope(model)
        layers = find_layers(model)
        if config.attention == "flashinfer":
            check_flashinfer(layers, device=device, dtype=dtype, block_size=config.block_size)
        attention = get_backend(
            config.attention,
            device,
            max_sequences=config.max_running_requests,
            heads=max(layer.heads for layer in layers),
            kv_heads=max(layer.kv_heads for layer in layers),
            head_dim=max(layer.head_dim for layer in layers),
        )
        return cls(model, layers, attention, context_length)

    def compile(self) -> None:
        """Fuse what can be fused and compile the forward, at its first call."""
        from engine.compiler import compile_model  # seconds that whoever does not compile does without

        self._call = compile_model(self.model, self.layers)

    def cache_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens in all layers."""
        states = sum(layer.kv_heads * layer.head_dim for layer in self.layers)
        return 2 * states * block_size * self.dtype.itemsize

    def allocate_cache(self, num_blocks: int, block_size: int) -> list[LayerCache]:
        """A zeroed cache for each layer, on the model's device in its dtype."""

        def zeros(layer: LayerSpec) -> torch.Tensor:
            tokens_and_heads = (block_size, layer.kv_heads)
            # A CPU reads a head's keys of a block best where they lie together.
            order = tokens_and_heads[::-1] if self.device.type == "cpu" else tokens_and_heads
            states = torch.zeros(num_blocks, *order, layer.head_dim, dtype=self.dtype, device=self.device)
            return states if order == tokens_and_heads else states.transpose(1, 2)

        return [LayerCache(zeros(layer), zeros(layer)) for layer in self.layers]

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        caches: list[LayerCache],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Logits of some tokens of a step; keys and values of all its tokens go to `caches`.

        input_ids, positions: int [T]. logits_indices: int64 [S], indices of tokens of the step.
        Returns [S, vocab_size] in the model's dtype, all that it does to logits included.
        """
        if isinstance(self.attention, PreparesBatch):
            batch = self.attention.prepare(batch)
        output = self._call(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_indices,
            pages=_Pages(batch, caches, self.layers, self.attention),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pages: _Pages,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention call: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out.

    What `kwargs` say was recorded at load (`LayerSpec`).
    """
    index: Any = module.layer_idx
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    out = pages.attend(index, query, key, value)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, _attend)


def _read_config(config: EngineConfig) -> PreTrainedConfig:
    try:
        found = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its own for these
        raise ModelError(f"model: no usable configuration for {config.model!r}: {error}") from error
    assert isinstance(found, PreTrainedConfig)
    return found


def _check(model_config: PreTrainedConfig) -> None:
    """Refuse before reading weights what the configuration alone rules out."""
    text = model_config.get_text_config()
    architecture = (model_config.architectures or [type(model_config).__name__])[0]
    if model_config.is_encoder_decoder:
        raise UnsupportedModelError(architecture, "it is an encoder-decoder model")
    remote = "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or {})
    known = type(model_config) in _AUTO._model_mapping
    if not known and not remote:
        raise UnsupportedModelError(architecture, "it is not a causal language model")
    if known and not remote:
        found: Any = _AUTO._model_mapping[type(model_config)]
        if not found._supports_attention_backend:
            raise UnsupportedModelError(architecture, "it does not use transformers' attention interface")
    kinds = set(getattr(text, "layer_types", None) or ()) - ATTENTION_KINDS
    if kinds:
        raise UnsupportedModelError(architecture, f"it has layers of type {', '.join(sorted(kinds))}")
    if getattr(text, "num_kv_shared_layers", None):
        raise UnsupportedModelError(architecture, "its layers share keys and values")


def _rope_parameters(model_config: PreTrainedConfig) -> list[dict[str, Any]]:
    """One set, or one for each type of layer."""
    found = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
    return [found] if "rope_type" in found else [each for each in found.values() if isinstance(each, dict)]


def _context_length(model_config: PreTrainedConfig, wanted: int | None) -> int:
    architecture = (model_config.architectures or [type(model_config).__name__])[0]
    limit: int | None = getattr(model_config.get_text_config(), "max_position_embeddings", None) or wanted
    if limit is None:
        raise ModelError(f"context_length: must be set, since {architecture} names no limit")
    for rope in _rope_parameters(model_config):
        original = rope.get("original_max_position_embeddings")
        original = int(original or getattr(model_config, "original_max_position_embeddings", None) or limit)
        if rope["rope_type"] == "yarn":
            limit = max(limit, int(original * rope.get("factor", 1)))
        if rope["rope_type"] == "longrope" and (wanted or limit) > original:
            # A sequence that grows beyond it would need all its positions encoded anew.
            raise UnsupportedModelError(
                architecture,
                f"its rotary embedding (longrope) changes beyond {original} tokens; "
                f"a context_length of at most {original} works",
            )
    if wanted is not None and wanted > limit:
        raise ModelError(f"context_length: {wanted} is more than the {limit} of {architecture}")
    return int(wanted or limit)


def _freeze_rope(model: PreTrainedModel) -> None:
    """Keep rotary frequencies as they are up to the context length, which stays where they don't change.

    transformers would look for the largest position of each batch, on the host.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {key: _frozen(kind) for key, kind in kinds.items()}  # type: ignore[assignment]
        elif isinstance(kinds, str):
            module.rope_type = _frozen(kinds)  # type: ignore[assignment]


def _frozen(rope_type: str) -> str:
    return "default" if rope_type in ("dynamic", "longrope") else rope_type


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (model.generation_config, model.config, model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def _arguments(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    arguments: dict[str, Any] = {"attn_implementation": IMPLEMENTATION, "dtype": dtype}
    if device.type == "cuda" and dtype != torch.bfloat16:
        # The default, grouped matmul, asks the device for the groups' sizes in other dtypes.
        arguments["experts_implementation"] = "batched_mm"
    return arguments


def _draw(
    model_config: PreTrainedConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model: PreTrainedModel = _AUTO.from_config(
            model_config, trust_remote_code=config.trust_remote_code, **_arguments(device, dtype)
        )
    return model


def _read(
    model_config: PreTrainedConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    try:
        model, report = _AUTO.from_pretrained(
            config.model,
            config=model_config,
            trust_remote_code=config.trust_remote_code,
            device_map=None if device.type == "cpu" else device,
            output_loading_info=True,
            **_arguments(device, dtype),
        )
    except (
        Exception
    ) as error:  # unreadable files, wrong shapes: transformers and safetensors each have their own
        raise ModelError(f"model: the weights of {config.model!r} can't be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"model: {config.model!r} lacks {len(missing)} weights, such as {missing[0]}")
    loaded: PreTrainedModel = model
    return loaded
