"""`python -m dashboards`: Grafana dashboards and Prometheus alerts, applied or written to files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dashboards.export import DASHBOARDS, write_alerts, write_dashboards
from dashboards.grafana import Grafana

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def apply(
    grafana: Annotated[str, typer.Option(help="Its URL, with user and password unless there is a token.")],
    prometheus: Annotated[
        str | None, typer.Option(help="URL of Prometheus as Grafana reaches it; without, it must be known.")
    ] = None,
    datasource: Annotated[str, typer.Option(help="Name of the data source.")] = "Prometheus",
    token: Annotated[
        str | None, typer.Option(envvar="GRAFANA_TOKEN", help="Of a service account that may edit.")
    ] = None,
    others: Annotated[
        list[Path] | None, typer.Argument(help="More dashboards (JSON), such as those that Ray writes.")
    ] = None,
) -> None:
    """Bring dashboards and data source into a running Grafana. What is as it should be is left alone."""
    more = [_read(path) for path in others or []]
    with Grafana(grafana, token) as running:
        typer.echo(f"Grafana {running.check()}")
        uid, change = running.data_source(datasource, prometheus)
        typer.echo(f"data source {datasource}: {change}")
        typer.echo(f"folder: {running.folder()}")
        for dashboard in [*(make(uid) for make in DASHBOARDS.values()), *more]:
            typer.echo(f"dashboard {dashboard['uid']}: {running.dashboard(dashboard)}")


@app.command()
def export(out: Annotated[Path, typer.Option(help="Folder to write to.")]) -> None:
    """Write dashboards for Grafana's provisioning (*.json) and alerts for Prometheus (alerts.yml)."""
    for path in [*write_dashboards(out), write_alerts(out)]:
        typer.echo(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(read, dict) or not read.get("uid"):
        raise ValueError(f"{path}: is no dashboard with a uid")
    return read


def main() -> None:
    try:
        app()
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
