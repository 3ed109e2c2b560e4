"""What a replica exports is what its engine, its tapes and its GPU say, each thing once."""

from __future__ import annotations

import asyncio
from collections import namedtuple
from collections.abc import AsyncIterator, Callable
from typing import Any

import pynvml
import pytest
import torch

from deployments.exporter import RATES_OVER, SAMPLES, Exporter
from deployments.gpu import Gpu, GpuReading, own_gpu
from deployments.tape_meter import TapeMeter
from engine import metrics as m
from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.request import Request, SamplingParams
from engine.timeline import PHASES
from tests.memory_recorder import MemoryRecorder
from tests.tiny_models import tiny_model


async def started() -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(
        EngineConfig(
            model=str(tiny_model("llama")[1]),
            device="cpu",
            dtype="float32",
            max_running_requests=4,
            max_tokens_per_step=64,
            num_blocks=64,
            cpu_threads=1,
        )
    )
    await engine.start()
    yield engine
    await engine.stop()


async def generate(engine: AsyncEngine, name: str, tokens: int, prompt: list[int] | None = None) -> None:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    async for _ in engine.generate(Request(name, prompt or [3, 1, 4, 1, 5], sampling)):
        pass


class Card(Gpu):
    """A GPU whose readings a test sets."""

    def __init__(self, reading: GpuReading) -> None:
        self.uuid, self.name, self.mig, self.reading = "GPU-1", "a card", False, reading

    def read(self) -> GpuReading:
        return self.reading


async def test_an_engines_metrics_add_up() -> None:
    record, meter = MemoryRecorder(), TapeMeter()
    async for engine in started():
        exporter = Exporter(engine, record, "demo", None, meter)
        await exporter.export()
        prompt = list(range(1, 40))
        await asyncio.gather(generate(engine, "a", 9, prompt), generate(engine, "b", 5))
        await exporter.export()
        await generate(engine, "c", 6, prompt)  # finds the prefix of a
        await exporter.export()
        engine.submit(Request("d", prompt, SamplingParams(max_tokens=400)), lambda _: None)
        engine.abort("d", "tape_lost")
    await exporter.export()
    await exporter.export()  # of nothing new
    counters = {metric: dict(values) for metric, values in record.counters.items()}
    stats, totals = engine.stats(), engine.timeline.totals
    assert counters[m.OUTPUT_TOKENS] == {(): stats.output_tokens}
    assert stats.output_tokens >= 20
    assert counters[m.PREFIX_HIT_TOKENS] == {(): 32}
    assert counters[m.ADMITTED] == {(): 4}
    assert counters[m.FINISHED] == {("length",): 3, ("abort",): 1}
    assert counters[m.ABORTS] == {("tape_lost",): 1}
    assert sum(counters[m.STEPS].values()) == stats.steps
    assert counters[m.HOST_PHASE] == {(phase,): pytest.approx(totals.phases[phase]) for phase in PHASES}
    assert counters[m.ACTIVE_SECONDS][()] == pytest.approx(totals.active)
    assert counters[m.GAP_SECONDS][()] == pytest.approx(totals.gap)
    assert counters[m.CARRIED_TOKENS][()] == counters[m.DECODE_TOKENS][()] > 0
    blocks = record.gauges[m.KV_BLOCKS]
    assert set(blocks) == {("used",), ("cached",), ("free",)}
    assert sum(blocks.values()) == 63
    assert blocks["used",] == 0
    assert record.gauges[m.GPU_ACTIVE_RATIO][()] == 0, "it is idle, and says so"
    assert 0 < record.gauges[m.OVERLAP_RATIO][()] <= 1, "the last that is known"
    assert record.gauges[m.ENGINE_INFO].keys() == {("demo", "cpu", "false", "true", exporter._version)}
    assert len(record.histograms[m.STEP_COMPUTE]) == len(record.histograms[m.STEP_TOKENS]) == stats.steps
    assert len(record.histograms[m.STEP_GAP]) < stats.steps, "what follows idleness has none"
    assert sum(record.histograms[m.STEP_TOKENS]) == stats.prompt_tokens + totals.decodes
    assert len(record.histograms[m.QUEUE]) == 3, "d had left when it was its turn"
    of_engines = {metric for metric in m.METRICS.values() if metric.owner == "engine"}
    missing = of_engines - record.metrics
    assert missing == {each for each in of_engines if each.gpu_only} | {
        m.GPU_COST,
        m.TOKEN_COST,
        m.TAPE_ROUND_TRIP,
    }
    for _ in range(3 * SAMPLES):
        meter.sent("tape", 1, 1)
        meter.answered("tape")
    await exporter.export()
    assert len(record.histograms[m.TAPE_ROUND_TRIP]) == SAMPLES, "of very many, some stand for all"


