"""Requests to token ids and sampling parameters, as transformers and the checkpoint have it."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import demo_model
from deployments.api_error import ApiError
from deployments.protocol import ChatRequest, CompletionRequest, parse
from deployments.text import Tokenizer
from engine.request import SamplingParams
from tests.small_tokenizers import KINDS, save, wrapped

CONTEXT = 128


@pytest.fixture(scope="session", params=[*KINDS])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(save(request.param, tmp_path_factory.mktemp(request.param), CONTEXT)))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("byte_level", tmp_path_factory.mktemp("checkpoint"), CONTEXT)


@pytest.fixture(scope="session")
def one(checkpoint: Path) -> Tokenizer:
    return Tokenizer(str(checkpoint))


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return Tokenizer(demo_model.resolve("demo"))


def chat(messages: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    return parse(json.dumps({"model": "m", "messages": messages, **fields}).encode(), ChatRequest)


def completion(prompt: Any, **fields: Any) -> CompletionRequest:
    return parse(json.dumps({"model": "m", "prompt": prompt, **fields}).encode(), CompletionRequest)


def understand(tokenizer: Tokenizer, request: ChatRequest | CompletionRequest) -> None:
    for prompt in tokenizer.prompts(request):
        tokenizer.sampling(request, len(prompt))


def refusal(tokenizer: Tokenizer, request: ChatRequest | CompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        understand(tokenizer, request)
    assert caught.value.status == 400
    return caught.value


# Prompts


@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
def test_a_text_becomes_what_transformers_makes_of_it(tokenizer: Tokenizer, text: str) -> None:
    """Its beginning token included."""
    expected = tokenizer._tokenizer(text).input_ids
    assert tokenizer.prompts(completion(text)) == [expected]
    assert tokenizer.prompts(completion([text, text + "a"]))[0] == expected


@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("ab <s>/é", max_size=9)),
        min_size=1,
        max_size=4,
    )
)
def test_a_chat_becomes_what_transformers_makes_of_it(
    tokenizer: Tokenizer, turns: list[tuple[str, str]]
) -> None:
    """Which is told to add the answer's beginning, and no beginning token but the template's."""
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = tokenizer._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    if len(expected) < CONTEXT:
        assert tokenizer.prompts(chat(messages)) == [expected]


def test_parts_are_lines(one: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [expected] = one.prompts(chat([{"role": "user", "content": "a\nb"}]))
    assert one.prompts(chat([{"role": "user", "content": parts}])) == [expected]


def test_a_developer_is_the_system(one: Tokenizer) -> None:
    [expected] = one.prompts(chat([{"role": "system", "content": "a"}]))
    assert one.prompts(chat([{"role": "developer", "content": "a"}])) == [expected]


def test_token_ids_are_taken_as_they_are(one: Tokenizer) -> None:
    assert one.prompts(completion([3, 1, 2])) == [[3, 1, 2]]
    assert one.prompts(completion([[3], [1, 2]])) == [[3], [1, 2]]
    last = one.vocab_size - 1  # one of those that the model has and the tokenizer has not
    assert last >= len(one._tokenizer)
    assert one.prompts(completion([last])) == [[last]]


@pytest.mark.parametrize(
    ("prompt", "param"), [([1, 600], "prompt"), ([[1], [600]], "prompt[1]"), ([10**30], "prompt")]
)
def test_token_ids_outside_the_vocabulary(one: Tokenizer, prompt: Any, param: str) -> None:
    assert refusal(one, completion(prompt)).param == param


def test_the_first_token_id_outside_the_vocabulary(one: Tokenizer) -> None:
    assert refusal(one, completion([one.vocab_size])).param == "prompt"


def test_what_the_template_refuses(one: Tokenizer) -> None:
    error = refusal(one, chat([{"role": "tool", "content": "a"}]))
    assert error.param == "messages"
    assert "unknown role tool" in error.message


def test_a_model_without_a_template(tmp_path: Path) -> None:
    save("byte_level", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = Tokenizer(str(tmp_path))
    assert refusal(tokenizer, chat([{"role": "user", "content": "a"}])).param == "model"
    assert tokenizer.prompts(completion("a"))


def test_a_prompt_of_no_tokens(tmp_path: Path) -> None:
    """Where nothing is put before a text, one that normalises to nothing is empty."""
    save("byte_level", tmp_path)
    path = tmp_path / "tokenizer.json"
    settings = json.loads(path.read_text())
    settings["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    settings["post_processor"] = None
    path.write_text(json.dumps(settings))
    assert refusal(Tokenizer(str(tmp_path)), completion(["a", "  "])).param == "prompt[1]"


# Lengths


def test_the_context_is_the_engines_or_the_checkpoints(checkpoint: Path) -> None:
    assert Tokenizer(str(checkpoint)).context_length == CONTEXT
    assert Tokenizer(str(checkpoint), context_length=50).context_length == 50


def test_a_prompt_leaves_room_for_a_token(one: Tokenizer) -> None:
    assert one.prompts(completion([5] * (CONTEXT - 1)))
    error = refusal(one, completion([5] * CONTEXT))
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    error = refusal(one, chat([{"role": "user", "content": "a " * CONTEXT}]))
    assert (error.param, error.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_prompt_and_answer_fill_the_context_exactly(one: Tokenizer, name: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    num_prompt = len(one.prompts(chat(messages))[0])
    [sampling] = one.sampling(chat(messages, **{name: CONTEXT - num_prompt}), num_prompt)
    assert sampling.max_tokens == CONTEXT - num_prompt
    error = refusal(one, chat(messages, **{name: CONTEXT - num_prompt + 1}))
    assert (error.param, error.code) == (name, "context_length_exceeded")
    assert refusal(one, chat(messages, **{name: 10**30})).param == name


def test_default_lengths(one: Tokenizer) -> None:
    [sampling] = one.sampling(chat([{"role": "user", "content": "a"}]), 5)
    assert sampling.max_tokens is None
    [sampling] = one.sampling(completion("a"), 5)
    assert sampling.max_tokens == 16
    [sampling] = one.sampling(completion("a"), CONTEXT - 3)
    assert sampling.max_tokens == 3


class Limited(Tokenizer):
    """Another one's twin with a context of its own, which tells how much it encodes."""

    def __init__(self, twin: Tokenizer, context_length: int) -> None:
        self.__dict__.update(twin.__dict__)
        self.context_length = context_length
        self.num_encoded = 0

    def _encode(self, text: str, special: bool) -> list[int]:
        self.num_encoded += len(text)
        return super()._encode(text, special)


