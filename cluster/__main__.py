"""`python -m cluster`: manifests for Kubernetes, and what fits on which GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from cluster import memory
from cluster.render import HERE, alerts, application, dump, render, storage
from cluster.schema import Schemas
from cluster.serve import for_cluster
from cluster.settings import Cluster
from cluster.shape import read_shape
from cluster.sizing import table
from deployments.settings import Settings

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Engine = Annotated[
    list[str] | None, typer.Option("--engine", metavar="KEY=VALUE", help="A setting of the engine; repeat.")
]


def _assignments(texts: list[str] | None) -> dict[str, Any]:
    pairs = [text.partition("=") for text in texts or []]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise ValueError(f"engine: {wrong[0]!r} is no KEY=VALUE")
    return {key: yaml.safe_load(value) for key, _, value in pairs}


@app.command("render")
def render_command(
    overlay: Annotated[str, typer.Option(help="cpu-demo, gpu or gpu-ha.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    model: Annotated[str, typer.Option(help="demo, a Hugging Face id, or a directory in the pods.")] = "demo",
    replicas: Annotated[str, typer.Option(help="Engines: 2, or from 1 to 8 with the load: 1..8.")] = "1",
    routers: Annotated[int, typer.Option(help="Processes that speak HTTP.")] = 1,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(memory.GPUS)}.")] = "H100",
    image: Annotated[str, typer.Option(help="Repository of the images tagged cpu and cuda.")] = "stepahead",
    api_keys: Annotated[bool, typer.Option(help="Ask clients for a key of the Secret api-keys.")] = False,
    engine: Engine = None,
    config: Annotated[
        Path | None, typer.Option(help="Folder with the model's config.json, where the hub is not reached.")
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the model's own code to size it.")] = False,
    dashboards: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of more Grafana dashboards (JSON)."),
    ] = None,
) -> None:
    """Write the manifests of one deployment, for `kubectl apply -k OUT`."""
    cluster = Cluster.model_validate(
        {
            "overlay": overlay,
            "model": model,
            "replicas": replicas,
            "routers": routers,
            "gpu": gpu,
            "image": image,
            "api_keys": api_keys,
            "engine": _assignments(engine),
        }
    )
    shape = read_shape(str(config or model), trust_remote_code)
    boards = sorted(dashboards.glob("*.json")) if dashboards else []
    render(cluster, shape, out, boards)
    typer.echo(f"kubectl apply -k {out}")


@app.command()
def size(
    models: Annotated[list[str], typer.Argument(help="Hugging Face ids or local directories.")],
    gpu: Annotated[list[str] | None, typer.Option(help="Repeat for several; all by default.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens per request; repeat.")] = None,
    engine: Engine = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the models' own code to size them.")] = False,
) -> None:
    """A table of how many requests run at once, by model, GPU and tokens per request (prompt and answer)."""
    shapes = {Path(model).name: read_shape(model, trust_remote_code) for model in models}
    typer.echo(table(shapes, gpu or list(memory.GPUS), context or [2048, 8192, 32768], _assignments(engine)))


@app.command()
def validate(
    schemas: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder of custom resource definitions.")
    ],
    manifests: Annotated[Path | None, typer.Argument(help="A file; standard input by default.")] = None,
) -> None:
    """Check custom resources strictly: what is unknown, missing or ill-typed is named."""
    known = Schemas(schemas)
    text = manifests.read_text() if manifests else sys.stdin.read()
    resources = [resource for resource in yaml.safe_load_all(text) if resource]
    if not any(resource in known for resource in resources):
        raise ValueError(f"nothing was checked: of {len(resources)} resources {schemas} has no schema")
    errors = []
    for resource in resources:
        name = f"{resource['kind']} {resource['metadata']['name']}"
        if resource not in known:
            typer.echo(f"{name}: no schema, not checked")
            continue
        found = known.errors(resource)
        errors += [f"{name}: {error}" for error in found]
        if not found:
            typer.echo(f"{name}: valid")
    if errors:
        raise ValueError("\n".join(errors))


@app.command()
def serve_config() -> None:
    """Print serve_config.yaml as it is in a container: the demo model, reachable from outside."""
    typer.echo(for_cluster(Settings(model="demo")).text(), nl=False)


@app.command()
def overlays() -> None:
    """Write the overlays' own patches and alerts in this folder anew, after a change of what makes them."""
    for cluster in DEFAULTS:
        shape, folder = read_shape(cluster.model), HERE / "overlays" / cluster.overlay
        (folder / "application.yaml").write_text(dump(application(cluster, shape)))
        (folder / "storage.yaml").write_text(dump(storage(shape)))
    (HERE / "overlays" / "gpu" / "alerts.yaml").write_text(dump(alerts()))


DEFAULTS = [
    Cluster(overlay="cpu-demo"),
    Cluster(overlay="gpu", replicas=(1, 4)),
    Cluster(overlay="gpu-ha", replicas=(2, 4), routers=2),
]
"""What the overlays are as they stand in the repository."""


def main() -> None:
    try:
        app()
    except ValidationError as error:
        sys.exit("\n".join(f"{'.'.join(map(str, e['loc'])) or 'error'}: {e['msg']}" for e in error.errors()))
    except (ValueError, OSError, yaml.YAMLError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