async def test_energy_and_money_are_rates_over_a_minute() -> None:
    record, time = MemoryRecorder(), [1000.0]
    card = Card(GpuReading(utilization=0.5, memory_used=7, memory_total=9, power=300.0, energy=5e6))
    async for engine in started():
        exporter = Exporter(engine, record, "demo", card, TapeMeter(), 3.6, clock=lambda: time[0])
        await exporter.export()
        assert m.TOKENS_PER_JOULE not in record.gauges, "nothing is known yet"
        await generate(engine, "a", 20)
        time[0] += 10
        card.reading = GpuReading(0.25, 8, 9, 400.0, 5e6 + 4)
        await exporter.export()
        assert record.gauges[m.TOKENS_PER_JOULE][()] == pytest.approx(20 / 4)
        assert record.gauges[m.TOKEN_COST][()] == pytest.approx(3.6 / 360 / 20 * 1e6)
        time[0] += RATES_OVER
        card.reading = GpuReading(None, None, None, None, 5e6 + 5)
        await exporter.export()
        assert record.gauges[m.TOKENS_PER_JOULE][()] == 0
    assert record.counters[m.GPU_ENERGY][()] == pytest.approx(5)
    assert record.gauges[m.GPU_UTILIZATION][()] == 0.25
    assert record.gauges[m.GPU_MEMORY_USED][()] == 8
    assert record.gauges[m.GPU_COST][()] == 3.6


async def test_the_exporter_outlives_what_fails(caplog: pytest.LogCaptureFixture) -> None:
    asked = asyncio.Queue[int]()

    class Broken(Card):
        def read(self) -> GpuReading:
            loop.call_soon_threadsafe(asked.put_nowait, 1)
            raise RuntimeError("the card has fallen off the bus")

    loop = asyncio.get_running_loop()
    async for engine in started():
        exporter = Exporter(engine, MemoryRecorder(), "demo", Broken(None), TapeMeter())  # type: ignore[arg-type]
        task = asyncio.create_task(exporter.run())
        await asked.get()
        await asked.get()
        task.cancel()
    assert "has fallen off the bus" in caplog.text


def test_a_tape_meter_counts_and_times() -> None:
    meter = TapeMeter()
    meter.opened("a")
    meter.opened("b")
    assert (meter.open, meter.lag()) == (2, 0.0)
    meter.sent("a", 100, 3)
    meter.sent("b", 50, 1)
    assert meter.lag() > 0
    meter.answered("a")
    meter.answered("a")  # a word that answers no frame
    meter.closed("b")
    assert (meter.open, meter.lag()) == (1, 0.0)
    assert (meter.frames, meter.bytes, meter.records) == (2, 150, 4)
    assert len(meter.round_trips()) == 1
    assert meter.round_trips() == []


Rates = namedtuple("Rates", "gpu memory")
Memory = namedtuple("Memory", "total used")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Any], Any]]:
    """NVML's answers, as on an H200; a machine without a driver has no library to ask."""

    def unsupported(_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def handle(uuid: str) -> str:
        if uuid not in ("GPU-5", "MIG-7"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    answers: dict[str, Callable[[Any], Any]] = {
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetName": lambda _: "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda _: Memory(141 << 30, 70 << 30),
        "nvmlDeviceGetUtilizationRates": lambda _: Rates(83, 10),
        "nvmlDeviceGetPowerUsage": lambda _: 412_000,
        "nvmlDeviceGetTotalEnergyConsumption": unsupported,
    }
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return answers


def test_a_whole_gpu_is_found_by_its_uuid(nvml: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    gpu = own_gpu("5")
    assert gpu is not None
    assert (gpu.uuid, gpu.name, gpu.mig) == ("GPU-5", "NVIDIA H200", False)
    assert gpu.read() == GpuReading(0.83, 70 << 30, 141 << 30, 412.0, None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda _: 5_000)  # millijoules
    assert gpu.read().energy == 5.0


def test_of_a_mig_slice_only_the_memory_is_its_own(nvml: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    gpu = own_gpu("5")
    assert gpu is not None
    assert (gpu.uuid, gpu.mig) == ("MIG-7", True)
    assert gpu.read() == GpuReading(None, 70 << 30, 141 << 30, None, None)


def test_a_gpu_that_nvml_does_not_know_is_no_reason_to_fail(
    nvml: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert own_gpu("6") is None
    assert "GPU-6" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nvml_knows_the_gpu_that_cuda_uses() -> None:
    gpu = own_gpu(str(torch.cuda.get_device_properties(0).uuid))
    assert gpu is not None
    reading = gpu.read()
    assert reading.memory_total and reading.memory_used
    assert reading.memory_used < reading.memory_total
