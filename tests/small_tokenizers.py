"""Tokenizers of each kind that causal language models have, made on the spot."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Ein Vogel fliegt über den Fluß; ça va déjà, où êtes-vous?",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
    "🎉🎊 emoji 👩‍👩‍👧 and ================================ long tokens",
    "def f(x):\n    return x + 1\n\n\nclass A:\n        pass",
] * 4
SPECIAL = [AddedToken(name, normalized=False, special=True) for name in ("<s>", "</s>", "<pad>")]
SHOWN = [AddedToken(text, normalized=False, special=False) for text in ("<think>", "=" * 32)]


def byte_level() -> Tokenizer:
    """As of GPT-2, Llama 3, Qwen: tokens are bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[str(token) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback() -> Tokenizer:
    """As of Llama 2 and Mistral: tokens are characters, and bytes where there is none; ▁ is a space."""
    trained = Tokenizer(models.BPE())
    marks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.normalizer = marks
    latin = [sentence for sentence in CORPUS if sentence.isascii()]
    trained.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned: dict[str, Any] = json.loads(trained.to_str())["model"]
    pieces = [str(token) for token in SPECIAL] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += learned["vocab"]
    backend = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [tuple(merge) for merge in learned["merges"]],
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<pad>",
        )
    )
    backend.normalizer = marks
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return backend


def metaspace() -> Tokenizer:
    """As of T5 and XGLM: a unigram model of words that carry their space."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=[*(str(token) for token in SPECIAL), "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_piece() -> Tokenizer:
    """As of BERT: words, and ## where one goes on."""
    backend = Tokenizer(models.WordPiece(unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=[str(token) for token in SPECIAL], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


KINDS = {kind.__name__: kind for kind in (byte_level, byte_fallback, metaspace, word_piece)}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<s>{{ message['role'] }}: {{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@cache
def wrapped(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it, with special tokens; it begins each text with <s>."""
    backend = KINDS[kind]()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(SHOWN)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save(kind: str, directory: Path, context_length: int = 128, padding: int = 8) -> Path:
    """A checkpoint without weights, whose model has `padding` ids more than its tokenizer."""
    tokenizer = wrapped(kind)
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(vocab_size=len(tokenizer) + padding, max_position_embeddings=context_length)
    config.save_pretrained(directory)
    return directory
