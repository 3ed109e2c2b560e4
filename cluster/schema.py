"""Strict validation of custom resources: defaults applied, unknown fields refused.

Kubernetes itself drops an unknown field of a custom resource without a word, so a misspelt one would
only show by what does not happen.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

Schema = dict[str, Any]

OBJECT: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 63},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
"""`metadata`, which custom resource definitions leave to Kubernetes."""


class Schemas:
    """The schemas of a folder of custom resource definitions."""

    def __init__(self, folder: Path) -> None:
        self._schemas: dict[tuple[str, str], Schema] = {}
        for path in sorted(folder.glob("*.yaml")):
            for definition in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader):
                spec = definition["spec"]
                for version in spec["versions"]:
                    api = f"{spec['group']}/{version['name']}"
                    schema = version["schema"]["openAPIV3Schema"]
                    schema["properties"]["metadata"] = OBJECT
                    self._schemas[api, spec["names"]["kind"]] = _closed(schema)

    def __contains__(self, resource: dict[str, Any]) -> bool:
        return (resource["apiVersion"], resource["kind"]) in self._schemas

    def errors(self, resource: dict[str, Any]) -> list[str]:
        """What is wrong with a custom resource, each with its path; empty if nothing is.

        Raises `KeyError` for a kind that the folder does not have.
        """
        schema = self._schemas[resource["apiVersion"], resource["kind"]]
        found = Draft202012Validator(schema).iter_errors(self.with_defaults(resource))
        return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]

    def with_defaults(self, resource: dict[str, Any]) -> dict[str, Any]:
        """A copy, completed as Kubernetes would before it validates."""
        whole = copy.deepcopy(resource)
        _complete(whole, self._schemas[resource["apiVersion"], resource["kind"]])
        return whole


def _complete(value: Any, schema: Schema) -> None:
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if "default" in inner and name not in value:
                value[name] = copy.deepcopy(inner["default"])
            if name in value:
                _complete(value[name], inner)
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            for each in value.values():
                _complete(each, others)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for each in value:
            _complete(each, schema["items"])


def _closed(schema: Schema) -> Schema:
    """JSON Schema of a structural one: an object has the fields that are named, unless it says otherwise."""
    if schema.get("x-kubernetes-int-or-string"):
        return schema | {"type": ["integer", "string"]}
    closed = dict(schema)
    if "properties" in schema:
        closed["properties"] = {name: _closed(inner) for name, inner in schema["properties"].items()}
    if isinstance(schema.get("items"), dict):
        closed["items"] = _closed(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        closed["additionalProperties"] = _closed(schema["additionalProperties"])
    elif schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed
