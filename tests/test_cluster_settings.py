"""`python -m cluster`: what is wrong is named before anything is written, what is right is carried out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from cluster.__main__ import main
from cluster.memory import GPUS
from cluster.render import render
from cluster.settings import API_KEYS, Cluster
from cluster.shape import DEMO

ROOT = Path(__file__).parents[1]
MODELS = Path(__file__).parent / "shapes"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["cluster", *map(str, arguments)])
    main()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"overlay": "tpu"}, "overlay"),
        ({"modle": "demo"}, "modle"),
        ({"replicas": "8..1"}, "8..1"),
        ({"replicas": "0..1"}, "replicas"),
        ({"replicas": "many"}, "replicas"),
        ({"gpu": "H900"}, "H900"),
        ({"engine": {"block_sise": 16}}, "block_sise"),
        ({"engine": {"max_tokens_per_step": 4}}, "max_tokens_per_step"),
        ({"overlay": "gpu-ha", "replicas": "1..8", "routers": 2}, "gpu-ha"),
        ({"overlay": "gpu-ha", "replicas": "2..8", "routers": 1}, "gpu-ha"),
        ({"overlay": "cpu-demo", "replicas": "2"}, "cpu-demo"),
        ({"image": "registry.example.com/stepahead:v2"}, "image"),
        ({"image": "my image"}, "image"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Cluster.model_validate({"overlay": "gpu"} | given)
    assert name in str(caught.value)


def test_replicas_are_a_number_or_a_range() -> None:
    assert Cluster.model_validate({"overlay": "gpu", "replicas": "3"}).replicas == (3, 3)
    assert Cluster.model_validate({"overlay": "gpu", "replicas": "1..8"}).replicas == (1, 8)


def test_settings_become_those_of_the_application() -> None:
    args = Cluster.model_validate(
        {"overlay": "gpu", "model": "m", "replicas": "1..8", "routers": 3, "engine": {"block_size": 32}}
    ).args
    assert (args.model, args.accelerator, args.replicas, args.max_replicas, args.routers) == (
        *("m", "gpu"),
        *(1, 8, 3),
    )
    assert args.engine == {"block_size": 32}
    assert args.api_keys is None
    fixed = Cluster(overlay="cpu-demo", api_keys=True).args
    assert (fixed.max_replicas, fixed.accelerator, fixed.api_keys) == (None, "cpu", API_KEYS)


def test_render_writes_what_kubectl_applies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    model = MODELS / "Qwen3-8B"
    arguments = ["--overlay", "gpu", "--model", "Qwen/Qwen3-8B", "--config", model, "--replicas", "1..8"]
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "render", *arguments, "--out", out, "--engine", "prefix_caching=false")
    assert not ended.value.code
    assert f"kubectl apply -k {out}" in capsys.readouterr().out
    patch = yaml.safe_load((out / "overlays" / "gpu" / "application.yaml").read_text())
    values = {op["path"]: op["value"] for op in patch}
    args = yaml.safe_load(values["/spec/serveConfigV2"])["applications"][0]["args"]
    assert args["model"] == "Qwen/Qwen3-8B"
    assert args["engine"] == {"prefix_caching": False}
    memory = next(value for path, value in values.items() if path.endswith("limits/memory"))
    assert memory == "24Gi"  # 15.3 GiB of weights, rounded up, and 8
    [volume] = yaml.safe_load((out / "overlays" / "gpu" / "storage.yaml").read_text())
    assert volume["value"] == "32Gi"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--overlay", "gpu", "--model", MODELS / "Llama-3.1-70B"], "leaves no room"),
        (["--overlay", "gpu", "--engine", "blok_size=16"], "blok_size"),
        (["--overlay", "gpu", "--engine", "block_size"], "'block_size' is no KEY=VALUE"),
        (["--overlay", "gpu", "--replicas", "8..1"], "8..1"),
        (["--overlay", "gpu", "--model", "/nowhere/model"], "/nowhere/model"),
    ],
)
def test_render_writes_nothing_that_cannot_run(
    arguments: list[Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "render", *arguments, "--out", out)
    assert said in str(ended.value.code)
    assert not out.exists()


def test_render_spares_a_folder_of_others(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "precious.yaml").touch()
    for _ in range(2):
        with pytest.raises(ValueError, match="other files"):
            render(Cluster(overlay="gpu"), DEMO, tmp_path)
        assert (tmp_path / "base" / "precious.yaml").exists()
        (tmp_path / "kustomization.yaml").write_text("resources: [base]\n")  # a kustomize folder, not ours


def test_render_replaces_what_it_wrote(tmp_path: Path) -> None:
    render(Cluster(overlay="gpu"), DEMO, tmp_path)
    (tmp_path / "base" / "old.yaml").touch()
    render(Cluster(overlay="cpu-demo"), DEMO, tmp_path)
    assert [path.name for path in (tmp_path / "overlays").iterdir()] == ["cpu-demo"]
    assert not (tmp_path / "base" / "old.yaml").exists()


def test_dashboards_of_any_name_become_names_of_kubernetes(tmp_path: Path) -> None:
    board = tmp_path / "My_Board (1).json"
    board.write_text("{}")
    out = tmp_path / "out"
    render(Cluster(overlay="gpu"), DEMO, out, [board])
    maps = yaml.safe_load((out / "kustomization.yaml").read_text())["configMapGenerator"]
    assert (maps[-1]["name"], maps[-1]["files"]) == ("dashboard-my-board-1", ["dashboards/My_Board--1-.json"])
    assert (out / "dashboards" / "My_Board--1-.json").exists()


def test_size_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "size", "demo", "--gpu", "L4", "--context", "1000")
    assert capsys.readouterr().out.splitlines()[-1].startswith("| demo | L4 | 0.3 |")
    with pytest.raises(SystemExit, match="H900"):
        run(monkeypatch, "size", "demo", "--gpu", "H900")


def test_validate_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = {"type": "object", "properties": {"kind": {}, "apiVersion": {}, "size": {"type": "integer"}}}
    version = {"name": "v1", "schema": {"openAPIV3Schema": schema}}
    definition = {"spec": {"group": "x.io", "names": {"kind": "Thing"}, "versions": [version]}}
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "thing.yaml").write_text(json.dumps(definition))
    thing = {"apiVersion": "x.io/v1", "kind": "Thing", "metadata": {"name": "a"}, "size": 1}
    path = tmp_path / "things.yaml"
    path.write_text(json.dumps(thing))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "validate", path, "--schemas", tmp_path / "schemas")
    assert not ended.value.code
    assert "Thing a: valid" in capsys.readouterr().out
    path.write_text(json.dumps(thing | {"sise": 2}))
    with pytest.raises(SystemExit, match="sise"):
        run(monkeypatch, "validate", path, "--schemas", tmp_path / "schemas")
    path.write_text(json.dumps(thing | {"kind": "Thign"}))
    with pytest.raises(SystemExit, match="nothing was checked"):
        run(monkeypatch, "validate", path, "--schemas", tmp_path / "schemas")


def test_neither_ray_nor_torch_is_loaded_to_render() -> None:
    code = "import sys, cluster.__main__\nprint(*sorted(m.partition('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "cluster" in loaded
    assert not loaded & {"ray", "torch", "transformers", "fastapi"}


def test_gpus_are_in_mebibytes() -> None:
    assert all(10_000 < mib < 1_000_000 for mib in GPUS.values())
