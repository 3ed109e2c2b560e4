"""The sizes of a model that its memory follows from, read from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class ShapeError(ValueError):
    """The configuration of a model cannot be read."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of a causal language model."""

    parameters: int
    """Weights, tied ones once."""
    stored_bytes: int
    """Bytes per weight in the checkpoint."""
    layers: int
    hidden: int
    feed_forward: int
    """Width of all that one token's feed-forward layer computes at once: in a mixture, of its experts."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int | None
    """Tokens that the model was made for; None where the configuration does not say."""

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of the keys and values of `tokens` tokens in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * itemsize


DEMO = ModelShape(
    parameters=134_515_008,
    stored_bytes=2,
    layers=30,
    hidden=576,
    feed_forward=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49152,
    context=8192,
)
"""The shape of `demo`, whose configuration is fetched with its weights only."""


def read_shape(model: str, trust_remote_code: bool = False) -> ModelShape:
    """The shape of `demo`, a Hugging Face id or a local directory: config.json is read, and no weights.

    Raises `ShapeError`.
    """
    if model == "demo":
        return DEMO
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its own for these
        raise ShapeError(f"model: no usable configuration for {model!r}: {error}") from error
    return shape_of(config, trust_remote_code)


def shape_of(config: Any, trust_remote_code: bool = False) -> ModelShape:
    """The shape that a transformers configuration describes."""
    text = config.get_text_config()
    experts: int = getattr(text, "num_experts_per_tok", None) or 1
    wide: int = text.intermediate_size
    if experts > 1:
        wide = max(wide, experts * (getattr(text, "moe_intermediate_size", None) or wide))
    dtype = getattr(config, "dtype", None)
    return ModelShape(
        parameters=_count(config, trust_remote_code),
        stored_bytes=getattr(dtype, "itemsize", 2),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        feed_forward=wide,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
    )


def _count(config: Any, trust_remote_code: bool) -> int:
    """Parameters of the model, built without memory for them; right for any architecture."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with init_empty_weights():
        model = auto.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())
