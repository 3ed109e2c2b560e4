"""What the several-GPU benchmark stands on: engines without a device, a tokenizer, clients, steering."""

from __future__ import annotations

import asyncio
import json
import threading
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.request_router import PendingRequest

from benchmarks.fleet import in_time
from benchmarks.latency import window
from benchmarks.lone_engine import LonePacedEngine
from benchmarks.measured import MeasuredReplica
from benchmarks.paced import PACES, Pace, PacedEngine
from benchmarks.phases import Phases
from benchmarks.report import make
from benchmarks.steering import CONTROL, SteeredRouter, Steering
from benchmarks.targets import Chats, Clients, EngineTarget, Seen, keep, now
from benchmarks.workloads import save_config, save_tokenizer
from deployments.submission import Submission
from deployments.tape import Address
from deployments.text import Tokenizer
from engine.config import EngineConfig
from engine.plan import scratch_plan
from engine.process import EngineProcess
from engine.request import Request, SamplingParams

FAST = Pace(1e-4, 0.0, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    save_tokenizer("tiny", directory)
    return save_config("tiny", directory, 512)


async def started(model: str) -> PacedEngine:
    engine = PacedEngine(EngineConfig(model=model, num_blocks=200, max_tokens_per_step=256), FAST)
    await engine.start()
    return engine


async def tokens_of(engine: PacedEngine, name: str, prompt: list[int], generated: list[int]) -> list[int]:
    sampling = SamplingParams(max_tokens=40, seed=9)
    found: list[int] = []
    async for output in engine.generate(Request(name, prompt, sampling, generated)):
        found += output.tokens
    return found


async def test_a_paced_engine_answers_as_a_real_one_would(model: str) -> None:
    """Alone, beside others and resumed, the same tokens; the prefix cache works."""
    engine = await started(model)
    try:
        prompt = list(range(1, 100))
        alone = await tokens_of(engine, "alone", prompt, [])
        assert len(alone) == 40 and len(set(alone)) > 20 and min(alone) > 0 and max(alone) < 1000
        beside = await asyncio.gather(*(tokens_of(engine, str(i), prompt, []) for i in range(5)))
        assert beside == [alone] * 5
        assert await tokens_of(engine, "resumed", prompt, alone[:17]) == alone[17:]
        assert engine.stats().cached_tokens >= 5 * 96
    finally:
        await engine.stop()


def test_a_step_takes_what_was_measured() -> None:
    def decode(n: int) -> float:
        return PACES["8b"].seconds(scratch_plan(n, n, 1000, 4))

    assert decode(32) == pytest.approx(5.35e-3, rel=0.01)  # of benchmarks/results/h200.md
    assert decode(256) == pytest.approx(12.9e-3, rel=0.01)
    assert PACES["8b"].slowed(3).seconds(scratch_plan(9, 9, 9, 1)) == pytest.approx(3 * decode(9))


def test_every_token_of_the_tokenizer_is_seen_in_a_stream(model: str) -> None:
    tokenizer = Tokenizer(model, 512)
    pieces = [tokenizer.token_bytes(token) for token in range(256, 1000)]
    assert all(piece.startswith(b" w") for piece in pieces)
    assert len(set(pieces)) == len(pieces)


async def test_streams_are_kept_busy(model: str) -> None:
    engine = await started(model)
    try:
        begin = now()
        seen = await keep(EngineTarget(engine), Chats(4, 20, 10, 1000), begin, begin + 0.5)
        stats = engine.stats()
    finally:
        await engine.stop()
    whole = [one for one in seen if one.complete]
    assert {one.error for one in seen if not one.complete} <= {"stopped"}
    assert len(whole) > 8 and {one.output for one in seen[4:]} <= set(range(5, 16))
    assert {one.output for one in seen[:4]} <= set(range(1, 16))  # from within an answer
    assert stats.finished.get("abort", 0) <= 4


async def test_a_replica_runs_its_engine_alone_and_tells_of_its_steps(model: str) -> None:
    replica: Any = MeasuredReplica.__new__(MeasuredReplica)
    config = EngineConfig(model=model, num_blocks=200, max_tokens_per_step=256)
    replica._engine, replica._name = EngineProcess(config, partial(LonePacedEngine, pace=FAST)), "b"
    await replica._engine.start()
    try:
        chats, begin = Chats(8, 20, 10, 1000), now() + 1  # before it begins, garbage is collected
        assert await replica.bare(["a"], chats, begin, 0.1, 1) is None
        found = await replica.bare(["a", "b"], chats, begin, 0.1, 1)
        assert found["output_tokens_per_s"] > 0 and found["failed"] == 0
        assert 1 <= found["steps"]["requests"] <= 4  # half of the streams are another's
        assert found["steps"]["step_ms_p99"] >= found["steps"]["step_ms_p50"] > 0
        assert await replica.steps(begin - 3, begin - 1) is None
    finally:
        await replica._engine.stop()


def test_what_hangs_holds_nobody_up() -> None:
    assert in_time(lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0, 5)
    forever = threading.Event()
    with pytest.raises(TimeoutError):
        in_time(forever.wait, 0.01)
    forever.set()


async def test_phases_that_fail_or_hang_are_told_and_end_no_other(model: str, tmp_path: Path) -> None:
    async def ask(question: str) -> list[Any]:
        return []

    fleet: Any = types.SimpleNamespace(settings=types.SimpleNamespace(model=model), ask=ask)
    out = tmp_path / "out.jsonl"
    args: Any = types.SimpleNamespace(
        replicas=[2], routers=1, ingress="direct", paced=None, device="none", version="", out=out
    )
    clients: Any = None
    ran = []

    async def fails() -> None:
        raise ValueError("this one")

    async def hangs() -> None:
        await asyncio.get_running_loop().create_future()

    async def runs() -> None:
        ran.append(1)

    phases = Phases(args, "8b", fleet, clients, now() + 60)
    await phases.phase("fails", 0.1, fails)
    phases.ends = now() + 0.5
    await phases.phase("hangs", 0.1, hangs)  # until the end of all
    await phases.phase("too late", 0.1, runs)
    phases.ends = now() + 60
    await phases.phase("runs", 0.1, runs)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["fails", "hangs"] and ran == [1]
    assert "this one" in lines[0]["error"] and "Timeout" in lines[1]["error"]


def test_the_page_tells_gpus_costs_deaths_and_errors() -> None:
    common = {"shape": "8b", "engine": "GPU", "pace": None, "device": "2 x G", "cores": 32, "date": "d"}
    common |= {"version": "v", "ingress": "direct", "router_replicas": 8, "replicas": 2}
    each = {"replica": "r1", "gpus_seen": ["u1"], "cuda_visible_devices": "0", "cores": [0, 1]}
    quiet = {"itl_ms_p99": 15.0}
    lines: list[dict[str, Any]] = [
        {"phase": "about", "start_s": 61.0, "command": "go", "note": "no more", "each": [each]},
        {"phase": "bare", "replicas": 1, "output_tokens_per_s": 20_000.0, "failed": 0},
        {
            "phase": "http",
            "output_tokens_per_s": 39_000.0,
            "scaling": 1.97,
            "http_cost": 0.025,
            "cpu": {"router": {"n": 8, "all": 2.0, "most": 0.3}},
            "cpu_us_per_token": {"router": 51.0},
            "gpu_utilization": [
                'ray_stepahead_gpu_utilization{replica="r1"} 0.99',
                'ray_stepahead_gpu_utilization{replica="r2"} 0.97',
                'ray_node_gpus_utilization{GpuIndex="0"} 99.0',
            ],
        },
        {
            "phase": "kill", "streams": 256, "failed": 0, "requests": 900, "alive_at_death": 128,
            "stall_ms_p50": 200.0, "stall_ms_max": 400.0, "before": quiet, "after": quiet, "recovery_s": 41.0,
        },
        {"phase": "flame", "error": "no py-spy"},
    ]  # fmt: skip
    lines[0]["each"][0]["cores_near_gpu"] = [0, 1]
    page = make([common | line for line in lines])
    assert "**no more**" in page and "`go`, up after 61 s on 32 cores" in page
    assert "r1 sees u1 (CUDA_VISIBLE_DEVICES 0), runs on 2 cores, near its GPU: 2" in page
    assert "| 39,000 | 1.97 | 2.5% |" in page and "| 99%, 97% | router 2.00 (most 0.30) |" in page
    assert "| 20,000 | 51 | 2.0 |" in page  # Routers: 2 engines' tokens at 51 µs each
    assert "0 of 900 requests failed" in page and "after 41.0 s" in page and "no py-spy" in page
    assert "No GPU" not in page


def test_figures_of_a_window() -> None:
    def one(times: list[float], tokens: int, error: str | None = None) -> Seen:
        return Seen("", 5, 4, times[0] - 1, times[0] - 1, times, tokens, 0, times[-1], error)

    seen = [
        one([1.0, 2.0, 3.0, 4.0], 4),  # two in the window
        one([2.0, 3.0], 4),  # two tokens each time: four
        one([2.5, 9.0], 0, "stopped"),  # cut off: as many tokens each time as in the mean of the others, 8/6
        one([3.9, 3.9, 3.9, 3.9], 0, "cut off: x"),
    ]
    found = window(seen, 1.5, 3.5)
    assert found["output_tokens_per_s"] == pytest.approx((2 + 4 + 8 / 6) / 2)
    assert found["failed"] == 1 and found["errors"] == ["cut off: x"]
    assert found["requests"] == 2  # due in the window
    assert found["itl_ms_p50"] == pytest.approx(1000)


def test_clients_share_what_there_is() -> None:
    chats = Chats(10, 5, 8, 100, seed=2)
    shares = [chats.share(i, 4) for i in range(4)]
    assert sum(share.streams for share in shares) == 10
    assert len({share.seed for share in shares}) == 4


async def test_clients_are_processes_that_run_at_once() -> None:
    with Clients(2) as clients:
        await clients.start()
        begin = now() + 0.1
        seen = await clients.keep("http://127.0.0.1:9", "m", Chats(4, 3, 4, 100), begin, begin + 0.2)
    assert len(seen) >= 4
    assert {str(one.error)[:13] for one in seen} == {"no connection"}
    assert all(begin <= one.due for one in seen)


@pytest.mark.parametrize("tokens", [True, False])
async def test_choices_follow_the_file(tokens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL, str(tmp_path / "steering"))
    names = ["a", "b", "c"]
    replicas: Any = [
        types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id=name)) for name in names
    ]
    router: Any = SteeredRouter.__new__(SteeredRouter)
    router._deployment_id = DeploymentID("engines", f"test-{tokens}")
    router.initialize_state()
    router._balancer.set_replicas(names)
    router._by_name = dict(zip(names, replicas, strict=True))

    async def chosen(request: int, avoid: tuple[str, ...] = ()) -> str:
        address = Address("r", "h", 1, b"")
        submission = Submission("m", address, request, 0, [request] * 64, SamplingParams(), avoid=avoid)
        pending = PendingRequest([submission], {}, None)  # type: ignore[arg-type]
        ranks = await router.choose_replicas(replicas, pending)
        return str(ranks[0][0].replica_id.unique_id)

    Steering(replicas=1, tokens=tokens).apply()
    assert {await chosen(i) for i in range(20)} == {"a"}
    Steering(replicas=2, tokens=tokens).apply()
    assert {await chosen(i) for i in range(20, 60)} == {"a", "b"}
    assert {await chosen(i, ("a",)) for i in range(60, 80)} == {"b"}
    Steering(tokens=tokens).apply()
    assert {await chosen(i) for i in range(80, 160)} == {"a", "b", "c"}
