"""`scripts/serve.py`, as far as it needs no cluster; with one: tests/test_app.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.ports import free_port
from scripts import serve

ROOT = Path(__file__).parents[1]
APPLICATION = "applications: [{name: a, import_path: deployments.app:build, args: {any: thing}}]"


def test_the_configuration_that_comes_with_it_has_no_faults() -> None:
    assert serve.faults(yaml.safe_load((ROOT / "serve_config.yaml").read_text())) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no settings"),
        ("[a, b]", "there are no settings"),
        ("applications:", "applications: "),
        ("applications: [1]", "applications.0: "),
        (f"http_options: {{prt: 1}}\n{APPLICATION}", "http_options.prt"),
        (f"http_options: {{port: abc}}\n{APPLICATION}", "http_options.port: "),
        (f"http_options: {{port: 70000}}\n{APPLICATION}", "no port 70000"),
        (APPLICATION.replace("args:", "deployments: [null], args:"), "Error"),
        (f"htp_options: {{}}\n{APPLICATION}", "htp_options"),
        (APPLICATION.replace("name:", "nme:"), "applications[0].nme"),
        (f"logging_config: {{log_levl: DEBUG}}\n{APPLICATION}", "logging_config.log_levl"),
        (
            APPLICATION.replace("args:", "deployments: [{name: b, num_replica: 2}], args:"),
            "applications[0].deployments[0].num_replica",
        ),
    ],
)
def test_a_wrong_setting_is_named(text: str, said: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    with pytest.raises(SystemExit) as ended:
        serve.main(str(config))
    assert str(config) in str(ended.value) and said in str(ended.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit, match=r"config.yaml: .*decode"):
        serve.main(str(config))


def test_what_a_configuration_names_is_found_where_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(serve, "cli", lambda args: reached.append(args))
    (tmp_path / "my_policies.py").write_text("def policy(context):\n    return 1, {}\n")
    policy = "policy: {policy_function: 'my_policies:policy'}"
    config = APPLICATION.replace(
        "args:", f"deployments: [{{name: b, autoscaling_config: {{{policy}}}}}], args:"
    )
    monkeypatch.delenv("RAY_worker_niceness")
    reached: list[list[str]] = []
    (tmp_path / "config.yaml").write_text(f"http_options: {{port: '{free_port()}'}}\n{config}")
    serve.main("config.yaml")
    assert reached == [["run", "config.yaml"]]
    assert os.environ["RAY_worker_niceness"] == "0"  # read by the Ray that it starts


@pytest.mark.parametrize(
    "text",
    [
        APPLICATION,
        f"http_options: {{host: 0.0.0.0, port: 9000}}\n{APPLICATION}",
        APPLICATION.replace(
            "args:",
            "deployments: [{name: b, user_config: {any: thing}, ray_actor_options: {num_cpus: 1},"
            " autoscaling_config: {min_replicas: 1}}], runtime_env: {env_vars: {A: b}}, args:",
        ),
    ],
)
def test_what_ray_serve_knows_is_taken(text: str) -> None:
    assert serve.faults(yaml.safe_load(text)) == []
