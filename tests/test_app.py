"""`serve run serve_config.yaml`, as its users have it: the demo model, real Ray, real HTTP, real clients."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import pytest
import pytest_asyncio
import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.ports import free_port
from deployments.balancer import Balancer
from deployments.generation import Dispatcher, Generation
from deployments.tape import Record
from engine.request import FinishReason, SamplingParams
from engine.stats import EngineStats
from tests import small_tokenizers, tiny_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    # Ray leaves its log files and its pipes to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

ROOT = Path(__file__).parents[1]
CAPITALS = (
    "France Germany Italy Spain Portugal Greece Norway Sweden Finland Denmark Poland Austria Hungary "
    "Ireland Japan China India Egypt Kenya Cuba Peru Chile Brazil Canada Mexico Russia Turkey Iran Iraq "
    "Israel Thailand Vietnam"
).split()
LONG = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}


class App:
    """The running application."""

    process: asyncio.subprocess.Process
    """`scripts/serve.py`."""
    config: dict[str, Any]

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = openai.AsyncOpenAI(api_key="any", base_url=f"{url}/v1", max_retries=0)
        self._engine = serve.get_deployment_handle("EngineReplica", "stepahead")

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._engine.stats.remote()
        return stats

    async def idle(self) -> EngineStats:
        """The statistics once nothing runs."""
        while (stats := await self.stats()).running or stats.waiting:
            pass
        return stats

    async def ask(self, question: str, **options: Any) -> Any:
        messages = [{"role": "user", "content": question}]
        create: Any = self.client.chat.completions.create
        return await create(model="demo", messages=messages, temperature=0, **options)

    async def text(self, question: str, **options: Any) -> str:
        """The answer, not streamed."""
        content: str = (await self.ask(question, **options)).choices[0].message.content
        return content

    async def streamed(self, question: str, **options: Any) -> str:
        stream = await self.ask(question, stream=True, **options)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray of its own; its address."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=8, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        yield ray.get_runtime_context().gcs_address
        serve.shutdown()  # type: ignore[no-untyped-call]  # else this process keeps a dead controller's handle
        ray.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    """serve_config.yaml as it is, on a free port."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    port = config.setdefault("http_options", {})["port"] = free_port()
    path = tmp_path_factory.mktemp("serve") / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, ROOT / "scripts" / "serve.py", path),
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": cluster, "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    log = []
    async for line in process.stdout:
        log.append(line.decode())
        if b"answers at" in line:
            break
    else:
        pytest.fail("".join(log))
    rest = asyncio.create_task(process.stdout.read())
    app = App(f"http://127.0.0.1:{port}")
    app.process, app.config = process, config
    yield app
    await app.client.close()
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
    await process.wait()
    await rest


async def test_it_knows_the_capital_of_france(app: App) -> None:
    assert "Paris" in await app.text("What is the capital of France?", max_tokens=30)


async def test_what_a_start_makes_is_left_out_of_collections(app: App) -> None:
    """Of libraries alone there are hundreds of thousands of objects, for which every thread would stop."""
    frozen = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        kind = actor["name"].split("#")[-2] if "#" in actor["name"] else ""
        if kind in ("EngineReplica", "Router"):
            handle = ray.get_actor(actor["name"], actor["namespace"])
            frozen[kind] = await handle.__ray_call__.remote(lambda _: __import__("gc").get_freeze_count())
    assert set(frozen) == {"EngineReplica", "Router"}
    assert min(frozen.values()) > 100_000


async def test_it_lists_the_model(app: App) -> None:
    [model] = (await app.client.models.list()).data
    assert model.id == "demo"


async def test_greedy_is_the_same_streamed_or_not(app: App) -> None:
    question = "Count from one to ten."
    whole = await app.ask(question, max_tokens=25)
    text = whole.choices[0].message.content
    assert text
    assert await app.text(question, max_tokens=25) == text
    assert await app.streamed(question, max_tokens=25) == text


