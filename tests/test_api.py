"""The HTTP API over real tapes to an engine without a model; Ray is left out."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deployments.api import Api
from deployments.api_error import ApiError
from deployments.constraint import StructuredOutputs
from deployments.execution import Executor
from deployments.generation import Dispatcher
from deployments.protocol import MAX_BODY_BYTES, ChatRequest, CompletionRequest
from deployments.submission import Refusal, Submission
from deployments.text import Tokenizer
from engine.request import FinishReason, Output, QueueFull, Request, RequestError
from tests.memory_engine import VOCABULARY, MemoryEngine, logprobs_at, text_of

CONTEXT = 200


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token for each byte: the first 94 are the printable ASCII characters."""
    path = str(tmp_path_factory.mktemp("model"))
    alphabet = {char: token for token, char in enumerate(bytes_to_unicode().values())}  # type: ignore[no-untyped-call]
    backend = FastTokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    fast.chat_template = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"
    fast.save_pretrained(path)
    LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT).save_pretrained(path)
    return Tokenizer(path)


class Server:
    """The application, its clients, and the engine behind it."""

    def __init__(self, tokenizer: Tokenizer, engine: MemoryEngine, **limits: Any) -> None:
        self.engine = engine
        self.dispatcher = Dispatcher(Executor(engine, "r1", "demo").run, "demo")
        self.healthy = True
        app = Api("demo", tokenizer, self.dispatcher, self.check_health, **limits).app()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")
        any_httpx: Any = self.http  # openai is typed for one of its forks
        self.client = openai.AsyncOpenAI(
            api_key="any", base_url="http://test/v1", http_client=any_httpx, max_retries=0
        )

    async def check_health(self) -> None:
        if not self.healthy:
            raise ApiError.server_error("no engine answers", 503)


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer, engine: MemoryEngine | None = None, **limits: Any
) -> AsyncIterator[Server]:
    server = Server(tokenizer, engine or MemoryEngine(), **limits)
    await server.dispatcher.open("127.0.0.1")
    stepping = asyncio.create_task(server.engine.run())
    async with server.http:
        yield server
    stepping.cancel()
    await server.dispatcher.close()
    assert not server.dispatcher._running  # every request was ended by its handler


def ids(text: str) -> list[int]:
    return [ord(char) - ord("!") for char in text]


def answer(prompt: str, seed: int, length: int) -> str:
    return "".join(chr(ord("!") + token) for token in text_of(ids(prompt), seed, length))


CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
CHAT_PROMPT = "<user>hi"
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "hi"}


async def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    return [
        block if (data := block.removeprefix("data: ")) == "[DONE]" else json.loads(data) for block in blocks
    ]


