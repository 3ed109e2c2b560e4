"""API keys: who has one is let in, everybody else gets OpenAI's error, and a load balancer needs none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest

from deployments.api import Api
from deployments.api_keys import read_keys


class _Tokenizer:
    context_length = 100
    threads = 1


async def healthy() -> None:
    pass


def application(keys: frozenset[bytes] | None) -> httpx.AsyncClient:
    api = Api("demo", cast(Any, _Tokenizer()), cast(Any, None), healthy, keys)
    return httpx.AsyncClient(transport=httpx.ASGITransport(api.app()), base_url="http://test")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """As Kubernetes mounts one: files behind a link, beside names of its own."""
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "alice").write_text("key-a\n\nkey-ä\n")
    (tmp_path / "..data" / "bob").write_text("key-b")
    (tmp_path / "alice").symlink_to("..data/alice")
    (tmp_path / "bob").symlink_to("..data/bob")
    return tmp_path


async def test_a_key_lets_in(secret: Path) -> None:
    async with application(read_keys(secret)) as http:
        for key in ("key-a", "key-b"):
            any_httpx: Any = http
            client = openai.AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=any_httpx)
            assert [model.id async for model in client.models.list()] == ["demo"]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer key-c", "Bearer key-a key-b", "Basic key-a", "key-a"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/nowhere"])
async def test_nothing_else_does(secret: Path, header: str | None, path: str) -> None:
    async with application(read_keys(secret)) as http:
        answer = await http.post(path, headers={} if header is None else {"Authorization": header})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_health_asks_for_none(secret: Path) -> None:
    async with application(read_keys(secret)) as http:
        assert (await http.get("/health")).status_code == 200


async def test_without_keys_all_are_let_in() -> None:
    async with application(None) as http:
        assert (await http.get("/v1/models")).status_code == 200


def test_a_setting_that_would_lock_everybody_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for path in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(ValueError, match="api_keys"):
            read_keys(path)
