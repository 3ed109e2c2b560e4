"""The tokens of a model as grammars need them: their bytes, in a tree."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from engine.config import EngineConfig

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)


def load_vocabulary(
    config: EngineConfig, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> LLTokenizer | None:
    """None, and why in the log, where the model's checkpoint has no tokenizer that could be used.

    Takes a second or two for 150,000 tokens.
    """
    try:
        from llguidance.hf import from_tokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(
            config.model, trust_remote_code=config.trust_remote_code
        )
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except BaseException as error:  # a panic of Rust, too: it is in the way of grammars only
        logger.warning("no grammars with this model: %s", error)
        return None
