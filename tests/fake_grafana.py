"""The part of Grafana's HTTP API that dashboards need, over real HTTP: what is stored, what is refused."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.http_server import QuietHandler, serving

Json = dict[str, Any]


@dataclass
class FakeGrafana:
    """State and rules; `serve()` puts it on a port."""

    password: str = "secret"
    prefix: str = ""
    """Path under which it is served, as `root_url` with `serve_from_sub_path` does."""
    reaches: set[str] = field(default_factory=set)
    """URLs of Prometheus that it can reach."""
    may_write: bool = True
    sources: dict[str, Json] = field(default_factory=dict)
    folders: dict[str, Json] = field(default_factory=dict)
    dashboards: dict[str, Json] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Its URL, without user and password."""
        grafana = self

        class Handler(QuietHandler):
            def _do(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length) or b"{}")
                status, answer = grafana.answer(
                    self.command, self.path, body, self.headers.get("Authorization")
                )
                html = isinstance(answer, str)
                payload = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/html" if html else "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = do_PUT = _do

        with serving(Handler) as address:
            yield f"http://{address}{self.prefix}"

    def answer(
        self, method: str, path: str, body: Json, authorization: str | None
    ) -> tuple[int, Json | list[Any] | str]:
        self.seen.append(path)
        if not path.startswith(self.prefix):
            return 404, "<html>not found</html>"
        path = path.removeprefix(self.prefix)
        if path == "/api/health":
            return 200, {"database": "ok", "version": "11.6.0", "commit": "0"}
        if path.startswith(("/d-solo/", "/d/")):  # pages that Ray's dashboard embeds
            return 200, f"<html><body style='font: 13px monospace'>{path}</body></html>"
        expected = base64.b64encode(f"admin:{self.password}".encode()).decode()
        if authorization not in (f"Basic {expected}", f"Bearer {self.password}"):
            return 401, {"message": "Invalid username or password", "messageId": "password-auth.failed"}
        if method != "GET":
            if not self.may_write:
                return 403, {"message": "You'll need additional permissions to perform this action"}
            self.writes.append(f"{method} {path}")
        return self._authorized(method, path, body)

    def _authorized(self, method: str, path: str, body: Json) -> tuple[int, Json | list[Any]]:
        match method, path.removeprefix("/api").strip("/").split("/"):
            case "GET", ["datasources"]:
                return 200, list(self.sources.values())
            case "POST", ["datasources"]:
                if body["name"] in self.sources:
                    return 409, {"message": "data source with the same name already exists"}
                source = {"id": len(self.sources) + 1, "uid": f"ds{len(self.sources) + 1}"} | body
                self.sources[body["name"]] = source
                return 200, {"datasource": source, "id": source["id"], "message": "Datasource added"}
            case "GET", ["datasources", "name", name]:
                return _found(self.sources.get(name), "Data source not found")
            case "PUT", ["datasources", "uid", uid]:
                [name] = [n for n, source in self.sources.items() if source["uid"] == uid]
                self.sources[name] |= body
                return 200, {"datasource": self.sources[name], "message": "Datasource updated"}
            case "GET", ["datasources", "uid", uid, "health"]:
                [source] = [s for s in self.sources.values() if s["uid"] == uid]
                if source["url"] in self.reaches:
                    return 200, {"status": "OK", "message": "Successfully queried the Prometheus API."}
                return 400, {"status": "ERROR", "message": f'Post "{source["url"]}": connection refused'}
            case "GET", ["folders", uid]:
                return _found(self.folders.get(uid), "folder not found")
            case "POST", ["folders"]:
                self.folders[body["uid"]] = body
                return 200, body
            case "GET", ["dashboards", "uid", uid]:
                return _found(self.dashboards.get(uid), "Dashboard not found")
            case "POST", ["dashboards", "db"]:
                return self._save(body)
        return 404, {"message": f"Not found: {method} {path}"}

    def _save(self, body: Json) -> tuple[int, Json]:
        dashboard = body["dashboard"]
        assert re.fullmatch(r"[\w-]{1,40}", dashboard["uid"]), "Grafana's own rule for uids"
        if body["folderUid"] not in self.folders:
            return 400, {"message": "folder not found"}
        old = self.dashboards.get(dashboard["uid"])
        version = old["dashboard"]["version"] + 1 if old else 1
        if old and not body.get("overwrite"):
            return 412, {"message": "The dashboard has been changed by someone else"}
        meta = {"provisioned": False, "folderUid": body["folderUid"], "version": version}
        saved = dashboard | {"id": len(self.dashboards) + 1, "version": version}
        self.dashboards[dashboard["uid"]] = {"dashboard": saved, "meta": meta}
        return 200, {"uid": dashboard["uid"], "status": "success", "version": version}


def _found(value: Json | None, message: str) -> tuple[int, Json]:
    return (200, value) if value is not None else (404, {"message": message})