@given(
    unit=st.sampled_from(["=" * 32, "=", " ", "天", "🎊", "a b ", "</s>", "\n"]),
    times=st.integers(1, 3000),
    context=st.integers(8, 256),
)
def test_long_texts_are_refused_if_and_only_if_they_do_not_fit(
    one: Tokenizer, unit: str, times: int, context: int
) -> None:
    """Also those whose beginning alone is looked at, and those with many characters to a token."""
    tokenizer, request = Limited(one, context), completion(unit * times)
    expected: list[int] = one._tokenizer(unit * times).input_ids
    if len(expected) < context:
        assert tokenizer.prompts(request) == [expected]
    else:
        error = refusal(tokenizer, request)
        assert (error.param, error.code) == ("prompt", "context_length_exceeded")


def test_a_long_text_of_few_tokens_fits(one: Tokenizer) -> None:
    text = "=" * 32 * 100  # one token for each 32
    assert len(text) > 16 * CONTEXT
    assert len(one.prompts(completion(text))[0]) == 101


def test_a_huge_text_is_not_encoded_whole(one: Tokenizer) -> None:
    tokenizer = Limited(one, CONTEXT)
    assert refusal(tokenizer, completion("word " * 1_000_000)).code == "context_length_exceeded"
    assert tokenizer.num_encoded <= 16 * CONTEXT


def test_other_threads_run_while_a_text_is_encoded(demo: Tokenizer) -> None:
    """The event loop would stand still for seconds otherwise."""
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0)  # lets the other thread run

    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    ticker = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # the ticker runs only while this thread lets it
    try:
        ticker.start()
        before = ticks
        demo._encode(text, special=False)
        after = ticks
    finally:
        done.set()
        sys.setswitchinterval(interval)
        ticker.join()
    assert after > before