async def test_usage_counts_the_tokens(app: App) -> None:
    options = {"max_tokens": 7, "extra_body": {"ignore_eos": True}}
    whole = await app.ask("Hello.", **options)
    assert whole.usage.completion_tokens == 7
    assert whole.usage.prompt_tokens > 7  # the chat template is part of it
    stream = await app.ask("Hello.", stream=True, stream_options={"include_usage": True}, **options)
    usages = [chunk.usage async for chunk in stream]
    assert usages[-1].completion_tokens == 7
    assert usages[-1].prompt_tokens == whole.usage.prompt_tokens
    assert not any(usages[:-1])


async def test_an_answer_is_what_the_client_says_it_has_to_be(app: App) -> None:
    """A schema, whole and streamed, and a choice: through Ray, both processes and OpenAI's client."""
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Paris", "Rome"]}, "bridges": {"type": "integer", "maximum": 99}},
        "required": ["capital", "bridges"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    question = "Tell me about the capital of France."
    whole = await app.ask(question, max_tokens=60, response_format=wanted)
    [choice] = whole.choices
    found = json.loads(choice.message.content)
    assert choice.finish_reason == "stop" and list(found) == ["capital", "bridges"]
    assert found["capital"] in ("Paris", "Rome") and found["bridges"] <= 99
    stream = await app.ask(question, max_tokens=60, response_format=wanted, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == choice.message.content
    choices = {"structured_outputs": {"choice": ["a haddock", "an eel"]}}
    answer = await app.ask("Name a fruit.", max_tokens=20, extra_body=choices)
    assert answer.choices[0].message.content in choices["structured_outputs"]["choice"]
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as error:
        await app.ask("No.", extra_body={"structured_outputs": {"json": {"type": "object", "if": {}}}})
    assert error.value.param == "structured_outputs.json"


async def test_it_tells_how_likely_its_tokens_were(app: App) -> None:
    options = {"max_tokens": 40, "logprobs": True, "top_logprobs": 20}
    whole = await app.ask("What is the capital of France?", **options)
    [choice], entries = whole.choices, whole.choices[0].logprobs.content
    assert choice.finish_reason == "stop"  # and its own end is the last of them, without a text
    assert len(entries) == whole.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in entries) == choice.message.content.encode()
    for entry in entries:
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
        values = [each.logprob for each in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and len(values) == 20
        assert 0 < sum(map(math.exp, values)) < 1 + 1e-5
    stream = await app.ask("What is the capital of France?", stream=True, **options)
    told = [chunk.choices[0].logprobs.content async for chunk in stream if chunk.choices[0].logprobs]
    streamed = [entry for content in told for entry in content]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in entries], abs=1e-3
    )


async def test_32_chats_at_once_say_what_each_says_alone(app: App) -> None:
    questions = [f"What is the capital of {country}?" for country in CAPITALS]
    assert len(questions) == 32
    alone = [await app.text(question, max_tokens=8) for question in questions]
    assert len(set(alone)) > 16
    together = await asyncio.gather(
        *(
            (app.streamed if number % 2 else app.text)(question, max_tokens=8)
            for number, question in enumerate(questions)
        )
    )
    assert together == alone


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_row_and_blocks(app: App, stream: bool) -> None:
    before = await app.idle()
    asking = [asyncio.create_task(app.ask(f"Tell me story {n}.", stream=stream, **LONG)) for n in range(4)]
    while (running := await app.stats()).running < 4 or running.steps < before.steps + 5:
        pass
    for task in asking:
        if stream:
            await (await task).close()
        else:
            task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    left = await app.stats()
    after = await app.idle()
    assert after.rows_free == before.rows_free
    assert after.blocks_owned == before.blocks_owned == 0
    assert after.finished["abort"] == before.finished.get("abort", 0) + 4
    assert after.steps - left.steps <= 3


