"""`serve run serve_config.yaml`, as its users have it: the demo model, real Ray, real HTTP, real clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import ray
import yaml
from ray import serve

from engine.engine import EngineStats

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class App:
    """The running application."""

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
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
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
    yield app
    await app.client.close()
    process.send_signal(signal.SIGINT)
    await process.wait()
    await rest


async def test_it_knows_the_capital_of_france(app: App) -> None:
    assert "Paris" in await app.text("What is the capital of France?", max_tokens=30)


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


async def test_a_stream_outlives_its_replica(app: App) -> None:
    """It stops while Ray Serve starts another replica, and then goes on with the very next token."""
    story, options = "Tell me a long story.", {"max_tokens": 30, "extra_body": {"ignore_eos": True}}
    alone = await app.text(story, **options)
    stream = await app.ask(story, stream=True, **options)
    texts = [(await anext(stream)).choices[0].delta.content or "" for _ in range(5)]
    [name] = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if "#EngineReplica#" in actor["name"]
    ]
    ray.kill(ray.get_actor(name, namespace="serve"))
    texts += [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == alone