# Sampling


def test_what_is_given_is_asked_of_the_engine(one: Tokenizer) -> None:
    request = completion(
        "a",
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=-5,
        stop_token_ids=[3, 4],
        ignore_eos=True,
        max_tokens=9,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"3": -100, "0": 2.5},
    )
    [sampling] = one.sampling(request, 1)
    assert sampling == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=2**64 - 5,
        stop_token_ids=(3, 4),
        ignore_eos=True,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias=((3, -100), (0, 2.5)),
    )


def test_log_probabilities_are_asked_of_the_engine(one: Tokenizer) -> None:
    turns = [{"role": "user", "content": "a"}]
    cases: list[tuple[ChatRequest | CompletionRequest, int | None]] = [
        (completion("a"), None),
        (completion("a", logprobs=3, n=2), 3),
        (chat(turns, logprobs=True), 0),
        (chat(turns, logprobs=True, top_logprobs=4), 4),
    ]
    for request, expected in cases:
        assert {sampling.logprobs for sampling in one.sampling(request, 1)} == {expected}


def test_a_grammar_is_asked_of_the_engine(one: Tokenizer) -> None:
    """Of every answer."""
    request = completion("a", n=2)
    assert [sampling.grammar for sampling in one.sampling(request, 1)] == [None, None]
    assert [sampling.grammar for sampling in one.sampling(request, 1, 'start: "a"')] == ['start: "a"'] * 2


def test_null_and_minus_one_are_defaults(one: Tokenizer) -> None:
    [sampling] = one.sampling(completion("a", seed=0, temperature=None, top_k=-1, top_p=None), 1)
    assert sampling == SamplingParams(max_tokens=16)


def test_stop_tokens_outside_the_vocabulary(one: Tokenizer) -> None:
    assert refusal(one, completion("a", stop_token_ids=[1, 10**6])).param == "stop_token_ids"


def test_biases_outside_the_vocabulary(one: Tokenizer) -> None:
    assert refusal(one, completion("a", logit_bias={"1": 1, "1000000": 1})).param == "logit_bias"


def test_answers_have_seeds_of_their_own(one: Tokenizer) -> None:
    seeds = [sampling.seed for sampling in one.sampling(completion("a", n=3, seed=2**64 - 2), 1)]
    assert seeds == [2**64 - 2, 2**64 - 1, 0]
    drawn = [sampling.seed for _ in range(20) for sampling in one.sampling(completion("a"), 1)]
    assert len(set(drawn)) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, (1.0, 0, 1.0, 1.0)),
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}, (0.7, 20, 0.8, 1.0)),
        ({"temperature": 0.7, "repetition_penalty": 1.05}, (0.7, 0, 1.0, 1.05)),
        ({"do_sample": False, "top_k": 20, "repetition_penalty": 1.1}, (0.0, 0, 1.0, 1.1)),
    ],
)
def test_defaults_are_the_checkpoints(
    tmp_path: Path, generation: dict[str, Any], expected: tuple[float, int, float, float]
) -> None:
    save("byte_level", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = Tokenizer(str(tmp_path))
    [sampling] = tokenizer.sampling(completion("a"), 1)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == expected
    [sampling] = tokenizer.sampling(completion("a", temperature=0.1, top_k=5, top_p=0.2), 1)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.1, 5, 0.2)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError), match=str(tmp_path)):
        Tokenizer(str(tmp_path))


# The demo model


def test_the_demo_is_addressed_in_its_own_template(demo: Tokenizer) -> None:
    [prompt] = demo.prompts(chat([{"role": "user", "content": "What is the capital of France?"}]))
    assert demo._tokenizer.decode(prompt) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt[0] == 1  # one token, not its letters
    assert prompt.count(2) == 2


def test_a_template_that_takes_messages_as_text(demo: Tokenizer) -> None:
    """A name is nothing to it, and a second system message is as good as the first."""
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Ann"},
    ]
    [prompt] = demo.prompts(chat(messages))
    assert demo._tokenizer.decode(prompt).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_wrapped_tokenizers_do_begin_texts() -> None:
    assert all(wrapped(kind)("a").input_ids[0] == wrapped(kind).bos_token_id for kind in KINDS)
