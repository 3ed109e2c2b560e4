"""Penalties and biases: against transformers and a plain count, whatever the engine does with the request."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from engine.penalties import HistoryTensors, Penalties, PenaltyTensors
from engine.request import MAX_BIASES, Request, RequestError, SamplingParams
from tests.test_engine import NEW, config, request, run, running, tokens_of
from tests.tiny_models import VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
ROWS, VOCAB = 5, 24
PROMPT = [7, 7, 30, 12, 99, 30, 7, 101, 54, 3, 3, 8]


def history(
    row: int, prompt: list[int], generated: list[int], bias: dict[int, float] | None = None
) -> HistoryTensors:
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return HistoryTensors(
        row, ints(prompt), ints(generated), ints([*(bias or {})]), torch.tensor([*(bias or {}).values()])
    )


def tensors(rows: list[int], presence: float, frequency: float, repetition: float) -> PenaltyTensors:
    n = len(rows)
    return PenaltyTensors(
        torch.tensor(rows, dtype=torch.int32),
        *(torch.full((n,), x) for x in (presence, frequency, repetition)),
    )


class Plainly(LogitsProcessor):
    """The definitions of OpenAI's API, counting Python lists."""

    def __init__(self, num_prompt: int, sampling: SamplingParams) -> None:
        self.num_prompt, self.sampling = num_prompt, sampling
        self.repetition = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        for token, bias in self.sampling.logit_bias:
            scores[:, token] += bias
        scores = self.repetition(input_ids, scores)
        for i, tokens in enumerate(input_ids[:, self.num_prompt :].tolist()):
            for token, times in Counter(tokens).items():
                scores[i, token] -= self.sampling.frequency_penalty * times + self.sampling.presence_penalty
        return scores


token_ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(max_examples=60)
@given(
    stays=st.lists(
        st.tuples(st.integers(1, ROWS - 1), token_ids, token_ids, token_ids), min_size=1, max_size=6
    ),
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, -1.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    seed=st.integers(0, 99),
)
def test_counts_of_rows_that_change_owners(
    stays: list[tuple[int, list[int], list[int], list[int]]],
    presence: float,
    frequency: float,
    repetition: float,
    seed: int,
) -> None:
    """Each owner brings tokens, then samples some; others have used the row before."""
    penalties = Penalties(ROWS, VOCAB, CPU)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    for row, prompt, generated, sampled in stays:
        penalties.begin([history(row, prompt, generated)])
        for token in sampled:
            # Beside it, something that samples nothing.
            penalties.count(torch.tensor([row, 0, 0]), torch.tensor([token, 3, 3]))
        got = penalties.apply(logits, tensors([row], presence, frequency, repetition))
        asked = SamplingParams(
            presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
        )
        context = torch.tensor([prompt + generated + sampled], dtype=torch.int64).view(1, -1)
        torch.testing.assert_close(got, Plainly(len(prompt), asked)(context, logits))


def test_rows_do_not_touch_each_other_and_neutral_ones_nothing() -> None:
    penalties = Penalties(ROWS, VOCAB, CPU)
    penalties.begin([history(1, [5], [6, 6]), history(2, [7], [], {3: -100.0, 9: 50.0})])
    logits = torch.randn(3, VOCAB).bfloat16()
    got = penalties.apply(
        logits,
        PenaltyTensors(
            torch.tensor([2, 1, 4], dtype=torch.int32),
            torch.tensor([1.0, 1.0, 0.0]),
            torch.tensor([1.0, 1.0, 0.0]),
            torch.ones(3),
        ),
    )
    wanted = logits.float()
    wanted[0, 3] -= 100
    wanted[0, 9] += 50
    wanted[1, 6] -= 3
    torch.testing.assert_close(got, wanted)
    assert got.dtype == torch.float32


def test_a_bias_ends_with_its_request() -> None:
    penalties = Penalties(ROWS, VOCAB, CPU)
    logits = torch.zeros(1, VOCAB)
    for bias in (dict.fromkeys(range(VOCAB), 1.0), {4: 2.0}, {}):
        penalties.begin([history(1, [1], [], bias)])
        got = penalties.apply(logits, tensors([1], 0, 0, 1))[0]
        assert got.tolist() == [bias.get(token, 0.0) for token in range(VOCAB)]


def test_no_memory_before_use_and_none_after_release() -> None:
    penalties = Penalties(ROWS, VOCAB, CPU)
    assert penalties._counts is None
    penalties.begin([history(1, [1], [])])
    assert penalties._biases is None  # nobody has any
    penalties.release()
    assert penalties._counts is None


ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 2.0, "repetition_penalty": 0.6},
    {"frequency_penalty": 1.0, "repetition_penalty": 0.6},
    {"presence_penalty": -2.0},
    {"frequency_penalty": -1.0},
    {"repetition_penalty": 0.7, "logit_bias": ((7, 4.0), (39, -100.0))},
    {},
]
SEEDED: dict[str, Any] = {"temperature": 1.2, "seed": 3, "top_k": 40, "top_p": 0.95}