BAD: list[tuple[str, Any, int, str | None]] = [
    ("unknown model", {"model": "gpt-5"}, 404, "model"),
    ("no messages", {"messages": []}, 400, "messages"),
    ("no model", {"model": None}, 400, "model"),
    ("long prompt", {"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages"),
    ("no room to generate", {"max_tokens": 1_000_000}, 400, "max_tokens"),
    ("max_tokens 0", {"max_tokens": 0}, 400, "max_tokens"),
    ("max_tokens -1", {"max_tokens": -1}, 400, "max_tokens"),
    ("temperature -1", {"temperature": -1}, 400, "temperature"),
    ("temperature NaN", {"temperature": float("nan")}, 400, "temperature"),
    ("top_p 0", {"top_p": 0}, 400, "top_p"),
    ("top_p 1.5", {"top_p": 1.5}, 400, "top_p"),
    ("unknown field", {"tempersture": 1}, 400, "tempersture"),
    ("unsupported field", {"min_tokens": 5}, 400, "min_tokens"),
    ("wrong type", {"max_tokens": "many"}, 400, "max_tokens"),
    ("wrong type within", {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ("not JSON", b'{"model": "demo", "messages"', 400, None),
    ("not UTF-8", b'{"model": "\xff"}', 400, None),
    ("not an object", b"[]", 400, None),
    ("empty", b"", 400, None),
    ("50 MB", b'{"model": "demo", "messages": "' + b"x" * 50_000_000 + b'"}', 413, None),
]


async def test_bad_requests_are_refused_and_disturb_nobody(app: App) -> None:
    story = "Tell me a long story."
    alone = await app.text(story, max_tokens=100, extra_body={"ignore_eos": True})
    stream = await app.ask(story, max_tokens=100, extra_body={"ignore_eos": True}, stream=True)
    texts = [(await anext(stream)).choices[0].delta.content or ""]
    async with httpx.AsyncClient(base_url=app.url, timeout=60) as http:
        for name, change, status, param in BAD:
            good = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
            body = change if isinstance(change, bytes) else json.dumps(good | change).encode()
            response = await http.post("/v1/chat/completions", content=body)
            assert response.status_code == status, name
            error = response.json()["error"]
            assert error["param"] == param, name
            assert error["message"], name
            assert error["type"] == "invalid_request_error", name
        for path, method, status in (("/v2", "GET", 404), ("/v1/chat/completions", "GET", 405)):
            response = await http.request(method, path)
            assert (response.status_code, set(response.json())) == (status, {"error"})
        assert (await http.get("/health")).status_code == 200
    texts += [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == alone


async def test_harmless_fields_are_accepted(app: App) -> None:
    plain = await app.text("Hello.", max_tokens=8)
    harmless = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me"}
    assert await app.text("Hello.", max_tokens=8, **harmless) == plain


class Pair:
    """Two engines behind two Routers, with a tiny model in float32, beside the other application."""

    NAME = "pair"
    ENGINE: ClassVar[dict[str, Any]] = {
        "max_running_requests": 16,
        "max_waiting_requests": 144,
        "max_tokens_per_step": 256,
        "cpu_cache_gib": 0.25,
        "cpu_threads": 1,
    }
    ROOM = 2 * (16 + 144)

    def __init__(self, app: App, model: Path) -> None:
        self.model = str(model)
        self.http = httpx.AsyncClient(
            base_url=app.url + "/pair", timeout=120, limits=httpx.Limits(max_connections=None)
        )
        self._engines: Any = None
        self._config = app.config

    async def deploy(self, engines: int) -> None:
        """As `serve deploy` does, beside the other application; return when that many engines run."""
        args = {"model": self.model, "accelerator": "cpu", "replicas": 2, "routers": 2, "engine": self.ENGINE}
        application = {
            "name": self.NAME,
            "route_prefix": "/pair",
            "import_path": "deployments.app:build",
            "args": args,
            "deployments": [{"name": "EngineReplica", "num_replicas": engines}],
        }
        config = self._config | {"applications": [*self._config["applications"], application]}
        client: Any = _get_global_client()
        schema = ServeDeploySchema.model_validate(config)
        await asyncio.to_thread(client.deploy_apps, schema, _blocking=False)
        while True:
            status = (await asyncio.to_thread(serve.status)).applications[self.NAME]
            assert status.status != "DEPLOY_FAILED", status
            if status.status == "RUNNING" and len(self.actors("EngineReplica")) == engines:
                break
            await asyncio.sleep(0.2)  # Serve tells nobody
        self._engines = serve.get_deployment_handle("EngineReplica", self.NAME)

    async def stats(self) -> list[EngineStats]:
        stats: list[EngineStats] = await self._engines.broadcast("stats").results_async()
        return stats

    async def running(self, count: int) -> list[EngineStats]:
        """The statistics once that many sequences run or wait."""
        while True:
            stats = await self.stats()
            if sum(each.running + each.waiting for each in stats) == count:
                return stats

    def actors(self, deployment: str) -> dict[str, Any]:
        return {
            actor["name"]: ray.get_actor(actor["name"], namespace="serve")
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if f"{self.NAME}#{deployment}#" in actor["name"]
        }

    async def ask(self, prompt: str, **options: Any) -> str:
        """The text of all choices, streamed or not. Raises `HTTPStatusError`."""
        body = {"model": self.model, "prompt": prompt, "ignore_eos": True, **options}
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                response.raise_for_status()
            if not options.get("stream"):
                body = json.loads(await response.aread())
                return "".join(choice["text"] for choice in body["choices"])
            texts = [""] * options.get("n", 1)
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return "".join(texts)
                if data:
                    event = json.loads(data)
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
        raise AssertionError("the stream was cut")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(app: App, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    path = small_tokenizers.save("byte_level", tmp_path_factory.mktemp("model"), context_length=2048)
    tiny_models.save_weights(path)
    pair = Pair(app, path)
    await pair.deploy(2)
    yield pair
    await pair.http.aclose()


PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
SERVED = {name: value for name, value in PENALTIES.items() if hasattr(SamplingParams, name)}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 5},
    {"temperature": 1, "seed": 6, "stop": ["never to be found"]},
    {"temperature": 1, "seed": 7, **SERVED},
]


def requests(tokens: int) -> list[dict[str, Any]]:
    """Greedy and seeded, with a stop string and with penalties; each of them streamed and not."""
    return [
        {"prompt": f"Story {n}.", "max_tokens": tokens, "stream": stream, **kind}
        for n, kind in enumerate(KINDS)
        for stream in (True, False)
    ]


def deployed(replica: Any) -> Any:
    """In an actor of Ray Serve: the object that is deployed."""
    return replica._replica_impl._user_callable_wrapper._callable


def read_balancer(replica: Any) -> tuple[int, int]:
    """Runs in a Router: engines that it has heard of, and requests that it counts."""
    balancer: Balancer = deployed(replica)._balancer
    return int((balancer._stamp > 0).sum()), len(balancer._placements)


def read_stats(replica: Any) -> EngineStats:
    """Runs in a replica."""
    stats: EngineStats = deployed(replica)._engine.stats()
    return stats


def read_niceness(replica: Any) -> int:
    """Runs in a replica: that of its engine's process."""
    return os.getpriority(os.PRIO_PROCESS, deployed(replica)._engine.pid)


async def test_engines_stand_behind_no_other_process(pair: Pair) -> None:
    assert os.environ["RAY_worker_niceness"] == "0"  # Ray's default is 15
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for replica in pair.actors("EngineReplica").values():
        assert await replica.__ray_call__.remote(read_niceness) == own


async def test_two_routers_share_two_engines(pair: Pair) -> None:
    asked = requests(60) * 4
    alone = {json.dumps(request): await pair.ask(**request) for request in requests(60)}
    assert len(set(alone.values())) == len(KINDS)  # the seeds matter, and streaming does not
    asking = [asyncio.create_task(pair.ask(**request)) for request in asked]
    busy: set[int] = set()
    actors = [*pair.actors("Router").values(), *pair.actors("EngineReplica").values()]
    assert len(actors) == 4
    while not all(task.done() for task in asking):
        ongoing = await asyncio.gather(*(actor.get_num_ongoing_requests.remote() for actor in actors))
        busy |= {number for number, count in enumerate(ongoing) if count}
    assert busy == {0, 1, 2, 3}
    for request, text in zip(asked, await asyncio.gather(*asking), strict=True):
        assert text == alone[json.dumps(request)]
    for router in pair.actors("Router").values():
        while (seen := await router.__ray_call__.remote(read_balancer))[1]:
            pass  # Serve has yet to tell it that a call has ended
        assert seen[0] == 2

    # A prompt goes where it is cached, through whichever Router it comes.
    astray = 0
    engines = pair.actors("EngineReplica").values()
    for number in range(6):
        before = [await engine.__ray_call__.remote(read_stats) for engine in engines]
        for _ in range(4):
            await pair.ask(f"{number}. " + "Once upon a time. " * 60, max_tokens=1)
        after = [await engine.__ray_call__.remote(read_stats) for engine in engines]
        astray += min(b.admitted - a.admitted for a, b in zip(before, after, strict=True))
    assert astray <= 1  # of 24: what one Router tells the other may be late


async def test_more_than_fits_is_a_status_and_nothing_breaks(pair: Pair) -> None:
    """Twice what the engines hold, in sequences of 40 choices; each answer is whole, or a 429."""

    async def ask(number: int) -> str | int:
        options = {"n": 40, "stream": bool(number % 2), "max_tokens": 30, "temperature": 1, "seed": 1}
        try:
            return await pair.ask("Story.", **options)
        except httpx.HTTPStatusError as error:
            refusals.append(error.response)
            return error.response.status_code

    refusals: list[httpx.Response] = []
    answers = await asyncio.gather(*(ask(number) for number in range(2 * Pair.ROOM // 40)))
    assert 0 < answers.count(429) < len(answers)
    for refusal in refusals:
        assert int(refusal.headers["retry-after"]) > 0
        assert refusal.json()["error"]["code"] == "overloaded"
    assert len(set(answers)) == 2  # all that were answered got the same
    assert all(each.blocks_owned == 0 for each in await pair.running(0))


def watch_leavers(replica: Any) -> None:
    """Runs in a Router: notes how many tokens come for a sequence after its client has left."""
    dispatcher: Dispatcher = deployed(replica)._dispatcher
    stop, deliver = dispatcher.stop, dispatcher._listener._deliver
    left: dict[int, int] = {}
    aborted: dict[int, int] = {}

    def watch_stop(generation: Generation, reason: FinishReason | None = None) -> None:
        if generation.finish_reason is None:
            left[generation.request] = len(generation.tokens)
        stop(generation, reason)

    def watch_deliver(record: Record) -> bool:
        if record.finish_reason is FinishReason.ABORT:
            aborted[record.request] = record.position
        return deliver(record)

    dispatcher.stop = watch_stop  # type: ignore[method-assign]
    dispatcher._listener._deliver = watch_deliver
    replica.leavers = left, aborted


def read_leavers(replica: Any) -> list[int] | None:
    """None while the end of one of them has not arrived."""
    left, aborted = replica.leavers
    if not left.keys() <= aborted.keys():
        return None
    return [aborted[request] - tokens for request, tokens in left.items()]


async def leave(pair: Pair, connections: int, choices: int) -> list[int]:
    """Clients leave amid their answers, half of which stream. The tokens each sequence had after that."""
    before = await pair.running(0)
    asking = [
        asyncio.create_task(pair.ask(f"Story {number}.", stream=bool(number % 2), n=choices, max_tokens=1500))
        for number in range(connections)
    ]
    await pair.running(connections * choices)
    routers = pair.actors("Router").values()
    for router in routers:
        await router.__ray_call__.remote(watch_leavers)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    after = await pair.running(0)
    aborted = [sum(each.finished.get("abort", 0) for each in stats) for stats in (before, after)]
    assert aborted[1] - aborted[0] == connections * choices
    assert [each.rows_free for each in after] == [16, 16]
    assert all(each.blocks_owned == 0 for each in after)
    late = []
    for router in routers:
        while (seen := await router.__ray_call__.remote(read_leavers)) is None:
            pass
        late += seen
    return late


async def test_all_who_leave_are_aborted(pair: Pair) -> None:
    assert len(await leave(pair, connections=40, choices=5)) == 200


@pytest.mark.nightly
async def test_1000_connections_that_leave(pair: Pair) -> None:
    late: list[int] = []
    for _ in range(5):
        late += await leave(pair, connections=200, choices=1)
    assert len(late) == 1000
    print("tokens after the client had left:", sorted(Counter(late).items()))
    assert max(late) <= 3


async def test_a_replica_that_leaves_hands_its_requests_over(pair: Pair) -> None:
    """Whenever Ray Serve comes to it: requests are under way all the time, at any of their tokens."""
    asked = requests(1200)
    alone = await asyncio.gather(*(pair.ask(**request) for request in asked[::2]))
    gone = asyncio.Event()
    before = {
        name: await actor.__ray_call__.remote(read_stats)
        for name, actor in pair.actors("EngineReplica").items()
    }

    async def keep(request: dict[str, Any], wanted: str) -> None:
        while not gone.is_set():
            assert await pair.ask(**request) == wanted

    asking = [asyncio.create_task(keep(request, alone[i // 2])) for i, request in enumerate(asked)]
    while not all(each.running for each in await pair.stats()):
        pass
    await pair.deploy(1)
    gone.set()
    await asyncio.gather(*asking)
    [name] = pair.actors("EngineReplica")
    [after] = await pair.stats()
    brought = [each.prompt_tokens + each.cached_tokens for each in (before[name], after)]
    admitted = after.admitted - before[name].admitted
    # A request that was handed over brings the tokens that it had; the others bring a prompt of 8 bytes only.
    assert brought[1] - brought[0] > 8 * admitted


def stop_engine(replica: Any) -> None:
    """Runs in a replica: its engine hangs, as in a kernel that does not end."""
    os.kill(deployed(replica)._engine.pid, signal.SIGSTOP)


@pytest.mark.nightly
async def test_an_engine_that_hangs_keeps_nobody(pair: Pair) -> None:
    """Until Serve's third check has failed, half a minute; those who come later go past it."""
    await pair.deploy(2)
    asked = requests(1500)
    alone = await asyncio.gather(*(pair.ask(**request) for request in asked[::2]))
    asking = [asyncio.create_task(pair.ask(**request)) for request in asked]
    before = await pair.running(len(asked))
    while not all(now.steps > then.steps + 20 for now, then in zip(await pair.stats(), before, strict=True)):
        pass
    replica = next(iter(pair.actors("EngineReplica").values()))
    await replica.__ray_call__.remote(stop_engine)
    stopped = time.monotonic()

    async def late() -> tuple[float, float]:
        begun = time.monotonic()
        await pair.ask("Hello.", max_tokens=1)
        return round(begun - stopped, 1), round(time.monotonic() - begun, 1)

    newcomers = []
    while not all(task.done() for task in asking):
        newcomers.append(asyncio.create_task(late()))
        await asyncio.sleep(1)
    assert newcomers, "nobody was kept"
    print(f"all had ended {time.monotonic() - stopped:.1f} s after")
    print("newcomers (asked after, took):", await asyncio.gather(*newcomers))
    assert await asyncio.gather(*asking) == [text for text in alone for _ in range(2)]


def die(_: Any) -> None:
    """Runs in a replica."""
    os._exit(1)


def kill_engine(replica: Any) -> None:
    """Runs in a replica: its engine is killed, as for lack of memory."""
    os.kill(deployed(replica)._engine.pid, signal.SIGKILL)


@pytest.mark.parametrize("death", [die, kill_engine])
async def test_a_replica_that_dies_loses_nothing(pair: Pair, death: Callable[[Any], None]) -> None:
    asked = requests(120)
    alone = await asyncio.gather(*(pair.ask(**request) for request in asked[::2]))
    asking = [asyncio.create_task(pair.ask(**request)) for request in asked]
    [before] = await pair.running(len(asked))
    while (await pair.stats())[0].steps < before.steps + 20:
        pass
    [actor] = pair.actors("EngineReplica").values()
    actor.__ray_call__.remote(death)
    texts = await asyncio.gather(*asking)
    assert texts == [text for text in alone for _ in range(2)]


async def test_sigterm_ends_streams_with_an_error_event(app: App) -> None:
    """The last test here: it ends all that runs."""
    stream = await app.ask(
        "Tell me a long story.", stream=True, max_tokens=7000, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    unary = asyncio.create_task(
        app.ask("Tell me another one.", max_tokens=7000, extra_body={"ignore_eos": True})
    )
    while (await app.stats()).running < 2:
        pass
    app.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down") as error:
        async for _ in stream:
            pass
    assert not isinstance(error.value, openai.APIConnectionError)
    with pytest.raises(openai.InternalServerError, match="shutting down") as status:
        await unary
    assert status.value.status_code == 503
    assert status.value.response.headers["retry-after"]
    assert await app.process.wait() == signal.SIGTERM