async def test_a_chat_streamed_or_not_is_the_same(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        whole = await server.client.chat.completions.create(**CHAT, max_tokens=20, seed=3)
        assert whole.choices[0].message.content == answer(CHAT_PROMPT, 3, 20)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(CHAT_PROMPT), 20)

        stream = await server.client.chat.completions.create(
            **CHAT, max_tokens=20, seed=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == answer(CHAT_PROMPT, 3, 20)
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == len(CHAT_PROMPT) + 20


async def test_a_completion_takes_text_or_tokens(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        for prompt in ("hi", ids("hi")):
            done = await server.client.completions.create(model="demo", prompt=prompt, max_tokens=4, seed=3)
            assert done.choices[0].text == answer("hi", 3, 4)


async def test_choices_count_up_the_seed_for_each_prompt(tokenizer: Tokenizer) -> None:
    body = COMPLETION | {"prompt": ["one", "two"], "n": 3, "seed": 2**64 - 2, "max_tokens": 6}
    expected = [answer(prompt, seed, 6) for prompt in ("one", "two") for seed in (2**64 - 2, 2**64 - 1, 0)]
    async with serving(tokenizer) as server:
        whole = (await server.http.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in whole["choices"]] == expected
        assert [choice["index"] for choice in whole["choices"]] == list(range(6))
        assert whole["usage"]["prompt_tokens"] == 6
        assert whole["usage"]["completion_tokens"] == 36

        texts = [""] * 6
        ended = []
        *chunks, done = await events(server, "/v1/completions", body | {"stream": True})
        assert done == "data: [DONE]"
        for chunk in chunks:
            for choice in chunk["choices"]:
                assert choice["index"] not in ended
                texts[choice["index"]] += choice["text"]
                if choice["finish_reason"]:
                    ended.append(choice["index"])
        assert texts == expected
        assert sorted(ended) == list(range(6))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_sequence_on_the_engine(tokenizer: Tokenizer, stream: bool) -> None:
    text = answer(CHAT_PROMPT, 3, 100)
    body = CHAT | {"seed": 3, "max_tokens": 100, "stop": [text[10:13]], "stream": stream}
    async with serving(tokenizer) as server:
        if stream:
            *chunks, _ = await events(server, "/v1/chat/completions", body)
            got = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            choice = (await server.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
            got, reason = choice["message"]["content"], choice["finish_reason"]
        assert got == text[: text.index(text[10:13])]
        assert reason == "stop"
        while server.engine.running:
            await asyncio.sleep(0)
        assert len(server.engine.aborts) >= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_stop_token_ends_and_is_not_shown(
    tokenizer: Tokenizer, stream: bool, ignore_eos: bool
) -> None:
    """A token that the client names, which is not special and has a text; `ignore_eos` is about others."""
    tokens = text_of(ids("hi"), 3, 30)
    stop = next(token for i, token in enumerate(tokens) if i >= 5 and token not in tokens[:i])
    length = tokens.index(stop)
    body = COMPLETION | {"seed": 3, "max_tokens": 30, "stop_token_ids": [stop], "ignore_eos": ignore_eos}
    async with serving(tokenizer) as server:
        if stream:
            chunks = await events(
                server, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
            )
            choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
            text, reason = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
            usage = chunks[-2]["usage"]
        else:
            whole = (await server.http.post("/v1/completions", json=body)).json()
            text, reason = whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]
            usage = whole["usage"]
        assert text == answer("hi", 3, length)
        assert reason == "stop"
        assert usage["completion_tokens"] == length + 1


BYTES = list(bytes_to_unicode())  # type: ignore[no-untyped-call]
"""Of each token."""


class Fast(MemoryEngine):
    """Three steps while the Router takes one."""

    def step(self) -> None:
        for _ in range(3):
            super().step()


def candidate(token: int, logprob: float) -> dict[str, Any]:
    data = bytes([BYTES[token]])
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def chat_entries(tokens: list[int], likeliest: int) -> list[dict[str, Any]]:
    """As they must be for an engine without a model."""
    return [
        candidate(token, each.token) | {"top_logprobs": list(map(candidate, each.likeliest, each.values))}
        for place, token in enumerate(tokens)
        for each in [logprobs_at(token, place, likeliest)]
    ]


async def chat_logprobs(server: Server, body: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]], Any]]:
    """For each choice its text, its entries, and the tokens of all, as OpenAI's client reads them.

    A stream's and a whole answer's are equal.
    """
    whole = await server.client.chat.completions.create(**body)
    stream = await server.client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    assert whole.usage is not None
    texts, entries = [""] * len(whole.choices), [list[Any]() for _ in whole.choices]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                assert choice.logprobs.content and choice.logprobs.refusal is None
                entries[choice.index] += choice.logprobs.content
        if chunk.usage is not None:
            assert chunk.usage == whole.usage
    for each, text, streamed in zip(whole.choices, texts, entries, strict=True):
        assert each.message.content == text
        assert each.logprobs is not None and each.logprobs.content == streamed
    dumped = [[entry.model_dump() for entry in each] for each in entries]
    return [(text, each, whole.usage.completion_tokens) for text, each in zip(texts, dumped, strict=True)]


