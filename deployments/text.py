"""Between text and token ids: tokenizer, chat template and defaults of one model, all from its checkpoint."""

from __future__ import annotations

import re
import secrets
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deployments.api_error import ApiError
from deployments.protocol import ChatRequest, CompletionRequest, Message
from engine.request import SamplingParams

COMPLETION_TOKENS = 16
"""What `max_tokens` of a completion is by default, in OpenAI's API."""

_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES)
_BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Tokenizer:
    """Turns requests into token ids and sampling parameters, and token ids into bytes.

    Attributes:
        context_length: tokens of prompt and answer together, at most.
        vocab_size: token ids that the model knows, from 0.
        threads: that may call `prompts` at once, so that a short text need not wait for long ones.
    """

    def __init__(
        self, model: str, context_length: int | None = None, trust_remote_code: bool = False
    ) -> None:
        """`model`: a local directory or a Hugging Face id. `context_length`: the engine's; without it an
        upper bound from the checkpoint, and the engine refuses what is between.

        Raises `OSError` or `ValueError` if there is no tokenizer to be had.
        """
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
        # transformers' own call computes offsets too, which takes eight times as long.
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # a checkpoint may ask for either
            self._backend.no_truncation()
            self._backend.no_padding()
        self.threads = 1 if self._backend is None else 4
        self.context_length = context_length or _longest_context(config)
        self.vocab_size: int = config.get_text_config().vocab_size
        self._defaults = _sampling_defaults(model)
        # Decoded after a letter, a token has the space before it that it has amid a text.
        self._letter = self._encode("a", special=False)
        self._letter_text = self._decode(self._letter)
        self._bytes: dict[int, bytes] = {}

    def prompts(self, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        """The token ids of each prompt; a chat has one.

        Takes about 0.3 s for a MiB of text, nearly all of it without the GIL.
        Raises `ApiError` (400) naming the field: too long, empty, outside the vocabulary, not what
        the chat template takes.
        """
        if isinstance(request, ChatRequest):
            return [self._ids(self._render(request.messages), "messages", special=False)]
        prompts = request.prompts
        if len(prompts) == 1:
            return [self._ids(prompts[0], "prompt")]
        return [self._ids(prompt, f"prompt[{index}]") for index, prompt in enumerate(prompts)]

    def sampling(
        self, request: ChatRequest | CompletionRequest, num_prompt: int, grammar: str | None = None
    ) -> list[SamplingParams]:
        """What to ask of the engine for each of the `n` answers to a prompt of `num_prompt` tokens.

        `grammar`: of the request's `constraint`, which takes long enough to be found once, and elsewhere.

        What a request leaves open is as the checkpoint's generation config has it, then as OpenAI's API.
        A seed is drawn where none is given; the answers of one request have consecutive seeds.
        Raises `ApiError` (400) naming the field: beyond the context length, not in the vocabulary.
        """
        field, max_tokens = "max_tokens", request.max_tokens
        if isinstance(request, CompletionRequest):
            max_tokens = max_tokens or min(COMPLETION_TOKENS, self.context_length - num_prompt)
        elif request.max_completion_tokens:
            field, max_tokens = "max_completion_tokens", request.max_completion_tokens
        if max_tokens is not None and num_prompt + max_tokens > self.context_length:
            raise self._too_long(f"{num_prompt} in the prompt and {max_tokens} to generate", field)
        stop_token_ids = tuple(request.stop_token_ids or ())
        self._check_vocabulary(stop_token_ids, "stop_token_ids")
        logit_bias = request.logit_bias or ()
        self._check_vocabulary([token for token, _ in logit_bias], "logit_bias")
        seed = secrets.randbits(63) if request.seed is None else request.seed
        given = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
        values: dict[str, Any] = self._defaults | given
        values["top_k"] = max(0, values.get("top_k", 0))  # vLLM's -1 keeps all, too
        return [
            SamplingParams(
                max_tokens=max_tokens,
                seed=(seed + index) % 2**64,
                stop_token_ids=stop_token_ids,
                ignore_eos=bool(request.ignore_eos),
                logit_bias=logit_bias,
                logprobs=request.num_logprobs,
                grammar=grammar,
                **values,
            )
            for index in range(request.choices)
        ]

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 of a token amid a text: part of a character, maybe, and nothing for special tokens."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def _find_bytes(self, token: int) -> bytes:
        text = self._decode([*self._letter, token]).removeprefix(self._letter_text)
        if "\ufffd" not in text:
            return text.encode()
        # Part of a character, which tokenizers write as the byte's number or in GPT-2's alphabet.
        piece: str = self._tokenizer.convert_ids_to_tokens(token)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte[1])
        if all(char in _BYTE_OF for char in piece):
            return bytes(_BYTE_OF[char] for char in piece)
        return text.encode()

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _render(self, messages: list[Message]) -> str:
        template = self._tokenizer.chat_template
        if template is None:
            raise ApiError(400, "The model has no chat template; use /v1/completions.", param="model")
        # OpenAI's newer word for the system's role, which few templates know.
        system = "developer" if "developer" in str(template) else "system"
        turns = [
            message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
            | {"role": system if message.role == "developer" else message.role, "content": message.text}
            for message in messages
        ]
        try:
            text: str = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            message = f"The model's chat template refuses these messages: {error}"
            raise ApiError(400, message[:1000], param="messages", code="invalid_value") from error
        return text

    def _ids(self, prompt: str | list[int], field: str, special: bool = True) -> list[int]:
        if isinstance(prompt, str):
            # Cutting a text changes no tokens but those near the cut, so its beginning tells whether it is
            # far too long, and a huge one costs no more than that.
            end = 16 * self.context_length
            while end < len(prompt):
                if len(self._encode(prompt[:end], special)) > self.context_length + 256:
                    raise self._too_long(f"more than {self.context_length} in the prompt", field)
                end *= 4
            prompt = self._encode(prompt, special)
        else:
            self._check_vocabulary(prompt, field)
        if not prompt:
            raise ApiError(400, "The prompt is empty.", param=field, code="invalid_value")
        if len(prompt) >= self.context_length:
            raise self._too_long(f"{len(prompt)} in the prompt and at least 1 to generate", field)
        return prompt

    def _encode(self, text: str, special: bool) -> list[int]:
        if self._backend is None:  # a tokenizer in Python
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        else:
            ids = self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def _check_vocabulary(self, ids: list[int] | tuple[int, ...], field: str) -> None:
        if ids and max(ids) >= self.vocab_size:
            message = f"{field}: {max(ids)} is not in the vocabulary of {self.vocab_size} tokens."
            raise ApiError(400, message, param=field, code="invalid_value")

    def _too_long(self, tokens: str, field: str) -> ApiError:
        return ApiError(
            400,
            f"The model's context holds {self.context_length} tokens, and this asks for more: {tokens}.",
            param=field,
            code="context_length_exceeded",
        )


def _longest_context(config: PreTrainedConfig) -> int:
    """Tokens; no context is longer, and the engine may know of a shorter limit."""
    text_config = config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", None) or 1 << 20
    rope = getattr(text_config, "rope_parameters", None) or {}
    stretched = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1)
    return max(longest, int(stretched))


def _sampling_defaults(model: str) -> dict[str, Any]:
    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:  # a checkpoint need not have one
        return {}
    greedy = generation.do_sample is False  # in so many words: the default is None
    values = {name: getattr(generation, name, None) for name in (_PENALTIES if greedy else _SAMPLING)}
    if greedy:
        values["temperature"] = 0.0
    return {name: value for name, value in values.items() if value is not None}
