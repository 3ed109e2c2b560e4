"""Lanes keep order, events order lanes, and a failure travels to whoever waits for it."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.lanes import ThreadEvent, make_lanes


def test_a_lane_runs_in_order_and_does_not_block_the_host() -> None:
    lanes = make_lanes(torch.device("cpu"))
    gate, seen, done = threading.Event(), [], lanes.new_event()
    lanes.compute.run(gate.wait)  # type: ignore[arg-type]
    for i in range(100):
        lanes.compute.run(lambda i=i: seen.append(i))  # type: ignore[misc]
    lanes.compute.record(done)
    assert not seen
    gate.set()
    done.synchronize()
    assert seen == list(range(100))
    lanes.close()


def test_waiting_lane_runs_after_the_recorded_point() -> None:
    lanes = make_lanes(torch.device("cpu"))
    gate, seen = threading.Event(), []
    uploaded, computed = lanes.new_event(), lanes.new_event()
    lanes.h2d.run(gate.wait)  # type: ignore[arg-type]
    lanes.h2d.run(lambda: seen.append("upload"))
    lanes.h2d.record(uploaded)
    lanes.compute.wait(uploaded)
    lanes.compute.run(lambda: seen.append("compute"))
    lanes.compute.record(computed)
    gate.set()
    computed.synchronize()
    assert seen == ["upload", "compute"]
    lanes.close()


def test_an_event_names_its_latest_record_and_blocks_nobody_before_the_first() -> None:
    lanes = make_lanes(torch.device("cpu"))
    event, gate, seen = lanes.new_event(), threading.Event(), []
    event.synchronize()
    lanes.h2d.record(event)
    lanes.compute.wait(event)  # the record above: not held up by the one below
    lanes.h2d.run(gate.wait)  # type: ignore[arg-type]
    lanes.h2d.record(event)
    passed = lanes.new_event()
    lanes.compute.run(lambda: seen.append("passed"))
    lanes.compute.record(passed)
    passed.synchronize()
    assert seen == ["passed"]
    gate.set()
    event.synchronize()
    lanes.close()


def test_a_failure_reaches_whoever_waits_and_later_work_is_skipped() -> None:
    lanes = make_lanes(torch.device("cpu"))
    seen: list[str] = []
    failed, later = lanes.new_event(), lanes.new_event()
    lanes.compute.run(lambda: [][0])
    lanes.compute.run(lambda: seen.append("after a failure"))
    lanes.compute.record(failed)
    lanes.d2h.wait(failed)
    lanes.d2h.run(lambda: seen.append("in the waiting lane"))
    lanes.d2h.record(later)
    for event in (failed, later):
        assert isinstance(event, ThreadEvent)
        with pytest.raises(IndexError):
            event.synchronize()
    assert not seen
    lanes.close()
