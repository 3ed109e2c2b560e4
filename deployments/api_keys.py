"""Who may use the HTTP API: clients that send one of the keys in a file or a folder of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api_error import ApiError

OPEN = {"/health"}
"""Paths for which no key is asked: load balancers have none."""


CLIENT = "stepahead.client"
"""Where the guard leaves in the ASGI scope whose key it was."""


def read_keys(path: Path) -> frozenset[bytes]:
    """Digests of the keys, one a line, in a file or in all files of a folder (a mounted Secret).

    Raises `ValueError` naming the setting where there are none.
    """
    if path.is_dir():  # names with a dot are Kubernetes' own
        files = [file for file in sorted(path.iterdir()) if not file.name.startswith(".") and file.is_file()]
    else:
        files = [path]
    try:
        lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_keys: cannot be read: {error}") from error
    digests = frozenset(_digest(line) for line in lines if line)
    if not digests:
        raise ValueError(f"api_keys: there is no key in {path}")
    return digests


class KeyGuard:
    """Answers 401 in OpenAI's shape unless the request bears a key (`Authorization: Bearer KEY`)."""

    def __init__(self, app: ASGIApp, keys: frozenset[bytes]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            return await self._app(scope, receive, send)
        if (digest := self._known(Headers(scope=scope))) is not None:
            return await self._app({**scope, CLIENT: digest.hex()}, receive, send)
        error = ApiError(401, "Send a valid API key: Authorization: Bearer KEY", code="invalid_api_key")
        headers = {"WWW-Authenticate": "Bearer"}
        answer = Response(error.body(), error.status, headers, "application/json")
        await answer(scope, receive, send)

    def _known(self, headers: Headers) -> bytes | None:
        """The digest of the key, if it is one of ours."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        return digest if scheme.lower() == "bearer" and digest in self._keys else None


def _digest(key: str) -> bytes:
    """Compared in place of the key, so that the time of a comparison tells nothing about it."""
    return hashlib.sha256(key.encode()).digest()
