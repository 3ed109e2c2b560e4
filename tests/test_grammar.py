"""Texts that follow a grammar: every token, whatever the model likes, and whatever runs beside them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine import slots
from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.grammar import Grammars
from engine.lanes import make_lanes
from engine.request import FinishReason, QueueFull, Request, RequestError, SamplingParams
from engine.runner import Shape
from engine.slots import unpacked
from tests.fake_device import VOCAB, next_token
from tests.small_tokenizers import save, wrapped
from tests.test_engine import config, run, running, settled, tokens_of
from tests.test_graphs import RunAgain, captured_runner, new_scheduler
from tests.test_races import EVENTS
from tests.tiny_models import save_weights
from tests.toy_pipeline import DEVICE, ChosenOrder, Pipeline, delayed_lanes, every_order

REGEX = "(yes|no|maybe), [0-9]{3}( and more){0,2}[.!]"
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "Fluß", 'a "dog"']},
        "legs": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "legs", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = [
    LLMatcher.grammar_from_regex(REGEX),
    LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)),
    LLMatcher.grammar_from_lark('start: "天地" /[a-c]{4}/ | "ça va"'),
]


def fits(kind: int, text: str) -> bool:
    if kind == 0:
        return re.fullmatch(REGEX, text) is not None
    if kind == 2:
        return re.fullmatch("天地[a-c]{4}|ça va", text) is not None
    found = json.loads(text)
    assert list(found) == ["kind", "legs", "tags"]
    assert found["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]
    return 0 <= found["legs"] <= 999 and all(isinstance(tag, bool) for tag in found["tags"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights, whose text is noise, with a tokenizer of bytes and pieces."""
    directory: Path = tmp_path_factory.mktemp("model")
    save("byte_level", directory)
    save_weights(directory)
    return str(directory)


def request(name: str, prompt: list[int], n: int = 90, **sampling: Any) -> Request:
    eos = (wrapped("byte_level").eos_token_id,)
    return Request(name, prompt, SamplingParams(max_tokens=n, **{"stop_token_ids": eos} | sampling))


def text_of(tokens: Sequence[int]) -> str:
    tokenizer: Any = wrapped("byte_level")
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def settings(model: str, **changes: Any) -> EngineConfig:
    own: dict[str, Any] = {"model": model, "context_length": 128, "num_blocks": 48}
    return config(**own | changes)


def mixture() -> list[Request]:
    """Greedy and sampled, of each grammar and of none."""
    return [
        request(
            f"{i}",
            [5 + i, 9, 30, 31][: 1 + i % 4] * (1 + i % 7),
            temperature=(0.0, 1.0, 2.0)[i % 3],
            seed=i,
            grammar=None if i % 4 == 3 else GRAMMARS[i % 4],
            n=20 if i % 4 == 3 else 90,
            top_p=0.9 if i % 5 == 1 else 1.0,
            presence_penalty=1.0 if i % 5 == 2 else 0.0,
            logprobs=2 if i % 5 == 3 else None,
        )
        for i in range(24)
    ]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_every_text_follows_its_grammar_and_nobody_elses_changes(model: str, overlap: bool) -> None:
    """sglang#25361: beside others, in chunks and preempted; and each token is what it is alone."""

    async def test() -> None:
        async with running(settings(model, overlap=False)) as engine:
            alone = [await tokens_of(engine, each) for each in mixture()]
        async with running(settings(model, overlap=overlap, max_tokens_per_step=9, num_blocks=20)) as engine:
            together = mixture()
            found = await asyncio.gather(*(tokens_of(engine, each) for each in together))
            assert engine.stats().preemptions
        assert found == alone
        for i, (each, tokens) in enumerate(zip(together, found, strict=True)):
            if each.sampling.grammar is None:
                continue
            assert each.finish_reason is FinishReason.STOP
            assert fits(i % 4, text_of(tokens)), text_of(tokens)
        assert len({text_of(tokens) for tokens in found}) > 20  # as they like it, within their grammars

    run(test())


def test_log_probabilities_are_still_those_of_the_model(model: str) -> None:
    async def test() -> None:
        async with running(settings(model)) as engine:
            asked = request("a", [7, 8], temperature=0.0, logprobs=20, grammar=GRAMMARS[0])
            outputs = [output async for output in engine.generate(asked)]
            found = [each for output in outputs for each in output.logprobs]
            assert len(found) > 10
            for each in found:  # of 600 tokens, a digit may be one of 10
                assert each.token <= each.values[0] and min(each.values) > -20
            assert any(each.token < each.values[-1] for each in found)

    run(test())


def test_resumed_elsewhere_the_grammar_goes_on(model: str) -> None:
    async def test() -> None:
        async with running(settings(model)) as engine, running(settings(model)) as other:
            for i in range(6):
                grammar = GRAMMARS[i % 3]
                whole = await tokens_of(engine, request(f"{i}", [7, 8], seed=i, grammar=grammar))
                for n in (1, len(whole) // 2, len(whole) - 1):
                    again = request(f"{i}-{n}", [7, 8], seed=i, grammar=grammar)
                    again.generated = whole[:n]
                    rest = [token async for output in other.generate(again) for token in output.tokens]
                    assert whole[:n] + rest == whole

    run(test())


def test_a_grammar_is_compiled_once_and_each_text_is_its_own(model: str) -> None:
    async def test() -> None:
        async with running(settings(model)) as engine:
            asked = [request(f"{i}", [7, 8], seed=i, grammar=GRAMMARS[1]) for i in range(8)]
            texts = await asyncio.gather(*(tokens_of(engine, each) for each in asked))
            assert all(fits(1, text_of(tokens)) for tokens in texts)
            assert len({text_of(tokens) for tokens in texts}) > 4
            assert engine._scheduler.grammars._compiled.cache_info().misses == 1

    run(test())


def test_a_mask_that_cannot_be_computed_is_an_error_of_its_request(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance has limits, and beyond them allows the end alone: half a text would pass for an answer."""
    limits = LLParserLimits(step_lexer_fuel=30)

    def compile_(self: Grammars, grammar: str) -> LLMatcher:
        vocabulary: Any = self._loaded.result()
        return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)

    async def test() -> None:
        async with running(settings(model)) as engine:
            wanted = await tokens_of(engine, request("alone", [7], n=30, seed=2))
        monkeypatch.setattr(Grammars, "_compile", compile_)
        async with running(settings(model)) as engine:
            other = asyncio.create_task(tokens_of(engine, request("other", [7], n=30, seed=2)))
            asked = request("a", [7], grammar=GRAMMARS[1])
            last = [output async for output in engine.generate(asked)][-1]
            assert last.finish_reason is FinishReason.ERROR and last.error and not last.tokens
            assert await other == wanted
            assert engine.healthy

    run(test())


def test_an_end_that_is_ignored_is_all_that_follows(model: str) -> None:
    async def test() -> None:
        async with running(settings(model)) as engine:
            asked = request("a", [7], n=40, grammar=GRAMMARS[2], ignore_eos=True)
            tokens = await tokens_of(engine, asked)
            assert asked.finish_reason is FinishReason.LENGTH and len(tokens) == 40
            assert fits(2, text_of(tokens))

    run(test())


async def refused(engine: AsyncEngine, asked: Request) -> RequestError:
    with pytest.raises(RequestError) as error:
        engine.submit(asked, lambda _: None)
    return error.value


def test_what_cannot_be_followed_is_refused_by_name_and_the_others_go_on(model: str) -> None:
    async def test() -> None:
        async with running(settings(model)) as engine:
            others = asyncio.create_task(tokens_of(engine, request("other", [5], n=30)))
            error = await refused(engine, request("a", [7], grammar="start: ("))
            assert error.field == "grammar" and "the grammar is wrong" in str(error)
            begun = request("b", [7], grammar=GRAMMARS[0])
            begun.generated = [9, 9, 9]
            assert (await refused(engine, begun)).field == "generated"
            assert len(await others) == 30
        async with running(config()) as engine:  # of a checkpoint without tokenizer
            error = await refused(engine, request("a", [7], n=3, grammar=GRAMMARS[0]))
            assert error.field == "grammar" and "no tokenizer" in str(error)

            begun = request("c", [7], grammar=GRAMMARS[0])
            begun.generated = [-1]
            assert (await refused(engine, begun)).field == "generated"
        full = settings(model, max_running_requests=1, max_waiting_requests=1)
        async with running(full) as engine:
            grammars = engine._scheduler.grammars
            running_ones = [asyncio.create_task(tokens_of(engine, each)) for each in mixture()[:2]]
            await settled(engine, lambda: len(engine._live) == 2)
            known = grammars._compiled.cache_info().misses
            with pytest.raises(QueueFull):
                engine.submit(request("d", [7], grammar=GRAMMARS[2]), lambda _: None)
            assert grammars._compiled.cache_info().misses == known  # compiled for nobody
            await asyncio.gather(*running_ones)

    run(test())
    with pytest.raises(RequestError, match="grammar must be a string"):
        SamplingParams(grammar=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 70])
def test_bits_of_masks(vocab: int) -> None:
    masks = torch.randint(-(2**31), 2**31, (3, 2), dtype=torch.int32)
    bits = [
        [bool(int(row[i // 32]) >> (i % 32) & 1) if i < 64 else False for i in range(vocab)] for row in masks
    ]
    assert unpacked(masks, vocab).tolist() == bits


def test_chunks_that_sample_nothing_wait_for_no_mask() -> None:
    scheduler = new_scheduler(letters())
    scheduler.max_tokens_per_step = 4
    scheduler.add(Request("free", [1] * 5, SamplingParams(max_tokens=3)))
    scheduler.add(Request("bound", [2] * 6, SamplingParams(max_tokens=3, grammar=PAIRS)))
    plans = [plan for _ in range(4) if (plan := scheduler.schedule()) is not None]
    assert [plan.constrained.tolist() for plan in plans] == [[], [], [1], [1]]


# The toy's pipeline: its tokens are a to l, and an end


class Letters:
    """What llguidance asks of a tokenizer."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id = VOCAB - 1, None
        self.tokens = [*(bytes([97 + i]) for i in range(VOCAB - 1)), b"</s>"]
        self.special_token_ids = [VOCAB - 1]

    def __call__(self, text: bytes) -> list[int]:
        return [byte - 97 for byte in text]


@cache
def letters() -> Grammars:
    return Grammars(lambda: LLTokenizer(TokenizerWrapper(Letters())))


PAIRS = LLMatcher.grammar_from_regex("([a-f][g-l])*")


def toy_tokens(asked: Request) -> list[int]:
    """The token that the toy likes, or else the first that the grammar allows."""
    tokens: list[int] = []
    while len(tokens) < (asked.sampling.max_tokens or 0):
        likes = next_token([*asked.prompt, *tokens], 0)
        allowed = [*range(6), VOCAB - 1] if len(tokens) % 2 == 0 else [*range(6, 12)]
        tokens.append(likes if likes in allowed or asked.sampling.grammar is None else allowed[0])
        if tokens[-1] in asked.sampling.stop_token_ids:
            break
    return tokens


def toys(n: int) -> list[Request]:
    return [
        Request(
            str(i),
            [1 + i % 12] * (1 + i % 5),
            SamplingParams(
                max_tokens=2 + i * 7 % 11,
                temperature=0,
                stop_token_ids=(VOCAB - 1,),
                grammar=PAIRS if i % 3 else None,
            ),
        )
        for i in range(n)
    ]


def check_toys(found: dict[Request, list[int]]) -> None:
    for each, tokens in found.items():
        assert tokens == toy_tokens(each)


@pytest.mark.parametrize("depth", [1, 2])
def test_after_captured_steps(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "AT_ONCE", 3)
    lanes, graphs = make_lanes(DEVICE), RunAgain()
    pipeline = Pipeline(lanes, depth=depth, grammars=letters())
    pipeline.runner = captured_runner(lanes, graphs, depth)
    pipeline.scheduler = new_scheduler(letters())
    check_toys(pipeline.run([toys(40)]))
    graphs.replayed.clear()
    pipeline.outputs.clear()
    check_toys(pipeline.run([[each for each in toys(40) if each.sampling.grammar]]))
    lanes.close()
    # A captured sampling knows nothing of masks.
    assert graphs.replayed and all(isinstance(shape, Shape) for _, shape, *_ in graphs.replayed)


@pytest.mark.parametrize("seed", range(3))
def test_on_lanes_with_delays(seed: int) -> None:
    lanes = delayed_lanes(seed)
    try:
        check_toys(Pipeline(lanes, grammars=letters()).run([[each] for each in toys(24)]))
    finally:
        lanes.close()


def few() -> list[list[Request]]:
    """A prompt, and a step after it; each waits for its mask."""
    sampling = SamplingParams(max_tokens=2, temperature=0, grammar=PAIRS)
    return [[Request("a", [3, 4], sampling)]]


def test_every_order_gives_the_same_tokens() -> None:
    def run(world: ChosenOrder) -> None:
        check_toys(Pipeline(world.lanes(), pause=world.pause, grammars=letters()).run(few()))

    assert every_order(run) > 20


@pytest.mark.parametrize("event", [*EVENTS, "masks_done"])
def test_without_an_event_some_order_fails(event: str) -> None:
    failures = 0

    def run(world: ChosenOrder) -> None:
        nonlocal failures
        try:
            pipeline = Pipeline(world.lanes(), pause=world.pause, grammars=letters())
            check_toys(pipeline.without(event).run(few()))
        except Exception:
            failures += 1

    every_order(run, enough=lambda: failures > 0)
    assert failures == 1
