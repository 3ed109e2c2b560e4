"""The shape of the project: who may import whom, and the names that others build on."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["engine", "deployments", "cluster", "dashboards"]

PUBLIC_NAMES = {
    "engine.config": {"EngineConfig", "Positive"},
    "engine.engine": {"AsyncEngine", "Command", "Sink"},
    "engine.request": {
        "EngineUnavailable",
        "FinishReason",
        "Logprobs",
        "MAX_BIASES",
        "MAX_LOGPROBS",
        "Output",
        "QueueFull",
        "Request",
        "RequestError",
        "SamplingParams",
        "State",
    },
    "engine.plan": {
        "SCRATCH_BLOCK",
        "SCRATCH_ROW",
        "History",
        "Scores",
        "SEQUENCE",
        "TOKEN",
        "StepPlan",
        "StepResult",
        "StepTiming",
        "scratch_plan",
    },
}


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def contracts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = settings()["tool"]["importlinter"]["contracts"]
    return found


HOST_HALF: list[str] = contracts()[0]["source_modules"]
DEVICE_HALF: list[str] = contracts()[1]["source_modules"]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    lint = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([lint, "--no-cache", "--no-logo"], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def path_of(module: str, folder: Path) -> Path:
    package = folder / module.replace(".", "/")
    return package / "__init__.py" if package.is_dir() else package.with_suffix(".py")


def test_contracts_hold_in_an_unchanged_copy(copy: Path) -> None:
    done = lint_imports(copy)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("contract", contracts(), ids=lambda contract: contract["name"])
def test_a_forbidden_import_breaks_its_contract(contract: dict[str, Any], copy: Path) -> None:
    """One of each kind, hidden in a function: what type checkers and reviewers pass over."""
    importer = contract["source_modules"][-1]
    imported = contract["forbidden_modules"][0]
    with path_of(importer, copy).open("a") as module:
        module.write(f"\n\ndef _late() -> None:\n    import {imported}\n")
    done = lint_imports(copy)
    assert done.returncode != 0
    assert f"{importer} -> {imported}" in done.stdout


def test_every_module_of_the_engine_belongs_to_a_half() -> None:
    modules = {
        f"engine.{path.stem}"
        for path in (ROOT / "engine").iterdir()
        if (path.is_dir() and (path / "__init__.py").exists()) or path.suffix == ".py"
    }
    assert modules - {"engine.__init__"} == {*HOST_HALF, *DEVICE_HALF, "engine.engine", "engine.worker"}
    assert not set(HOST_HALF) & set(DEVICE_HALF)


def test_the_host_half_runs_without_torch() -> None:
    """The contracts read the source; this also sees what third-party packages pull in."""
    code = f"import sys, {', '.join(HOST_HALF)}\nprint(*sorted(m.partition('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "engine" in loaded
    assert not loaded & {"torch", "transformers", "triton", "ray", "fastapi", "starlette"}


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names(module: str) -> None:
    """A name added, renamed or dropped here is a decision: others build on these."""
    names: set[str] = set()
    for node in ast.parse(path_of(module, ROOT).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    assert {name for name in names if not name.startswith("_")} - {"logger"} == PUBLIC_NAMES[module]


def test_files_stay_small() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > len(PACKAGES)
    long = {
        str(path.relative_to(ROOT)): n for path in paths if (n := len(path.read_text().splitlines())) >= 400
    }
    assert not long


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/decisions.md"])
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert page == "docs/decisions.md" or links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_guide_names_every_module() -> None:
    guide = (ROOT / "docs/architecture.md").read_text()
    files = [p for package in ("engine", "deployments") for p in (ROOT / package).glob("*.py")]
    missing = [path.name for path in files if path.stem != "__init__" and path.name not in guide]
    assert not missing
