"""`stepahead timeline` on this machine's own engine; without Ray."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.__main__ import app
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[1]


def test_it_draws_both_runs_and_writes_traces(tmp_path: Path) -> None:
    picture, trace, profile = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "p.json"
    options = [
        "--model",
        tiny_model("llama")[1],
        "--requests",
        3,
        "--prompt",
        5,
        "--steps",
        20,
        "--svg",
        picture,
    ]
    options += ["--trace", trace, "--profile", 4, "--profile-out", profile, "--json"]
    done = CliRunner().invoke(app, ["timeline", *map(str, options)], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.output.count("  GPU ") == 2
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures) == ["overlap off", "overlap on"]
    for report in figures.values():
        assert report["steps"] == 20
        assert 0 < report["active_ratio"] <= 1
    assert figures["overlap on"]["overlap_ratio"] > figures["overlap off"]["overlap_ratio"]
    ET.parse(picture)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == set(figures)
    assert sum(event.get("cat") == "compute" for event in events) == 40
    ranges = {
        e["name"] for e in json.loads(profile.read_text())["traceEvents"] if e.get("cat") == "user_annotation"
    }
    assert {"schedule", "launch", "collect", "commit"} <= ranges


def test_it_needs_no_ray() -> None:
    code = "import sys, deployments.__main__\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modules = set(loaded.stdout.split())
    assert "engine.engine" in modules
    assert not modules & {"ray", "fastapi"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shape", "70b"], "8b, 0.6b, tiny"),
        (["--model", "/nowhere"], "'/nowhere'"),
        (["--shape", "tiny", "--svg", "/nowhere/a.svg"], "no folder /nowhere"),
        (["--shape", "tiny", "--steps", "2049"], "2048"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["timeline", *options])
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(("folder", "said"), [(ROOT, "one of 8b, 0.6b, tiny"), (None, "run it in one")])
def test_shapes_are_found_where_the_command_runs(
    folder: Path | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the installed command is: its own folder is on Python's path, and the one it runs in is not."""
    for name in [each for each in sys.modules if each.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if Path(each or ".").resolve() != ROOT])
    monkeypatch.chdir(folder or tmp_path)
    done = CliRunner().invoke(app, ["timeline", "--shape", "8x"])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
