"""What `python -m cluster render` is told, checked before anything is written."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cluster.memory import GPUS
from deployments.settings import Count, Settings

API_KEYS = "/etc/stepahead/api-keys"
"""Where the Secret `api-keys` is mounted."""

Overlay = Literal["cpu-demo", "gpu", "gpu-ha"]


def _range(value: Any) -> Any:
    """`3` and `1..8` as on the command line."""
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+)(?:\.\.(\d+))?", value)):
        return found[1], found[2] or found[1]
    return value


class Cluster(BaseModel):
    """One deployment on Kubernetes. An unknown or ill-typed key is refused with its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    overlay: Overlay
    model: str = "demo"
    """`demo`, a Hugging Face id, or a directory in the image or on the volume."""
    replicas: Annotated[tuple[Count, Count], BeforeValidator(_range)] = (1, 1)
    """Engines, at least and at most: `2` or `1..8`."""
    routers: Count = 1
    """Processes that speak HTTP."""
    gpu: str = "H100"
    """What each engine has, by the names of `cluster.memory.GPUS`; of no effect on CPUs."""
    image: str = Field(default="stepahead", pattern=r"^([\w.-]+(:\d+)?/)?[a-z0-9._/-]+$")
    """Repository of the images, without a tag: the tags `cpu` and `cuda` are used."""
    api_keys: bool = False
    """Ask clients for a key that the Secret `api-keys` holds."""
    engine: dict[str, Any] = {}
    """Settings of each engine, as under `engine:` in serve_config.yaml."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.replicas
        if high < low:
            raise ValueError(f"replicas: {low}..{high} ends before it begins")
        if self.gpu not in GPUS:
            raise ValueError(f"gpu: {self.gpu!r} is none of {', '.join(GPUS)}")
        if self.overlay == "gpu-ha" and min(low, self.routers) < 2:
            raise ValueError(
                f"gpu-ha needs two of each, so that one may be lost: replicas are {low}..{high} and routers "
                f"{self.routers}"
            )
        if self.overlay == "cpu-demo" and (high > 1 or self.routers > 2):
            raise ValueError("cpu-demo is one pod on one node: one replica, and at most two routers")
        self.args.engine_config(gpu=self.on_gpus)  # raises, naming a wrong key
        return self

    @property
    def on_gpus(self) -> bool:
        return self.overlay != "cpu-demo"

    @property
    def args(self) -> Settings:
        """The settings of the application."""
        low, high = self.replicas
        optional: dict[str, Any] = {"max_replicas": high} if high > low else {}
        if self.api_keys:
            optional["api_keys"] = API_KEYS
        if self.engine:
            optional["engine"] = self.engine
        return Settings(
            model=self.model,
            accelerator="gpu" if self.on_gpus else "cpu",
            replicas=low,
            routers=self.routers,
            **optional,
        )
