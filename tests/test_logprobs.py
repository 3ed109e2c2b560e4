"""Log-probabilities: the model's own, of the right tokens, whatever the engine does with the request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from engine import slots
from engine.engine import AsyncEngine
from engine.lanes import make_lanes
from engine.logprobs import log_probabilities
from engine.request import MAX_LOGPROBS, Logprobs, Request, RequestError, SamplingParams
from tests.fake_device import VOCAB, next_token
from tests.test_engine import LENGTHS, NEW, config, request, run, running
from tests.test_graphs import RunAgain, captured_runner, new_scheduler
from tests.tiny_models import reference_texts, tiny_model
from tests.toy_pipeline import DEVICE, Pipeline, delayed_lanes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_those_of_softmax(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 301) * 8).to(dtype)
    tokens = torch.randint(301, (5,), dtype=torch.int32)
    ids, values = log_probabilities(logits, tokens, 7)
    assert ids.dtype == torch.int32 and ids.shape == values.shape == (5, 8)
    wanted = logits.double().log_softmax(-1)
    torch.testing.assert_close(values.double(), wanted.gather(1, ids.long()), atol=1e-5, rtol=1e-5)
    assert torch.equal(ids[:, 0], tokens)
    torch.testing.assert_close(values[:, 1:].double(), wanted.topk(7).values, atol=1e-5, rtol=1e-5)
    assert log_probabilities(logits, tokens, 0)[0].tolist() == tokens[:, None].tolist()


async def told(engine: AsyncEngine, asked: Request) -> tuple[list[int], list[Logprobs]]:
    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    async for output in engine.generate(asked):
        tokens += output.tokens
        logprobs += output.logprobs
    return tokens, logprobs


def check(architecture: str, asked: Request, tokens: list[int], logprobs: list[Logprobs]) -> None:
    n = asked.sampling.logprobs
    if n is None:
        assert logprobs == []
        return
    model, _ = tiny_model(architecture)
    with torch.inference_mode():
        context = torch.tensor([[*asked.prompt, *tokens[:-1]]])
        wanted = model(context).logits[0, len(asked.prompt) - 1 :].log_softmax(-1)
    assert len(logprobs) == len(tokens) == len(wanted)
    for token, found, row in zip(tokens, logprobs, wanted, strict=True):
        assert found.token == pytest.approx(float(row[token]), abs=1e-3)
        assert len(found.likeliest) == len(set(found.likeliest)) == n
        assert found.values == pytest.approx(row.topk(n).values.tolist(), abs=1e-3)
        assert found.values == pytest.approx(row[found.likeliest].tolist(), abs=1e-3)


WISHES: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"logprobs": None},
    {"logprobs": 0, "temperature": 1.0, "seed": 4},
    {"logprobs": MAX_LOGPROBS, "temperature": 1.0, "seed": 5, "top_k": 3},
    {"logprobs": 5, "presence_penalty": 2.0, "logit_bias": ((7, 100.0), (8, 90.0))},
    {"logprobs": 1, "temperature": 2.0, "seed": 6},
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_each_request_is_told_what_it_asked_for(architecture: str, overlap: bool) -> None:
    """Beside others, in chunks, preempted, behind cached prefixes; the model's own, before all that is done
    to choose the token; and asking changes no token."""
    prompts = [prompt for prompt, _ in reference_texts(architecture, LENGTHS, NEW)]

    async def all_of(engine: AsyncEngine, **forced: Any) -> list[tuple[Request, list[int], list[Logprobs]]]:
        asked = [
            request(f"{i}-{j}-{forced}", prompt, **(wish | forced))
            for i, prompt in enumerate(prompts)
            for j, wish in enumerate(WISHES)
        ]
        found = await asyncio.gather(*(told(engine, each) for each in asked))
        return [(each, *brought) for each, brought in zip(asked, found, strict=True)]

    async def test() -> None:
        settings = config(architecture, overlap=overlap, max_tokens_per_step=9, num_blocks=20)
        async with running(settings) as engine:
            found = await all_of(engine)
            assert engine.stats().preemptions and engine.stats().cached_tokens
            for each in found:
                check(architecture, *each)
            silent = await all_of(engine, logprobs=None)
            assert [tokens for _, tokens, _ in silent] == [tokens for _, tokens, _ in found]

    run(test())


def toy_logprob(likely: bool) -> float:
    """The toy's logits are 1 for one token, and 0 for all others."""
    return float(torch.tensor([1.0] + [0.0] * (VOCAB - 1)).log_softmax(-1)[0 if likely else 1])


def check_toy(request: Request, tokens: list[int], logprobs: list[Logprobs]) -> None:
    assert len(logprobs) == (0 if request.sampling.logprobs is None else len(tokens))
    for i, found in enumerate(logprobs):
        likely = next_token([*request.prompt, *tokens[:i]], 0)
        assert found.token == pytest.approx(toy_logprob(tokens[i] == likely))
        n = min(request.sampling.logprobs or 0, VOCAB)
        assert len(found.likeliest) == n and found.likeliest[:1] == [likely][:n]
        assert found.values == pytest.approx([toy_logprob(id == likely) for id in found.likeliest])


def toys() -> list[Request]:
    """Many that come and go, and ask for more than the vocabulary has."""
    wishes = [None, 0, 1, 5, MAX_LOGPROBS]
    return [
        Request(
            str(i),
            [1 + i % 12] * (1 + i % 5),
            SamplingParams(max_tokens=1 + i * 7 % 11, temperature=i % 3, seed=i, logprobs=wishes[i % 5]),
        )
        for i in range(40)
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_after_captured_steps(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "AT_ONCE", 3)
    lanes = make_lanes(DEVICE)
    pipeline = Pipeline(lanes, depth=depth)
    pipeline.runner, pipeline.scheduler = captured_runner(lanes, RunAgain(), depth), new_scheduler()
    for each, tokens in pipeline.run([toys()]).items():
        check_toy(each, tokens, pipeline.logprobs[each])
    lanes.close()


def test_a_chunk_that_samples_nothing_is_not_scored() -> None:
    scheduler = new_scheduler()
    scheduler.max_tokens_per_step = 4
    scheduler.add(Request("a", [1] * 10, SamplingParams(max_tokens=3, logprobs=2)))
    scheduler.add(Request("b", [2], SamplingParams(max_tokens=1, logprobs=5)))
    plans = [plan for _ in range(5) if (plan := scheduler.schedule()) is not None]
    assert [(plan.scored.tolist(), plan.likeliest) for plan in plans[:2]] == [([], 0)] * 2
    assert [(plan.scored.tolist(), plan.likeliest) for plan in plans[2:4]] == [([0, 1], 5), ([0], 2)]


@pytest.mark.parametrize("seed", range(3))
def test_on_lanes_with_delays(seed: int) -> None:
    lanes = delayed_lanes(seed)
    try:
        pipeline = Pipeline(lanes)
        found = pipeline.run([[each] for each in toys()])
        for each, tokens in found.items():
            check_toy(each, tokens, pipeline.logprobs[each])
    finally:
        lanes.close()


@pytest.mark.parametrize("wrong", [-1, MAX_LOGPROBS + 1, 1.0, "3"])
def test_out_of_range(wrong: Any) -> None:
    with pytest.raises(RequestError, match="logprobs must be an integer from 0 to 20") as error:
        SamplingParams(logprobs=wrong)
    assert error.value.field == "logprobs"