def reference(sampling: SamplingParams) -> list[int]:
    model, _ = tiny_model("llama")
    plainly = LogitsProcessorList([Plainly(len(PROMPT), sampling)])
    ids = torch.tensor([PROMPT])
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=sampling.max_tokens,
        do_sample=False,
        logits_processor=plainly,
    )
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


def asked(i: int, n: int = 2 * NEW, **more: Any) -> Request:
    return request(f"{i}", PROMPT, n, **ASKED[i] | more)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_greedy_equals_transformers(overlap: bool) -> None:
    """vllm#27878, #52461: a token in flight counts too. One by one, all at once, and preempted."""
    wanted = [reference(asked(i).sampling) for i in range(len(ASKED))]
    assert len({tuple(each) for each in wanted}) == len(ASKED)

    async def test() -> None:
        async with running(config(overlap=overlap)) as engine:
            for i, each in enumerate(wanted):
                assert await tokens_of(engine, asked(i)) == each
            together = await asyncio.gather(*(tokens_of(engine, asked(i)) for i in range(len(ASKED))))
            assert together == wanted
        small = config(overlap=overlap, num_blocks=14, max_tokens_per_step=8)
        async with running(small) as engine:
            together = await asyncio.gather(*(tokens_of(engine, asked(i)) for i in range(len(ASKED))))
            assert together == wanted
            assert engine.stats().preemptions > 0

    run(test())


def test_sampled_tokens_depend_on_nothing_but_the_request() -> None:
    async def outputs(engine_config: Any, together: bool) -> list[list[int]]:
        async with running(engine_config) as engine:
            each = [asked(i, **SEEDED) for i in range(len(ASKED))]
            if together:
                return await asyncio.gather(*(tokens_of(engine, one) for one in each))
            return [await tokens_of(engine, one) for one in each]

    async def test() -> None:
        alone = await outputs(config(overlap=False), False)
        assert len({tuple(each) for each in alone}) == len(ASKED)
        assert await outputs(config(), True) == alone
        assert await outputs(config(num_blocks=14, max_tokens_per_step=8), True) == alone

    run(test())


def test_resumed_elsewhere_counts_go_on() -> None:
    async def test() -> None:
        async with running(config()) as engine, running(config()) as other:
            for i in range(len(ASKED)):
                for more in ({}, SEEDED):
                    whole = await tokens_of(engine, asked(i, **more))
                    again = asked(i, **more)
                    again.generated = whole[:9]
                    rest = [token async for output in other.generate(again) for token in output.tokens]
                    assert whole[:9] + rest == whole

    run(test())


def test_a_bias_does_not_stay_with_the_row() -> None:
    """Whoever has it next has no bias, in a step with somebody else's penalties, too."""
    settings = config(max_running_requests=2)

    async def test() -> None:
        async with running(settings) as engine:
            alone = await tokens_of(engine, request("alone", PROMPT))
            other, biased, after = await asyncio.gather(  # the last one waits for the row of the second
                tokens_of(engine, asked(0, 60)),
                tokens_of(engine, request("biased", [1], 3, logit_bias=((5, 100.0),))),
                tokens_of(engine, request("after", PROMPT)),
            )
            assert other[: 2 * NEW] == reference(asked(0).sampling)
            assert (biased, after) == ([5] * 3, alone)

    run(test())


def test_nobody_else_pays() -> None:
    """Steps without such a request sample as before, and have no tables."""

    async def test() -> None:
        async with running(config()) as engine:
            await tokens_of(engine, request("plain", PROMPT))
            assert engine._runner.penalties._counts is None
            await asyncio.gather(tokens_of(engine, asked(0)), tokens_of(engine, request("b", PROMPT, 60)))
            assert engine._runner.penalties._counts is not None

    run(test())


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("presence_penalty", [-2, 2, 0.5], [-2.1, 2.1, float("nan")]),
        ("frequency_penalty", [-2, 2, 0.5], [-2.1, 2.1, float("nan")]),
        ("repetition_penalty", [0.01, 1, 100], [0, 0.001, 101, -1, float("nan")]),
        (
            "logit_bias",
            [(), ((0, 100), (5, -100.0)), tuple((i, 1.0) for i in range(MAX_BIASES))],
            [
                ((1, 100.1),),
                ((1, float("nan")),),
                ((-1, 1.0),),
                ((1, 1.0), (1, 2.0)),
                ((1.5, 1.0),),
                tuple((i, 1.0) for i in range(MAX_BIASES + 1)),
            ],
        ),
    ],
)
def test_what_is_out_of_range_is_refused(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(RequestError) as refused:
            SamplingParams(**{name: value})
        assert refused.value.field == name


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    async def test() -> None:
        async with running(config()) as engine:
            with pytest.raises(RequestError) as refused:
                engine.submit(request("a", [1], 1, logit_bias=((VOCAB_SIZE, 1.0),)), lambda _: None)
            assert refused.value.field == "logit_bias"

    run(test())
