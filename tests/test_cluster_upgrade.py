"""An upgrade in place, rehearsed: `serve deploy` of a changed configuration while clients keep asking.

KubeRay does the same where only `serveConfigV2` has changed. Real Ray, the demo model, two engines and two
Routers, of which Ray Serve replaces one at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
from ray import serve

from benchmarks.ports import free_port
from cluster.serve import Application, HttpOptions, ServeConfig
from deployments.settings import Settings

pytestmark = [
    pytest.mark.nightly,  # two generations of replicas, in two minutes of a quiet machine
    # Ray leaves its log files and its pipes to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

ROOT = Path(__file__).parents[1]
QUESTIONS = [f"What is the capital of {country}?" for country in ("France", "Italy", "Japan", "Peru")]
BEFORE, AFTER = 6, 8
"""`max_running_requests` of the old configuration and the new."""


@pytest.fixture
def dashboard() -> Iterator[str]:
    """The address that `serve deploy` is given, of a Ray of its own."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        context = ray.init(
            num_cpus=8,  # as Ray counts: engines and Routers wait more than they compute
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=free_port(),
            _temp_dir=folder,
            log_to_driver=False,
        )
        yield f"http://{context.dashboard_url}"
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


class Clients:
    """Ask one question after the other, half of them streaming, and keep count of what they get."""

    def __init__(self, url: str) -> None:
        self.api: Any = openai.AsyncOpenAI(api_key="any", base_url=f"{url}/v1", max_retries=0, timeout=300)
        self.expected: dict[str, str] = {}
        self.answers = 0
        self.failures: Counter[str] = Counter()
        self.routers: Counter[int] = Counter()
        """Answers by the time at which the Router that gave them started."""

    async def ask(self, question: str, stream: bool) -> str:
        messages = [{"role": "user", "content": question}]
        answer = await self.api.chat.completions.create(
            model="demo", messages=messages, max_tokens=24, temperature=0, stream=stream
        )
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    async def router(self) -> int:
        [model] = (await self.api.models.list()).data
        return int(model.created)

    async def go_on(self, number: int, done: asyncio.Event) -> None:
        questions = itertools.cycle(QUESTIONS[number % 4 :] + QUESTIONS[: number % 4])
        while not done.is_set():
            question = next(questions)
            try:
                text = await self.ask(question, stream=bool(number % 2))
                self.routers[await self.router()] += 1
            except Exception as error:
                self.failures[f"{type(error).__name__}: {error}"[:300]] += 1
                continue
            self.answers += 1
            if text != self.expected[question]:
                self.failures[f"wrong answer: {text!r}"] += 1


def config(port: int, rows: int) -> ServeConfig:
    engine = {"max_running_requests": rows, "cpu_threads": 1, "cpu_cache_gib": 0.25}
    args = Settings(replicas=2, routers=2, accelerator="cpu", engine=engine)
    return ServeConfig(http_options=HttpOptions(port=port), applications=[Application(args=args)])


async def deploy(config: ServeConfig, dashboard: str, folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_text(config.text())
    command = [Path(sys.executable).with_name("serve"), "deploy", "--address", dashboard, path]
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()


async def running() -> None:
    """Until the last deployment has come to its end."""
    while True:
        application = (await asyncio.to_thread(serve.status)).applications.get("stepahead")
        assert application is None or application.status != "DEPLOY_FAILED", application
        if application is not None and application.status == "RUNNING":
            return
        await asyncio.sleep(1)  # Serve tells nobody; the two cores are the replicas'


async def test_no_request_fails_while_a_changed_configuration_is_deployed(
    dashboard: str, tmp_path: Path
) -> None:
    port = free_port()
    await deploy(config(port, BEFORE), dashboard, tmp_path)
    await running()
    clients = Clients(f"http://127.0.0.1:{port}")
    for question in QUESTIONS:
        clients.expected[question] = await clients.ask(question, stream=False)

    done = asyncio.Event()
    asking = [asyncio.create_task(clients.go_on(number, done)) for number in range(4)]
    while clients.answers < 8:
        await asyncio.wait(asking, timeout=1)
    before, newest = clients.answers, max(clients.routers)
    await deploy(config(port, AFTER), dashboard, tmp_path)
    while max(clients.routers) == newest:  # `serve deploy` returns before Serve has begun
        await asyncio.wait(asking, timeout=1)
    await running()
    during = clients.answers - before
    while clients.answers < before + during + 8:
        await asyncio.wait(asking, timeout=1)
    done.set()
    await asyncio.gather(*asking)
    new = sum(n for started, n in clients.routers.items() if started > newest)
    print(f"{before} answers before, {during} during the upgrade; {new} by new Routers")
    assert not clients.failures, dict(clients.failures)
    assert during
    assert min([await clients.router() for _ in range(8)]) > newest
    engines = serve.get_deployment_handle("EngineReplica", "stepahead")
    assert {(await engines.stats.remote()).rows_free for _ in range(8)} == {AFTER}
    await clients.api.close()
