"""Brings dashboards and their data source into a Grafana, so that a second run changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import unquote_to_bytes, urlsplit

import requests
from grafana_client import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException, GrafanaUnauthorizedError
from requests.auth import HTTPBasicAuth

FOLDER_UID = "stepahead"
FOLDER = "stepahead"

Json = dict[str, Any]
Change = Literal["created", "updated", "unchanged"]


class GrafanaError(ValueError):
    """Grafana did not do what it was asked for; the text says why, and what helps."""


class Grafana:
    """A running Grafana, through its HTTP API.

    `url` may hold user and password (`http://admin:secret@host:3000`, `%23` for `#`, and so on); `token` is a
    service account's and takes precedence. Every method raises `GrafanaError`.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of a port, or an address in brackets
            usable = False
        if not usable:
            shown = url.rpartition("@")[2]  # not the password
            raise GrafanaError(f"grafana: {shown!r} is no URL such as http://admin:password@localhost:3000")
        self._shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._who = "the token" if token else f"user {parts.username}" if parts.username else "no user"
        # The client would leave `%40` in a password as it is. Bytes, since requests takes text for Latin-1.
        login = HTTPBasicAuth(*(unquote_to_bytes(each or "") for each in (parts.username, parts.password)))
        # A path without a slash at its end would run into `api`.
        api = parts._replace(path=parts.path.rstrip("/") + "/").geturl()
        self._api = GrafanaApi.from_url(api, token or (login if parts.username else None))

    def __enter__(self) -> Grafana:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.client.s.close()

    def check(self) -> str:
        """Its version."""
        with self._explained("health"):
            health = self._api.health.check()
        if not isinstance(health, dict) or "database" not in health:
            raise GrafanaError(f"grafana: what answers at {self._shown} is no Grafana")
        return str(health.get("version", "unknown"))

    def data_source(self, name: str, prometheus: str | None) -> tuple[str, Change]:
        """Uid of the Prometheus data source of that name, which is made or corrected if a URL is given.

        The URL is as Grafana reaches Prometheus, which it is asked to try.
        """
        with self._explained("data sources"):
            found = _or_none(lambda: self._api.datasource.get_datasource_by_name(name))
            if found is None and prometheus is None:
                names = sorted(
                    each["name"]
                    for each in self._api.datasource.list_datasources()
                    if each["type"] == "prometheus"
                )
                raise GrafanaError(
                    f"datasource: Grafana has none named {name!r}. Give --prometheus URL to make it"
                    + (f", or --datasource with one of: {', '.join(names)}" if names else "")
                )
            if found is not None and found["type"] != "prometheus":
                raise GrafanaError(f"datasource: {name!r} is of type {found['type']}, not prometheus")
            change: Change = "unchanged"
            if found is None:
                wanted = {"name": name, "type": "prometheus", "url": prometheus, "access": "proxy"}
                found = self._api.datasource.create_datasource(wanted)["datasource"]
                change = "created"
            elif prometheus is not None and found["url"].rstrip("/") != prometheus.rstrip("/"):
                self._api.datasource.update_datasource_by_uid(found["uid"], found | {"url": prometheus})
                change = "updated"
        uid: str = found["uid"]
        self._check_data_source(name, uid)
        return uid, change

    def _check_data_source(self, name: str, uid: str) -> None:
        try:
            with self._explained("data source"):
                health = self._api.datasource.health(uid)
        except GrafanaError as error:
            raise GrafanaError(f"datasource: Grafana cannot use {name!r}: {error}") from error
        if health.get("status") != "OK":
            raise GrafanaError(f"datasource: Grafana cannot use {name!r}: {health.get('message')}")

    def folder(self) -> Change:
        """Where the dashboards are."""
        with self._explained("folders"):
            if _or_none(lambda: self._api.folder.get_folder(FOLDER_UID)) is not None:
                return "unchanged"
            self._api.folder.create_folder(FOLDER, FOLDER_UID)
        return "created"

    def dashboard(self, dashboard: Json) -> Change:
        """A dashboard with an `uid`, in the folder. What was changed by hand in Grafana is overwritten."""
        # Grafana counts these itself; files that were exported from one have its numbers.
        dashboard = {key: value for key, value in dashboard.items() if key not in ("id", "version")}
        with self._explained(f"dashboard {dashboard['uid']}"):
            found = _or_none(lambda: self._api.dashboard.get_dashboard(dashboard["uid"]))
            if found is not None and _holds(found["dashboard"], dashboard):
                return "unchanged"
            if found is not None and found["meta"].get("provisioned"):
                raise GrafanaError(
                    f"dashboard {dashboard['uid']}: is provisioned from a file, so Grafana takes no other; "
                    "change the file with `python -m dashboards export`"
                )
            self._api.dashboard.update_dashboard(
                {
                    "dashboard": dashboard,
                    "folderUid": FOLDER_UID,
                    "overwrite": True,
                    "message": "python -m dashboards apply",
                }
            )
        return "created" if found is None else "updated"

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except GrafanaUnauthorizedError as error:
            raise GrafanaError(
                f"grafana: {self._shown} does not accept {self._who}: wrong password or token "
                "(user and password in the URL, or GRAFANA_TOKEN)"
            ) from error
        except GrafanaException as error:
            if error.status_code == 403:
                raise GrafanaError(f"grafana: {self._who} may not change {what}: {error.message}") from error
            raise GrafanaError(f"grafana: {what}: {error.message}") from error
        except requests.JSONDecodeError as error:
            raise GrafanaError(f"grafana: what answers at {self._shown} is no Grafana") from error
        except requests.RequestException as error:
            raise GrafanaError(f"grafana: {self._shown} does not answer: {error}") from error


def _or_none(get: Callable[[], Json]) -> Json | None:
    """What was asked for, unless Grafana has no such thing."""
    try:
        return get()
    except GrafanaClientError as error:
        if error.status_code == 404:
            return None
        raise


def _holds(theirs: Any, ours: Any) -> bool:
    """Whether all of `ours` is in `theirs`, to which Grafana may have added defaults and a version."""
    if isinstance(ours, Mapping):
        return isinstance(theirs, Mapping) and all(
            key in theirs and _holds(theirs[key], value) for key, value in ours.items()
        )
    if isinstance(ours, list):
        return (
            isinstance(theirs, list)
            and len(theirs) == len(ours)
            and all(_holds(their, our) for their, our in zip(theirs, ours, strict=True))
        )
    return bool(theirs == ours)
