"""The `args` of the application in serve_config.yaml, and what follows from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.config import EngineConfig

MOST = 10_000
"""Processes of a kind: more would be a slip of the keyboard."""

Count = Annotated[int, Field(ge=1, le=MOST)]

# On a CPU a step costs time for every token in it, so a large one stalls every stream.
CPU_DEFAULTS = {"max_running_requests": 32, "max_waiting_requests": 512, "max_tokens_per_step": 512}

SPARE = 64
"""Calls to a replica beside what its engine takes: health, stats, and requests on their way to be refused."""


class TelemetrySettings(BaseModel):
    """What the application tells of itself beside its metrics, which are always there."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpu_cost_per_hour: Annotated[float, Field(gt=0)] | None = None
    """Price of an hour of one GPU, in any currency; gives the metric of the cost of a million tokens."""
    timeline: bool = False
    """Routers answer GET /debug/timeline with a trace of the last steps of the engines."""
    tracing: bool = False
    """Send spans by OTLP to where the OTEL_EXPORTER_OTLP_* variables say; needs `stepahead[tracing]`."""


class AutoscalingSettings(BaseModel):
    """How the number of engines follows the load, see `deployments/autoscaling.py`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    utilisation: Annotated[float, Field(gt=0, le=1)] = 0.55
    """Share of the engines' throughput that is meant to be in use."""
    ttft_s: Annotated[float, Field(ge=0)] = 1.0
    """Seconds of queued work that an engine may have."""
    cold_start_s: Annotated[float, Field(gt=0)] = 300.0
    """From asking for an engine until it serves: the start of its node, the load of the model."""
    hold_s: Annotated[float, Field(ge=0)] = 600.0
    """How long an engine is kept that is not needed any more."""


class Settings(BaseModel):
    """Settings of the application. An unknown or ill-typed key is refused with its name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(default="demo", min_length=1)
    """`demo`, a Hugging Face id, or a local directory. Clients name it exactly so."""
    accelerator: Literal["auto", "gpu", "cpu"] = "auto"
    """What each engine runs on. `auto`: one GPU where the Ray cluster has any at the time, else the CPU."""
    replicas: Annotated[int, Field(ge=0, le=MOST)] = 1
    """Engines. 0 with `max_replicas`: a request after a silence waits for an engine's start."""
    max_replicas: Count | None = None
    """If set, Ray Serve scales the engines with the load between `replicas` and this many."""
    autoscaling: AutoscalingSettings = AutoscalingSettings()
    routers: Count = 1
    """Processes that speak HTTP, tokenise and detokenise."""
    session_affinity: bool = False
    """Requests with the same `user` go to the same engine, unless it has much more to do than others."""
    api_keys: Annotated[str, Field(min_length=1)] | None = None
    """File with one key a line, or folder of such files, read when a Router starts; clients then need one."""
    telemetry: TelemetrySettings = TelemetrySettings()
    engine: dict[str, Any] = {}
    """Settings of each `EngineConfig`; `model` and `device` follow from the settings above."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key, instead in (("model", "model"), ("device", "accelerator")):
            if key in self.engine:
                raise ValueError(f"engine.{key}: set `{instead}`, at the top level, instead")
        if self.replicas == 0 and self.max_replicas is None:
            raise ValueError("replicas is 0, and without max_replicas it stays so")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is below replicas ({self.replicas})")
        return self

    def engine_config(self, gpu: bool) -> EngineConfig:
        """The engine's settings, with the defaults that suit what it runs on. `model` stands as given.

        Raises `ValidationError`, which names a wrong key.
        """
        fixed = {"model": self.model, "device": "cuda" if gpu else "cpu"}
        return EngineConfig.model_validate((fixed if gpu else fixed | CPU_DEFAULTS) | self.engine)


def engine_limit(engine: EngineConfig) -> int:
    """`max_ongoing_requests` of one EngineReplica.

    Above what the engine takes, so that it is the engine which refuses, at once and with a reason,
    and not Ray Serve which lets the client wait.
    """
    return engine.max_running_requests + engine.max_waiting_requests + SPARE


def router_limit(settings: Settings, engine: EngineConfig) -> int:
    """`max_ongoing_requests` of one Router: all that the engines take, as one Router may get it all.

    Ray Serve keeps it in 32 bits.
    """
    return min(engine_limit(engine) * (settings.max_replicas or settings.replicas), 2**31 - 1)
