"""`serve run CONFIG` that says when the application answers and what to try, or why it failed.

usage: scripts/serve.py [CONFIG] (serve_config.yaml by default)
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import ray
import yaml
from pydantic import BaseModel, ValidationError
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeDeploySchema
from ray.serve.scripts import cli

GRACE = 5.0
"""Seconds in which requests may end once the command is told to."""

QUESTION = "What is the capital of France?"


def reasons(name: str, application: ApplicationStatusOverview) -> str:
    parts = [application.message, *(deployment.message for deployment in application.deployments.values())]
    return f"{name} failed: " + "\n".join(part for part in parts if part)


def invitation(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}]})
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    return f"\n{model} answers at {url}/v1 (Ctrl-C ends it). In another terminal:\n\n{curl}\n"


def faults(content: Any) -> list[str]:
    """What Ray Serve would pass over without a word, or else say with a traceback."""
    if not isinstance(content, dict):
        return ["there are no settings in it"]
    if unknown := list(_unknown(content, ServeDeploySchema)):
        return [f"there is no setting {', '.join(unknown)}"]
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        return [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    except Exception as error:  # of what it imports, for one
        return [f"{type(error).__name__}: {error}"]
    return []


def _unknown(content: dict[str, Any], schema: type[BaseModel], path: str = "") -> Iterator[str]:
    for key, value in content.items():
        field = schema.model_fields.get(key)
        if field is None:
            yield f"{path}{key}"
            continue
        inner = {"": value} if isinstance(value, dict) else {}
        if isinstance(value, list):
            inner = {f"[{i}]": each for i, each in enumerate(value) if isinstance(each, dict)}
        for model in _models(field.annotation):
            for index, each in inner.items():
                yield from _unknown(each, model, f"{path}{key}{index}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Those that describe all that a value may hold: none where any dictionary will do."""
    parts = get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif not any(part is dict or get_origin(part) is dict for part in parts):
        for part in parts:
            yield from _models(part)


def watch(url: str, ended: threading.Event, failures: list[str]) -> None:
    """Waits until every application runs, then prints the invitation; interrupts `serve run` if one fails."""
    while not ended.wait(1):
        applications = serve.status().applications if ray.is_initialized() else {}
        status = {application.status for application in applications.values()}
        if ApplicationStatus.DEPLOY_FAILED in status:
            failures += [reasons(name, application) for name, application in applications.items()]
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return
        if status == {ApplicationStatus.RUNNING}:
            try:
                print(invitation(url), flush=True)
            except OSError:
                continue  # the proxy does not know the route yet
            return


def end(applications: list[str]) -> None:
    """Shut Ray Serve down when every client has its answer, or the error that says why there is none.

    Serve's own way ends its proxies first, which cuts every stream.
    """
    signal.alarm(0)  # Ray's handler of SIGTERM has set one, to abort after three seconds
    if not ray.is_initialized():
        return
    for name in applications:
        try:
            routers = serve.get_app_handle(name)
            routers.broadcast("drain", GRACE).results(timeout_s=2 * GRACE)
        except Exception as error:  # it is not up, or going down already
            print(f"{name}: not drained: {error}", file=sys.stderr)
    serve.shutdown()  # type: ignore[no-untyped-call]


def main(config: str = "serve_config.yaml") -> None:
    sys.path.insert(0, ".")  # where `serve run` finds what a configuration names
    try:
        content = yaml.safe_load(Path(config).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        sys.exit(f"{config}: {error}")
    if found := faults(content):
        sys.exit("\n".join(f"{config}: {each}" for each in found))
    port = ServeDeploySchema.model_validate(content).http_options.port
    if not 0 <= port < 1 << 16:
        sys.exit(f"{config}: http_options.port: there is no port {port}")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            sys.exit(
                f"Port {port} is in use: end what listens there, or change http_options.port in {config}."
            )

    # Ray gives its workers 15, so that engines would get a 28th of a core that anything else wants, too.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # As Ray does it for SIGTERM, and not KeyboardInterrupt, at which `serve run` would shut down at once.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))
    ended, failures = threading.Event(), list[str]()
    url = f"http://127.0.0.1:{port}"
    threading.Thread(target=watch, args=(url, ended, failures), daemon=True).start()
    try:
        cli(["run", config])
    finally:
        ended.set()
        end([application.get("name", "default") for application in content.get("applications", [])])
        if failures:
            sys.exit("\n".join(failures))


if __name__ == "__main__":
    main(*sys.argv[1:])