@pytest.mark.parametrize("likeliest", [None, 0, 5])
@pytest.mark.parametrize("engine", [MemoryEngine, Fast])
async def test_log_probabilities_of_a_chat(
    tokenizer: Tokenizer, engine: type[MemoryEngine], likeliest: int | None
) -> None:
    async with serving(tokenizer, engine()) as server:
        asked: dict[str, Any] = {"n": 3, "seed": 3, "max_tokens": 20, "logprobs": True}
        if likeliest is not None:
            asked["top_logprobs"] = likeliest
        for index, (text, entries, count) in enumerate(await chat_logprobs(server, CHAT | asked)):
            tokens = text_of(ids(CHAT_PROMPT), 3 + index, 20)
            assert entries == chat_entries(tokens, likeliest or 0)
            assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
            assert count == 60


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_no_log_probabilities_unless_asked_for(tokenizer: Tokenizer, path: str, stream: bool) -> None:
    body = (CHAT | {"logprobs": False} if "chat" in path else COMPLETION) | {"max_tokens": 4}
    async with serving(tokenizer) as server:
        answers = [(await server.http.post(path, json=body)).json()]
        if stream:
            *answers, _ = await events(server, path, body | {"stream": True})
    assert [choice["logprobs"] for each in answers for choice in each["choices"]] == [None] * len(answers)
    assert server.engine.requests[0].sampling.logprobs is None


@pytest.mark.parametrize("likeliest", [0, 2, 4])
async def test_log_probabilities_of_completions(tokenizer: Tokenizer, likeliest: int) -> None:
    """The chosen token is the third likeliest, so it is one more where two are asked for."""
    asked: dict[str, Any] = COMPLETION | {
        "prompt": ["one", "two"],
        "n": 2,
        "seed": 7,
        "max_tokens": 8,
        "logprobs": likeliest,
    }
    async with serving(tokenizer, Fast()) as server:
        whole = await server.client.completions.create(**asked, best_of=2)
        joined: list[dict[str, list[Any]]] = [{} for _ in range(4)]
        *chunks, _ = await events(server, "/v1/completions", asked | {"stream": True})
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                joined[choice["index"]].setdefault(name, []).extend(values)
    for index, choice in enumerate(whole.choices):
        tokens = text_of(ids(["one", "two"][index // 2]), 7 + index % 2, 8)
        expected = [logprobs_at(token, place, likeliest) for place, token in enumerate(tokens)]
        assert choice.logprobs is not None
        assert joined[index] == choice.logprobs.model_dump()
        assert choice.logprobs.tokens == list(choice.text)
        assert choice.logprobs.text_offset == list(range(8))
        assert choice.logprobs.token_logprobs == [each.token for each in expected]
        for place, names in enumerate(choice.logprobs.top_logprobs or []):
            of = candidate(tokens[place], expected[place].token)
            assert names[of["token"]] == of["logprob"]
            others = map(candidate, expected[place].likeliest, expected[place].values)
            assert names.keys() == {of["token"], *(each["token"] for each in others)}
            assert len(names) == (likeliest if likeliest > 2 else likeliest + 1)


@pytest.mark.parametrize("engine", [MemoryEngine, Fast])
async def test_log_probabilities_end_with_the_stop_string(
    tokenizer: Tokenizer, engine: type[MemoryEngine]
) -> None:
    """Those of its tokens are told while the text is held back, and none of what came with it."""
    tokens = text_of(ids(CHAT_PROMPT), 3, 100)
    text = answer(CHAT_PROMPT, 3, 100)
    async with serving(tokenizer, engine()) as server:
        body = CHAT | {"seed": 3, "max_tokens": 100, "stop": [text[8:11]], "logprobs": True}
        [(got, entries, count)] = await chat_logprobs(server, body | {"top_logprobs": 1})
    length = text.index(text[8:11]) + 3
    assert got == text[: length - 3]
    assert entries == chat_entries(tokens[:length], 1)
    assert count == length


async def test_log_probabilities_count_the_stop_token(tokenizer: Tokenizer) -> None:
    """It has an entry, though the text is without it."""
    tokens = text_of(ids(CHAT_PROMPT), 3, 30)
    stop = next(token for i, token in enumerate(tokens) if i >= 5 and token not in tokens[:i])
    length = tokens.index(stop) + 1
    async with serving(tokenizer, Fast()) as server:
        [(text, entries, count)] = await chat_logprobs(
            server,
            CHAT | {"seed": 3, "max_tokens": 30, "logprobs": True, "extra_body": {"stop_token_ids": [stop]}},
        )
    assert text == answer(CHAT_PROMPT, 3, length - 1)
    assert entries == chat_entries(tokens[:length], 0)
    assert count == length


async def test_log_probabilities_of_parts_of_characters(tokenizer: Tokenizer) -> None:
    """Each is told with its own byte as it comes, and where its character begins."""
    text = "aé🎉b"
    script = [BYTES.index(byte) for byte in text.encode()]

    class Scripted(MemoryEngine):
        def token(self, request: Request, position: int) -> int:
            return script[position]

    async with serving(tokenizer, Scripted()) as server:
        asked: dict[str, Any] = {"max_tokens": len(script), "logprobs": True, "top_logprobs": 1}
        [(got, entries, _)] = await chat_logprobs(server, CHAT | asked)
        asked = COMPLETION | {"max_tokens": len(script), "logprobs": 0}
        legacy = (await server.client.completions.create(**asked)).choices[0].logprobs
    assert got == text
    assert entries == chat_entries(script, 1)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    assert legacy is not None and legacy.text_offset == [0, 1, 1, 2, 2, 2, 2, 3]


class Breaking(MemoryEngine):
    """Fails after its fifth step."""

    steps = 0

    def step(self) -> None:
        super().step()
        self.steps += 1
        if self.steps == 5:
            self.fail("broken")


async def test_log_probabilities_of_a_stream_go_on_elsewhere(tokenizer: Tokenizer) -> None:
    """Also when its first replica breaks."""
    engine = Breaking()
    async with serving(tokenizer) as server:
        breaking, other = Executor(engine, "r0", "demo").run, server.dispatcher._submit

        async def submit(submission: Submission) -> Refusal | None:
            return await (other if submission.attempt else breaking)(submission)

        server.dispatcher._submit = submit
        stepping = asyncio.create_task(engine.run())
        body = CHAT | {"n": 2, "seed": 3, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
        *chunks, _ = await events(server, "/v1/chat/completions", body | {"stream": True})
        stepping.cancel()
    assert server.engine.requests
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        entries = [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
        assert entries == chat_entries(text_of(ids(CHAT_PROMPT), 3 + index, 12), 2)


async def test_a_short_text_does_not_wait_until_long_ones_are_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompts(request: ChatRequest | CompletionRequest) -> list[list[int]]:
        if isinstance(request, CompletionRequest) and request.prompt == "long":
            goes_on.wait()
        return tokenize(request)

    goes_on, tokenize = threading.Event(), tokenizer.prompts
    monkeypatch.setattr(tokenizer, "prompts", prompts)
    async with serving(tokenizer) as server:

        async def complete(prompt: str) -> int:
            body = COMPLETION | {"prompt": prompt}
            return (await server.http.post("/v1/completions", json=body)).status_code

        long = [asyncio.create_task(complete("long")) for _ in range(tokenizer.threads - 1)]
        try:
            async with asyncio.timeout(20):
                assert await complete("short") == 200
            assert not any(each.done() for each in long)
        finally:
            goes_on.set()
        assert await asyncio.gather(*long) == [200] * (tokenizer.threads - 1)
    assert tokenizer.threads > 1


async def test_a_drawn_seed_differs(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        texts = {
            (await server.client.chat.completions.create(**CHAT, max_tokens=20)).choices[0].message.content
            for _ in range(4)
        }
        assert len(texts) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_engine_is_a_status_to_come_back_after(tokenizer: Tokenizer, stream: bool) -> None:
    async with serving(tokenizer, MemoryEngine(capacity=0)) as server:
        response = await server.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) > 0
        with pytest.raises(openai.RateLimitError, match="no room"):
            await server.client.chat.completions.create(**CHAT)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [{"n": 3}, {"prompt": ["a", "b", "c"]}])
async def test_one_choice_too_many_is_a_status_and_leaves_nothing_running(
    tokenizer: Tokenizer, body: dict[str, Any], stream: bool
) -> None:
    async with serving(tokenizer, MemoryEngine(capacity=2)) as server:
        response = await server.http.post("/v1/completions", json=COMPLETION | body | {"stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "overloaded"
        while server.engine.running:
            await asyncio.sleep(0)


async def test_a_choice_refused_after_others_have_tokens_is_still_a_status(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, MemoryEngine(capacity=2)) as server:
        engine, submit = server.engine, server.dispatcher._submit

        async def submit_late(submission: Submission) -> Refusal | None:
            while submission.request == 2 and sum(len(each[2]) for each in engine.running.values()) < 10:
                await asyncio.sleep(0)
            return await submit(submission)

        server.dispatcher._submit = submit_late
        body = COMPLETION | {"n": 3, "stream": True, "max_tokens": 190}
        response = await server.http.post("/v1/completions", json=body)
        assert response.status_code == 429


async def test_a_full_engine_says_how_long_it_will_take(tokenizer: Tokenizer) -> None:
    class Full(MemoryEngine):
        async def submit(
            self, request: Request, sink: Callable[[Output], None], *, promised: bool = False
        ) -> None:
            raise QueueFull("no room", retry_after=6.2)

    async with serving(tokenizer, Full()) as server:
        response = await server.http.post("/v1/completions", json=COMPLETION)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")


class Timekeeper(MemoryEngine):
    """Every request's time is over once it has `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def step(self) -> None:
        if self.tokens:
            super().step()
        for id, (request, sink, output) in list(self.running.items()):
            if len(output) == self.tokens:
                del self.running[id]
                sink(Output(request, len(output), (), FinishReason.TIMEOUT))


async def test_an_answer_cut_off_by_time_says_so(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, Timekeeper(3)) as server:
        body = CHAT | {"seed": 3, "timeout": 30, "n": 2}
        answered = (await server.http.post("/v1/chat/completions", json=body)).json()
        for index, choice in enumerate(answered["choices"]):
            assert choice["message"]["content"] == answer(CHAT_PROMPT, 3 + index, 3)
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
        *_, last, done = await events(server, "/v1/chat/completions", body | {"stream": True, "n": 1})
        [choice] = last["choices"]
        assert (choice["finish_reason"], choice["stop_reason"], done) == ("length", "timeout", "data: [DONE]")


@pytest.mark.parametrize("stream", [False, True])
async def test_time_that_ended_before_the_first_token_is_an_error(tokenizer: Tokenizer, stream: bool) -> None:
    async with serving(tokenizer, Timekeeper(0)) as server:
        body = COMPLETION | {"stream": stream, "queue_timeout": 1, "n": 3}
        response = await server.http.post("/v1/completions", json=body)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        client = server.client.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="demo", prompt="hi")
        assert len(server.engine.requests) == 4  # the client has not tried again


async def test_what_the_engine_is_told_of_a_request(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        for more in (
            {"priority": -3, "cache_salt": "mine", "timeout": 9, "queue_timeout": 4.5, "user": "somebody"},
            {"safety_identifier": "another"},
        ):
            await server.client.completions.create(model="demo", prompt="hi", max_tokens=2, extra_body=more)
    told, bare = server.engine.requests
    assert (told.priority, told.cache_salt, told.client) == (-3, b"mine", "somebody")
    assert told.timeout is not None and 8 < told.timeout <= 9
    assert told.queue_timeout is not None and 3.5 < told.queue_timeout <= 4.5
    assert (bare.priority, bare.cache_salt, bare.client) == (0, b"", "another")
    assert (bare.timeout, bare.queue_timeout) == (None, None)


OBJECT = {"type": "object", "x-guidance": {"lenient": False, "coerce_one_of": False}}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_gets_the_grammar(tokenizer: Tokenizer, stream: bool) -> None:
    constraints: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ]
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/chat/completions", CHAT, 1),
        ("/v1/completions", COMPLETION | {"prompt": ["a", "b"]}, 2),
    ]
    async with serving(tokenizer) as server:
        for constraint, (path, body, prompts) in product(constraints, cases):
            server.engine.requests.clear()
            body = body | {"n": 2, "max_tokens": 3, "stream": stream}
            assert (await server.http.post(path, json=body | constraint)).status_code == 200
            grammars = [request.sampling.grammar for request in server.engine.requests]
            assert len(grammars) == 2 * prompts
            for grammar in grammars:
                assert grammar is not None
                assert json.loads(grammar)["grammars"][0]["json_schema"] == OBJECT
            await server.http.post(path, json=body | {"response_format": {"type": "text"}})
            assert server.engine.requests[-1].sampling.grammar is None


async def test_openais_client_sends_a_type_as_a_schema(tokenizer: Tokenizer) -> None:
    class Person(BaseModel):
        name: str
        age: int | None

    async with serving(tokenizer) as server:
        with pytest.raises(openai.LengthFinishReasonError):  # no object has two tokens
            await server.client.chat.completions.parse(**CHAT, max_tokens=2, response_format=Person)
        [request] = server.engine.requests
    assert request.sampling.grammar is not None
    schema = json.loads(request.sampling.grammar)["grammars"][0]["json_schema"]
    assert schema["required"] == ["name", "age"]
    assert schema["properties"]["age"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]


async def test_a_grammar_that_takes_long_lets_others_pass(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as could tokenise prompts."""
    goes_on, begun = threading.Event(), threading.Semaphore(0)

    def grammar(_: StructuredOutputs) -> str:
        begun.release()
        goes_on.wait()
        return 'start: "a"'

    monkeypatch.setattr(StructuredOutputs, "grammar", grammar)
    async with serving(tokenizer) as server:

        async def complete(**more: Any) -> int:
            return (await server.http.post("/v1/completions", json=COMPLETION | more)).status_code

        outputs = {"regex": "a"}
        long = [asyncio.create_task(complete(structured_outputs=outputs)) for _ in range(tokenizer.threads)]
        try:
            async with asyncio.timeout(20):
                await asyncio.to_thread(begun.acquire)
                for _ in range(20):  # by then, all of them wait
                    assert await complete() == 200
            assert not any(each.done() for each in long)
        finally:
            goes_on.set()
        assert await asyncio.gather(*long) == [200] * tokenizer.threads


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_the_engine_refuses_is_the_clients_field(
    tokenizer: Tokenizer, change: dict[str, Any], param: str, stream: bool
) -> None:
    class Without(MemoryEngine):
        async def submit(self, request: Request, sink: Any, *, promised: bool = False) -> None:
            if request.sampling.grammar is not None:
                raise RequestError("this model has no grammars", "grammar")
            await super().submit(request, sink, promised=promised)

    async with serving(tokenizer, Without()) as server:
        body = COMPLETION | {"stream": stream}
        response = await server.http.post("/v1/completions", json=body | change)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert (await server.http.post("/v1/completions", json=body)).status_code == 200


async def test_cached_tokens_are_those_that_no_answer_to_a_prompt_had_to_compute(
    tokenizer: Tokenizer,
) -> None:
    class Caching(MemoryEngine):
        async def submit(
            self, request: Request, sink: Callable[[Output], None], *, promised: bool = False
        ) -> None:
            await super().submit(request, sink, promised=promised)
            request.num_cached = 3 + request.sampling.seed

    asked: dict[str, Any] = {"model": "demo", "prompt": ["abcdefgh", "ijklmnopq"], "n": 2, "max_tokens": 3}
    async with serving(tokenizer, Caching()) as server:
        for seed, cached in ((0, 3 + 3), (2, 5 + 5)):
            answer = await server.client.completions.create(**asked, seed=seed)
            streamed = await events(
                server,
                "/v1/completions",
                asked | {"seed": seed, "stream": True, "stream_options": {"include_usage": True}},
            )
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == cached
            assert streamed[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


async def test_whoever_has_a_key_is_one_client_whatever_users_it_names(tokenizer: Tokenizer) -> None:
    keys = frozenset(hashlib.sha256(key).digest() for key in (b"one", b"two"))
    async with serving(tokenizer, keys=keys) as server:
        for key, user in (("one", "a"), ("one", "b"), ("two", "a")):
            await server.client.with_options(api_key=key).completions.create(
                model="demo", prompt="hi", user=user
            )
    first, second, third = (each.client for each in server.engine.requests)
    assert first == second != third
    assert len({first, second, third, ""}) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_engine_is_a_status_until_the_stream_has_begun(
    tokenizer: Tokenizer, stream: bool
) -> None:
    async with serving(tokenizer, Breaking()) as server:
        body = CHAT | {"stream": stream, "max_tokens": 9, "seed": 3}
        if stream:
            *chunks, last = await events(server, "/v1/chat/completions", body)
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert answer(CHAT_PROMPT, 3, 5).startswith(text)
            assert last["error"]["type"] == "server_error"
            assert "broken" in last["error"]["message"]
        else:
            response = await server.http.post("/v1/chat/completions", json=body)
            assert response.status_code == 503
            assert "broken" in response.json()["error"]["message"]
        response = await server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 503
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_models_and_health(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        [model] = (await server.client.models.list()).data
        assert model.id == "demo"
        assert (await server.client.models.retrieve("demo")).id == "demo"
        with pytest.raises(openai.NotFoundError, match="other"):
            await server.client.models.retrieve("other")
        assert (await server.http.get("/health")).status_code == 200
        server.healthy = False
        response = await server.http.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "no engine answers"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_routes_that_are_not_there(tokenizer: Tokenizer, method: str, path: str, status: int) -> None:
    async with serving(tokenizer) as server:
        response = await server.http.request(method, path)
        assert response.status_code == status
        error = response.json()["error"]
        assert path in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("declared", [True, False])
async def test_a_long_body_is_not_held(tokenizer: Tokenizer, declared: bool) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 10 * MAX_BODY_BYTES:
            sent += 1 << 20
            yield bytes(1 << 20)

    async with serving(tokenizer) as server:
        headers = {"content-length": str(10 * MAX_BODY_BYTES)} if declared else {}
        response = await server.http.post("/v1/completions", content=body(), headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert sent <= (0 if declared else MAX_BODY_BYTES + (2 << 20))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": CONTEXT}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"nonsense": 1}, 400, "nonsense"),
        ({"structured_outputs": {"regex": "["}}, 400, "structured_outputs.regex"),
    ],
)
async def test_bad_fields_are_named(
    tokenizer: Tokenizer, path: str, change: dict[str, Any], status: int, param: str
) -> None:
    async with serving(tokenizer) as server:
        response = await server.http.post(path, json=(CHAT if "chat" in path else COMPLETION) | change)
        assert response.status_code == status
        assert response.json()["error"]["param"] == param
        assert not server.engine.running


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": ["a"] * 5}, "prompt"), ({"n": 3, "prompt": ["a"] * 2}, "n")]
)
async def test_more_sequences_than_can_ever_wait_are_not_asked_to_come_back(
    tokenizer: Tokenizer, body: dict[str, Any], param: str
) -> None:
    async with serving(tokenizer, max_sequences=4) as server:
        response = await server.http.post("/v1/completions", json=COMPLETION | body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert not server.engine.submitted.is_set()
        fits = await server.http.post(
            "/v1/completions", json=COMPLETION | {"prompt": ["a"] * 4, "max_tokens": 2}
        )
        assert fits.status_code == 200


async def test_a_client_that_leaves_while_it_sends_is_no_error(tokenizer: Tokenizer) -> None:
    """Ray Serve's channel raises an exception of its own then; nothing is to be logged as a bug."""

    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        raise RuntimeError("the channel broke")

    async with serving(tokenizer) as server:
        response = await server.http.post("/v1/completions", content=body())
        assert response.status_code == 499


async def test_what_the_engine_refuses_names_the_field_of_the_api(tokenizer: Tokenizer) -> None:
    # The tokenizer knows 256 tokens, the engine 94: "é" is for the engine to refuse.
    async with serving(tokenizer) as server:
        body = CHAT | {"messages": [{"role": "user", "content": "é"}]}
        response = await server.http.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        response = await server.http.post("/v1/completions", json=COMPLETION | {"prompt": "é"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_a_bug_is_a_500_in_the_same_shape(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tokenizer) as server:
        monkeypatch.setattr(server.dispatcher, "start", lambda *_: 1 / 0)
        response = await server.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
