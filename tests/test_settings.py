"""The `args` of serve_config.yaml: what is wrong is named, what is left out follows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.settings import Settings, engine_limit, router_limit

ROOT = Path(__file__).parents[1]


def test_the_file_in_the_repository_is_right() -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    [application] = config["applications"]
    assert Settings.model_validate(application["args"]).model == "demo"


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({"modle": "demo"}, "modle"),
        ({"model": ""}, "model"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "two"}, "replicas"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"accelerator": "tpu"}, "accelerator"),
        ({"engine": {"max_runing_requests": 3}}, "max_runing_requests"),
        ({"engine": {"block_size": 7}}, "block_size"),
        ({"engine": {"cpu_cache_gib": float("inf")}}, "cpu_cache_gib"),
        ({"engine": {"max_waiting_requests": 3_000_000_000}}, "max_waiting_requests"),
        ({"engine": {"cpu_threads": 10**11}}, "cpu_threads"),
        ({"autoscaling": {"hold_s": float("inf")}}, "autoscaling.hold_s"),
        ({"replicas": 10**9}, "replicas"),
        ({"engine": {"model": "demo"}}, "engine.model"),
        ({"engine": {"device": "cpu"}}, "engine.device"),
    ],
)
def test_a_wrong_key_is_named(args: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(args).engine_config(gpu=False)
    assert name in str(caught.value)


def test_defaults_suit_the_accelerator_and_give_way() -> None:
    settings = Settings.model_validate({"model": "m", "engine": {"max_tokens_per_step": 100}})
    cpu, gpu = settings.engine_config(gpu=False), Settings().engine_config(gpu=True)
    assert (cpu.model, cpu.device, gpu.device) == ("m", "cpu", "cuda")
    assert cpu.max_running_requests < gpu.max_running_requests
    assert cpu.max_tokens_per_step == 100


def test_settings_that_only_clash_on_one_accelerator_are_refused_there() -> None:
    settings = Settings.model_validate({"engine": {"max_running_requests": 1000}})
    assert settings.engine_config(gpu=True).max_running_requests == 1000
    with pytest.raises(ValidationError, match="max_tokens_per_step"):
        settings.engine_config(gpu=False)


def test_ray_serve_never_holds_back_what_the_engine_takes() -> None:
    settings = Settings(replicas=2, max_replicas=3)
    engine = settings.engine_config(gpu=True)
    assert engine_limit(engine) > engine.max_running_requests + engine.max_waiting_requests
    assert router_limit(settings, engine) == 3 * engine_limit(engine)


@pytest.mark.slow
def test_serve_run_names_a_wrong_key() -> None:
    serve = Path(sys.executable).with_name("serve")
    run = subprocess.run(
        [serve, "run", "deployments.app:build", "modle=demo"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "modle" in run.stderr
