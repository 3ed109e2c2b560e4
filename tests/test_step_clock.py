"""Steps are timed on real lanes, in order, without anybody waiting for it."""

from __future__ import annotations

import time

import pytest
import torch

from engine.lanes import ThreadEvent, make_lanes
from engine.plan import scratch_plan
from engine.step_clock import StepClock
from tests.toy_pipeline import Pipeline


def test_the_times_of_a_step_add_up_to_what_the_worker_saw() -> None:
    lanes = make_lanes(torch.device("cpu"))
    clock, seen, timings = StepClock(lanes, depth=2), [], []
    taken = []

    def work() -> None:
        torch.ones(300, 300) @ torch.ones(300, 300)

    for _ in range(4):  # two at once, as the pipeline has them
        marks = clock.take()
        lanes.h2d.record(marks.uploaded)
        lanes.compute.wait(marks.uploaded)
        lanes.compute.record(marks.begin)
        lanes.compute.run(lambda: seen.append(time.perf_counter()))
        lanes.compute.run(work)
        lanes.compute.run(lambda: seen.append(time.perf_counter()))
        lanes.compute.record(marks.end)
        lanes.d2h.wait(marks.end)
        lanes.d2h.record(marks.downloaded)
        taken.append(marks)
        if len(taken) == 2:
            marks = taken.pop(0)
            marks.downloaded.synchronize()
            timings.append(clock.read(marks, prepared=0.0))
    lanes.close()
    for i, timing in enumerate(timings):
        begin, end = seen[2 * i], seen[2 * i + 1]
        assert timing.compute >= end - begin
        assert timing.ready >= 0
        assert timing.download >= 0
        if i:
            assert 0 <= timing.gap <= begin - seen[2 * i - 1]
    assert timings[0].gap == 0, "there is no step before the first"
    whole = sum(t.gap + t.compute for t in timings)
    assert whole >= seen[2 * len(timings) - 1] - seen[0]


def test_every_step_of_a_runner_is_timed() -> None:
    pipeline = Pipeline(make_lanes(torch.device("cpu")))
    before = time.perf_counter()
    for step in range(5):
        pipeline.runner.launch(scratch_plan(2, 1, 2, 1))
        timing = pipeline.runner.collect().timing
        assert timing is not None
        assert before < timing.prepared < time.perf_counter()
        assert timing.compute > 0
        assert (timing.gap > 0) == (step > 0)
        before = timing.prepared
    pipeline.runner.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_times_its_own_work() -> None:
    device = torch.device("cuda")
    lanes = make_lanes(device)
    clock, x = StepClock(lanes, depth=1), torch.ones(4096, 4096, device=device)
    torch.cuda.synchronize()
    timings = []
    for n in (1, 20):
        marks = clock.take()
        lanes.h2d.record(marks.uploaded)
        lanes.compute.wait(marks.uploaded)
        lanes.compute.record(marks.begin)
        for _ in range(n):
            lanes.compute.run(lambda: x.mul_(1))  # type: ignore[arg-type]
        lanes.compute.record(marks.end)
        lanes.d2h.wait(marks.end)
        lanes.d2h.record(marks.downloaded)
        marks.downloaded.synchronize()
        timings.append(clock.read(marks, prepared=0.0))
    lanes.close()
    assert timings[1].compute > timings[0].compute > 0
    assert timings[1].gap > 0
    assert not isinstance(marks.begin, ThreadEvent)
