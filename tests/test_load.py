"""What a replica says of itself, read off an engine at moments that the test chooses."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.load import Load, LoadMeter
from engine.stats import EngineStats


class Meter:
    """A meter on an engine and a clock that stand still unless told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("deployments.load.time.monotonic", lambda: self.now)
        self.stats: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 0)
        self._meter = LoadMeter(lambda: EngineStats(**self.stats | {"finished": {}}))

    def after(self, seconds: float, anew: bool = False, **stats: int) -> Load:
        self.now += seconds
        self.stats.update(stats)
        return self._meter.read(anew)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(monkeypatch)


def test_it_tells_what_is_left_and_what_is_free(meter: Meter) -> None:
    read = meter.after(
        0, prefill_tokens=7, running=2, waiting=1, blocks_free=5, blocks_cached=3, blocks_owned=9
    )
    assert read == Load(prefill_tokens=7, running=2, waiting=1, free_blocks=8, tokens_per_s=0)


def test_speed_counts_prompt_and_output_tokens(meter: Meter) -> None:
    meter.after(0, running=1)
    assert meter.after(1, prompt_tokens=90, output_tokens=10).tokens_per_s == 100


def test_idle_time_does_not_slow_it(meter: Meter) -> None:
    meter.after(0, running=1)
    meter.after(1, output_tokens=100, running=0)
    meter.after(3600, running=1)
    assert meter.after(1, output_tokens=200).tokens_per_s == pytest.approx(100)


def test_a_change_is_known_to_two_thirds_after_two_seconds_however_often_it_is_read(meter: Meter) -> None:
    meter.after(0, running=1)
    meter.after(1, output_tokens=100)
    for n in range(1, 401):
        read = meter.after(0.005, output_tokens=100 + n)  # 200 a second from here on
    assert 160 < read.tokens_per_s < 167


def test_steps_that_follow_at_once_are_one_measurement(meter: Meter) -> None:
    meter.after(0, running=1)
    meter.after(1, output_tokens=100)
    assert meter.after(0.0, output_tokens=132).tokens_per_s == 100  # no division by nothing
    assert meter.after(0.001, output_tokens=164).tokens_per_s == 100


def test_the_frames_of_one_step_share_a_reading(meter: Meter) -> None:
    assert meter.after(0, running=1).running == 1
    assert meter.after(0.003, running=2).running == 1
    assert meter.after(0.003, running=2).running == 2
    assert meter.after(0, running=0).running == 2
    assert meter.after(0, anew=True).running == 0
