"""What a Router tells of its requests: each once, at the time at which it happened, in the client's trace."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN

from deployments.api import Api
from deployments.execution import Executor
from deployments.generation import Dispatcher
from deployments.telemetry import GAP_EVERY, Arrival, Telemetry, Watch
from deployments.text import Tokenizer
from deployments.tracing import otlp_provider, tracer_to
from engine import metrics as m
from tests.memory_engine import MemoryEngine, text_of
from tests.memory_recorder import MemoryRecorder
from tests.test_api import tokenizer as tokenizer

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Observed:
    """The HTTP API and the engine behind it, and all that they tell."""

    def __init__(self, tokenizer: Tokenizer, engine: MemoryEngine) -> None:
        self.engine = engine
        self.record = MemoryRecorder()
        self._spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        tracer = tracer_to(provider)
        telemetry = Telemetry(self.record, "demo", tracer)
        executor = Executor(engine, "r1", "demo", tracer)
        self.dispatcher = Dispatcher(executor.run, "demo", watch=telemetry.watch)
        app = Api("demo", tokenizer, self.dispatcher, self._well, telemetry=telemetry).app()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def _well(self) -> None:
        pass

    async def complete(self, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
        body = {"model": "demo", "prompt": "Hi", "max_tokens": 5, "seed": 3} | options
        return await self.http.post("/v1/completions", json=body, headers=headers)

    def total(self, metric: m.Metric, *labels: str) -> float:
        return self.record.counters[metric].get(labels, 0)

    async def spans(self) -> dict[str, ReadableSpan]:
        """Of all that has ended, submissions included: they end after the client has its answer."""
        await asyncio.gather(*self.dispatcher._tasks)
        return {span.name: span for span in self._spans.get_finished_spans()}


@asynccontextmanager
async def observing(tokenizer: Tokenizer, engine: MemoryEngine | None = None) -> AsyncIterator[Observed]:
    observed = Observed(tokenizer, engine or MemoryEngine())
    await observed.dispatcher.open("127.0.0.1")
    stepping = asyncio.create_task(observed.engine.run())
    async with observed.http:
        yield observed
    stepping.cancel()
    await observed.dispatcher.close()


async def test_every_sequence_ends_in_exactly_one_reason(tokenizer: Tokenizer) -> None:
    async with observing(tokenizer) as observed:
        prompt = tokenizer.prompts(_request("Hi"))[0]
        answer = text_of(prompt, 3, 40)
        stop = tokenizer.token_bytes(answer[2]).decode() + tokenizer.token_bytes(answer[3]).decode()
        await observed.complete()
        await observed.complete(n=2, stream=True)
        await observed.complete(max_tokens=40, stop=[stop])
        bad = await observed.http.post("/v1/completions", json={"model": "demo"})
        assert bad.status_code == 400
        await observed.http.get("/v1/models")
        observed.engine.capacity = 0
        assert (await observed.complete()).status_code == 429
        assert observed.total(m.SEQUENCES_STARTED) == 5
        assert observed.record.counters[m.SEQUENCES_FINISHED] == {("length",): 3, ("stop",): 1, ("full",): 1}
        statuses = observed.record.counters[m.HTTP_REQUESTS]
        assert statuses == {("completions", "200"): 3, ("completions", "400"): 1, ("completions", "429"): 1}
        histograms = observed.record.histograms
        assert len(histograms[m.TIME_TO_FIRST_TOKEN]) == 4
        assert len(histograms[m.REQUEST_SECONDS]) == 4
        *whole_ones, stopped = histograms[m.OUTPUT_LENGTH]
        assert whole_ones == [5, 5, 5] and 4 <= stopped < 40  # some may be on their way when it is found
        assert histograms[m.PROMPT_LENGTH] == [2] * 5
        first, whole = max(histograms[m.TIME_TO_FIRST_TOKEN]), max(histograms[m.REQUEST_SECONDS])
        assert 0 < first <= whole


def _request(prompt: str) -> Any:
    from deployments.protocol import CompletionRequest, parse

    return parse(json.dumps({"model": "demo", "prompt": prompt}).encode(), CompletionRequest)


async def test_a_client_that_leaves_is_an_abort(tokenizer: Tokenizer) -> None:
    async with observing(tokenizer) as observed:
        asked = asyncio.create_task(observed.complete(max_tokens=150))
        await observed.engine.submitted.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert observed.record.counters[m.SEQUENCES_FINISHED] == {("abort",): 1}
        assert observed.record.counters[m.HTTP_REQUESTS] == {("completions", "499"): 1}
        assert m.REQUEST_SECONDS not in observed.record.histograms


async def test_a_trace_goes_from_the_client_to_the_replica(tokenizer: Tokenizer) -> None:
    async with observing(tokenizer) as observed:
        await observed.complete({"traceparent": f"00-{TRACE}-{PARENT}-01"})
        spans = await observed.spans()
        http, generate, execute = (spans[n] for n in ("POST /v1/completions", "generate", "execute"))
        for span in (http, generate, execute):
            assert f"{span.context.trace_id:032x}" == TRACE
        assert http.parent and f"{http.parent.span_id:016x}" == PARENT
        assert generate.parent and generate.parent.span_id == http.context.span_id
        assert execute.parent and execute.parent.span_id == generate.context.span_id
        assert [event.name for event in generate.events] == ["submitted", "first token"]
        assert [event.name for event in execute.events] == ["first token"]
        assert generate.attributes is not None
        assert generate.attributes["gen_ai.usage.output_tokens"] == 5
        assert generate.attributes["gen_ai.request.model"] == "demo"
        assert generate.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert http.attributes and http.attributes["http.response.status_code"] == 200
        assert execute.attributes and execute.attributes["stepahead.replica"] == "r1"
        times = [http.start_time, generate.start_time, execute.start_time, generate.events[-1].timestamp]
        assert times == sorted(time for time in times if time is not None)


async def test_a_trace_that_the_client_does_not_record_is_recorded_nowhere(tokenizer: Tokenizer) -> None:
    async with observing(tokenizer) as observed:
        await observed.complete({"traceparent": f"00-{TRACE}-{PARENT}-00"})
        assert await observed.spans() == {}


@pytest.mark.parametrize("traceparent", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_what_is_no_trace_context_begins_a_new_trace(tokenizer: Tokenizer, traceparent: str) -> None:
    async with observing(tokenizer) as observed:
        answer = await observed.complete({"traceparent": traceparent} if traceparent else {})
        assert answer.status_code == 200
        assert (await observed.spans())["POST /v1/completions"].parent is None


async def test_the_log_has_a_line_of_facts_for_each_sequence(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "deployments.telemetry"):
        async with observing(tokenizer) as observed:
            await observed.complete({"traceparent": f"00-{TRACE}-{PARENT}-01"}, n=2)
    lines = [record.__dict__ for record in caplog.records if record.name == "deployments.telemetry"]
    assert len(lines) == 2
    for line in lines:
        assert line["finish_reason"] == "length"
        assert (line["prompt_tokens"], line["output_tokens"], line["attempts"]) == (2, 5, 1)
        assert 0 < line["seconds_to_first_token"] <= line["seconds"]
        assert line["trace_id"] == TRACE


def test_gaps_are_those_of_every_sixteenth_token() -> None:
    record, now = MemoryRecorder(), [0.0]
    watch = Watch(record, Arrival(0.0, INVALID_SPAN), INVALID_SPAN, 3, lambda: now[0])
    watch.submitted(None)
    came = 0
    for size, at in ((1, 1.0), (15, 3.0), (1, 7.0), (20, 8.0), (100, 10.0)):
        now[0] = at
        watch.took(size)
        came += size
    assert record.histograms[m.TIME_TO_FIRST_TOKEN] == [1.0]
    gaps = record.histograms[m.INTER_TOKEN_SECONDS]
    assert len(gaps) == (came - 1) // GAP_EVERY
    assert gaps[0] == 4.0, "token 16 came alone, 4 s after token 15"
    assert set(gaps[1:]) == {0.0}, "the others came behind one of the same frame"


def test_resumptions_are_counted_by_their_cause() -> None:
    record = MemoryRecorder()
    watch = Telemetry(record, "demo").watch(3)
    assert watch.submitted(None) == {}, "nothing is traced"
    watch.submitted("lost")
    watch.submitted("moved")
    assert record.counters[m.RESUMPTIONS] == {("lost",): 1, ("moved",): 1}
    watch.ended("lost", "three replicas are gone")
    assert record.counters[m.SEQUENCES_FINISHED] == {("lost",): 1}


def test_spans_leave_by_otlp_where_that_is_installed() -> None:
    provider = otlp_provider("router")
    assert isinstance(provider, TracerProvider)
    assert provider.resource.attributes["service.name"] == "router"
    provider.shutdown()


async def test_the_timeline_of_one_replica_or_of_all(tokenizer: Tokenizer) -> None:
    asked: list[int] = []

    async def timelines(steps: int) -> dict[str, list[dict[str, Any]]]:
        asked.append(steps)
        return {name: [{"name": f"of {name}", "pid": 1}] for name in ("b", "a")}

    async def well() -> None:
        pass

    dispatcher = Dispatcher(Executor(MemoryEngine(), "r1", "demo").run, "demo")
    for given, there in ((timelines, True), (None, False)):
        app = Api("demo", tokenizer, dispatcher, well, timelines=given).app()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            answer = await http.get("/debug/timeline")
            assert answer.status_code == (200 if there else 404), "off unless enabled"
            if not there:
                continue
            events = answer.json()["traceEvents"]
            assert [(event["name"], event["pid"]) for event in events] == [("of a", 1), ("of b", 2)]
            one = (await http.get("/debug/timeline?replica=b&steps=7")).json()["traceEvents"]
            assert one == [{"name": "of b", "pid": 2}]
            assert asked == [200, 7]
            missing = await http.get("/debug/timeline?replica=c")
            assert missing.status_code == 404
            assert "'c': a, b" in missing.json()["error"]["message"]
            for steps in ("0", "-1", "x", "2049", "\u0662", "9" * 5000):
                assert (await http.get("/debug/timeline", params={"steps": steps})).status_code == 400
