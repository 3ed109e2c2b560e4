"""One engine becomes three under load and one again after it, and no request fails. Real Ray, CPU engines."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import ray
from ray import serve

from benchmarks.ports import free_port
from deployments.app import build
from deployments.settings import Settings

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # Ray leaves them
]

ENGINE = {"max_running_requests": 8, "cpu_cache_gib": 0.2, "cpu_threads": 1}
SCALING = {"cold_start_s": 20, "hold_s": 20}
TOKENS = 40


@pytest.fixture
def url() -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=8, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = Settings.model_validate(
            {"accelerator": "cpu", "max_replicas": 3, "engine": ENGINE, "autoscaling": SCALING}
        )
        serve.run(build(settings), name="stepahead", route_prefix="/")
        yield f"http://127.0.0.1:{port}/v1"
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def engines() -> int:
    """That are running, those on their way in or out not counted."""
    deployment = serve.status().applications["stepahead"].deployments["EngineReplica"]
    return int(deployment.replica_states.get("RUNNING", 0))  # type: ignore[call-overload]


async def until(good: Callable[[int], bool]) -> None:
    async with asyncio.timeout(240):
        while not good(await asyncio.to_thread(engines)):
            await asyncio.sleep(1)


async def test_engines_follow_the_load_and_no_request_fails(url: str) -> None:
    async with openai.AsyncOpenAI(api_key="any", base_url=url, max_retries=0, timeout=240) as client:
        create: Any = client.chat.completions.create
        busy = True

        async def chat(number: int, going: Callable[[], bool]) -> int:
            """One request after the other, whole or streamed by turns; how many were answered."""
            done = 0
            while going():
                answer = await create(
                    model="demo",
                    messages=[{"role": "user", "content": f"Chat {number}, question {done}."}],
                    max_tokens=TOKENS,
                    stream=bool(done % 2),
                    extra_body={"ignore_eos": True},
                )
                if done % 2:
                    reasons = [chunk.choices[0].finish_reason async for chunk in answer]
                    assert [reason for reason in reasons if reason] == ["length"]
                else:
                    assert answer.usage.completion_tokens == TOKENS
                done += 1
            return done

        lasting = True
        lone = asyncio.create_task(chat(0, lambda: lasting))
        crowd = [asyncio.create_task(chat(1 + n, lambda: busy)) for n in range(23)]
        await until(lambda n: n == 3)
        busy = False
        assert all(await asyncio.gather(*crowd))
        await until(lambda n: n == 1)
        lasting = False
        assert await lone
