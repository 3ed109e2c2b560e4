"""The configuration that Ray Serve takes: the model of serve_config.yaml and of `serveConfigV2` alike."""

from __future__ import annotations

import yaml
from pydantic import BaseModel, ConfigDict, Field

from deployments.settings import Settings


class Application(BaseModel):
    """One application. Its `args` are the settings that `deployments.app:build` takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "stepahead"
    route_prefix: str = "/"
    import_path: str = "deployments.app:build"
    args: Settings = Settings()


class HttpOptions(BaseModel):
    """Where each node's proxy listens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = 8000
    request_timeout_s: float | None = None


class ServeConfig(BaseModel):
    """A whole configuration, as `serve run` and `serve deploy` take it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    http_options: HttpOptions = HttpOptions()
    proxy_location: str = "EveryNode"
    applications: list[Application] = Field(default=[Application()], min_length=1, max_length=1)

    def text(self) -> str:
        """As YAML; of the application's settings only those that were set."""
        data = self.model_dump(exclude={"applications"}, exclude_none=True)
        data["applications"] = [
            application.model_dump(exclude={"args"})
            | {"args": application.args.model_dump(exclude_unset=True)}
            for application in self.applications
        ]
        text: str = yaml.safe_dump(data, sort_keys=False)
        return text


def for_cluster(args: Settings) -> ServeConfig:
    """The configuration of an application with these settings on Kubernetes: reachable from other pods."""
    return ServeConfig(http_options=HttpOptions(host="0.0.0.0"), applications=[Application(args=args)])
