"""What the dashboards are made of: Grafana's schema, the table of metrics, and files that fit."""

from __future__ import annotations

import itertools
import json
import re
import sys
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models

from dashboards import promql, slo
from dashboards.__main__ import app, main
from dashboards.alerts import ALERTS
from dashboards.export import DASHBOARDS
from dashboards.promql import share_within
from engine.metrics import METRICS, SERVE_LABELS, TIME_TO_FIRST_TOKEN
from tests.panel_queries import queries

RAY = {value for value in vars(promql).values() if isinstance(value, str) and value.startswith("ray_")}
boards = pytest.mark.parametrize("name", DASHBOARDS)


@boards
def test_it_is_as_grafanas_schema_has_it(name: str) -> None:
    """Read by the types that are made from Grafana's schema, nothing is lost and nothing ill-typed."""
    made = DASHBOARDS[name]()
    register_default_plugins()
    read = models.Dashboard.from_json(made)
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == made
    assert ill_typed(read) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda board: board["panels"][1].update(title=3), "title"),
        (lambda board: board["panels"][1]["gridPos"].update(w="wide"), "w"),
        (lambda board: board["links"][0].update(type="ring"), "type_val"),
        (lambda board: board["templating"]["list"][0].update(hide="no"), "hide"),
        (lambda board: board["panels"][1]["targets"][0].update(expr=None), "expr"),
    ],
)
def test_what_is_ill_typed_is_found(change: Any, named: str) -> None:
    board = DASHBOARDS["fleet"]()
    change(board)
    register_default_plugins()
    [found] = ill_typed(models.Dashboard.from_json(board))
    assert found.endswith(f".{named}")


def ill_typed(value: Any, where: str = "dashboard") -> list[str]:
    """Attributes of the SDK's objects, all the way down, that are not of the type which they declare."""
    if isinstance(value, list):
        return [error for i, each in enumerate(value) for error in ill_typed(each, f"{where}[{i}]")]
    if not type(value).__module__.startswith("grafana_foundation_sdk.") or isinstance(value, Enum):
        return []
    hints = typing.get_type_hints(type(value))
    errors = []
    for name, own in vars(value).items():
        if fits(own, hints[name]):
            errors += ill_typed(own, f"{where}.{name}")
        else:
            errors.append(f"{where}.{name}")
    return errors


def fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return True
    if origin is typing.Union:
        return any(fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(fits(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(each, arguments[1]) for each in value.values())
    if isinstance(hint, type) and issubclass(hint, Enum):  # which from_json leaves as they are in JSON
        return value in [each.value for each in hint]
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)


@boards
def test_panels_have_their_own_id_and_place(name: str) -> None:
    panels = DASHBOARDS[name]()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in panels]
    for a, b in itertools.combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    assert all(place["x"] + place["w"] <= 24 for place in places)


@boards
def test_variables_and_links(name: str) -> None:
    board = DASHBOARDS[name]()
    assert board["uid"] == f"stepahead-{name}"
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", *SERVE_LABELS, "ray"]
    assert {"${ray}/#/serve", "${ray}/#/cluster"} <= {link.get("url") for link in board["links"]}


def test_names_are_those_of_the_table() -> None:
    """Each metric of ours is shown somewhere, and nothing is asked for that is in no table."""
    expressions = [query.expression for query in queries()] + [alert.expression for alert in ALERTS]
    asked = {name for each in expressions for name in re.findall(r"\bray_\w+", each)}
    asked = {re.sub(r"_(bucket|count|sum)$", "", name) if name not in RAY else name for name in asked}
    ours = {metric.exported for metric in METRICS.values()}
    assert asked - RAY - ours == set()
    assert RAY - asked == set()
    assert ours - asked == set(), "no panel and no alert looks at these"


def test_labels_are_those_of_the_table() -> None:
    for query in queries():
        for name, labels in re.findall(r"\b(ray_stepahead_\w+)\{([^}]*)\}", query.expression):
            metric = METRICS[re.sub(r"_(bucket|count|sum)$", "", name).removeprefix("ray_")]
            asked = set(re.findall(r"(\w+)(?:=~|!=|=)", labels))
            assert asked <= {*metric.all_labels, "le"}, query.title


def test_the_promise_has_a_bucket() -> None:
    assert slo.TTFT_SECONDS in TIME_TO_FIRST_TOKEN.buckets
    with pytest.raises(ValueError, match="is no bucket of stepahead_time_to_first_token"):
        share_within(1.1, TIME_TO_FIRST_TOKEN)


def test_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dashboards", "export", "--out", str(tmp_path / "new" / "folder")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    files = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    assert files.keys() == {f"stepahead-{name}.json" for name in DASHBOARDS} | {"alerts.yml"}
    for name, make in DASHBOARDS.items():
        assert json.loads(files[f"stepahead-{name}.json"]) == make()
        # `kubectl apply` keeps the object once more in an annotation, of 256 KiB at most.
        assert len(files[f"stepahead-{name}.json"]) < 200_000
    rules = yaml.safe_load(files["alerts.yml"])["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]


def test_export_says_where_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "folder"):
        monkeypatch.setattr(sys, "argv", ["dashboards", "export", "--out", str(out)])
        with pytest.raises(SystemExit, match=str(out)):
            main()


def test_the_guide_names_what_is_there() -> None:
    """Links lead to files, each alert is listed, and options of `python -m dashboards` exist."""
    guide = Path(__file__).parents[1] / "docs" / "monitoring.md"
    text = guide.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (guide.parent / link).exists()] == []
    listed = re.findall(r"^\| `(Stepahead\w+)` \| .* \| (.*) \| (\w+) \|$", text, re.M)
    lasting = {"0m": "at once"}
    assert listed == [(a.name, lasting.get(a.lasting, a.lasting), a.severity) for a in ALERTS]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    used = re.findall(r"python -m dashboards ([\w-]+)((?:[^\n`]|\\\n)*)", text.replace("\\\n", " "))
    assert {name for name, _ in used} == {"apply", "export"}
    for name, arguments in used:
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", arguments)) <= options, name
