"""An error of the HTTP API, in OpenAI's shape."""

from __future__ import annotations

from typing import Self

import msgspec


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape. `status` is the HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, type, param, code, headers)  # as they stand: pickling needs them
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @classmethod
    def too_large(cls, limit: int) -> Self:
        return cls(413, f"The body is longer than {limit} bytes.", code="request_too_large")

    @classmethod
    def model_not_found(cls, model: str) -> Self:
        return cls(
            404, f"The model {model[:200]!r} does not exist here.", param="model", code="model_not_found"
        )

    @classmethod
    def server_error(cls, message: str = "The server failed to answer.", status: int = 500) -> Self:
        return cls(status, message, "server_error")
