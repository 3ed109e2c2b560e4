"""The picture shows what was recorded, in proportion."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest

from engine.drawing import STEPS, Panel, svg, terminal
from engine.overlap import overlap_report
from tests.test_overlap import COMPUTE, DOWNLOAD, WORK, asynchronous, synchronous

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def panels() -> list[Panel]:
    runs = [("overlap off", synchronous(20)), ("overlap <on>", asynchronous(20))]
    return [Panel(title, recording, overlap_report(recording)) for title, recording in runs]


def test_a_terminal_shows_the_shares_of_time(panels: list[Panel]) -> None:
    width = 200
    lines = terminal(panels, width).splitlines()
    rows = {name: [line[6:] for line in lines if line.startswith(f"  {name} ")] for name in ("CPU", "GPU")}
    assert all(len(row) == width for both in rows.values() for row in both)
    period = WORK + COMPUTE + DOWNLOAD
    off, on = (sum(sign in "█▒" for sign in row) / width for row in rows["GPU"])
    assert off == pytest.approx(COMPUTE / period, abs=0.03)
    assert on == 1
    for row in rows["CPU"]:
        assert set(row) <= {"p", "l", "·"}
    busy = sum(sign != "·" for sign in rows["CPU"][0]) / width
    assert busy == pytest.approx(WORK / period, abs=0.03)
    overlapping = [cpu != "·" and gpu != "·" for cpu, gpu in zip(rows["CPU"][0], rows["GPU"][0], strict=True)]
    assert sum(overlapping) <= STEPS + 1, "at the edges of a step at most"
    assert "12.50 ms a step, GPU active 80.0%" in lines[0]


def test_an_svg_has_every_bar_where_it_was(panels: list[Panel]) -> None:
    root = ET.fromstring(svg(panels, "two & more"))
    assert root.findtext(f"{SVG}title") == "two & more"
    bars = [each for each in root.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    computes = [each for each in bars if float(each.get("width", 0)) > 60]
    scale = float(computes[1].get("width", 0)) / COMPUTE
    for panel, top in zip(panels, (0, 158), strict=True):
        drawn = [each for each in computes if top < float(each.get("y", 0)) < top + 158]
        begins = [float(each.get("x", 0)) for each in drawn[1:-1]]
        for a, b in itertools.pairwise(begins):
            assert b - a == pytest.approx(panel.step_seconds * scale, rel=1e-3)
    right = max(float(each.get("x", 0)) + float(each.get("width", 0)) for each in bars)
    assert right <= 1000
    fills = {each.get("fill") for each in bars}
    assert {"var(--even)", "var(--odd)", "var(--launch)"} <= fills


def test_a_run_of_one_step_can_be_drawn() -> None:
    recording = synchronous(1)
    panel = Panel("one", recording, overlap_report(recording))
    assert "█" in terminal([panel])
    ET.fromstring(svg([panel], "one"))
