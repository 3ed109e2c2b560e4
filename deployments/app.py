"""The application that serve_config.yaml names: `serve run serve_config.yaml`."""

import logging
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.deployment import Application

from deployments.replica import EngineReplica
from deployments.router import Router
from deployments.settings import Settings, engine_limit, router_limit
from engine.config import EngineConfig

# No `from __future__ import annotations` here: Serve looks at the annotation of `args` to validate it.

logger = logging.getLogger(__name__)

ROUTER: Any = "deployments.routing.TokenRouter"
"""Chooses an engine for each request. By its name, since Serve's processes import it themselves."""

POLICY: Any = "deployments.autoscaling:TokenPolicy"
"""Says how many engines there should be. A day of it is in docs/operations.md."""


def build(args: Settings) -> Application:
    """Routers in front of EngineReplicas. Raises pydantic's `ValidationError`, which names a wrong key."""
    gpu = args.accelerator == "gpu" or (args.accelerator == "auto" and _cluster_has_gpus())
    config = args.engine_config(gpu)
    engines = serve.deployment(
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if gpu else 0},
        max_ongoing_requests=engine_limit(config),
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"session_affinity": args.session_affinity}
        ),
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=3,
        health_check_period_s=2,  # a death shows in the next check ...
        health_check_timeout_s=10,  # ... and an engine whose loop does not turn after three of these
        **_scale(args, config),
    )(EngineReplica)
    routers = serve.deployment(
        num_replicas=args.routers,
        ray_actor_options={"num_cpus": 0.5},
        max_ongoing_requests=router_limit(args, config),
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=3,
    )(serve.ingress()(Router))
    if gpu and not _cluster_has_gpus():
        logger.warning("accelerator: gpu is set and the Ray cluster has no GPU yet: the engines wait for one")
    room = config.max_running_requests + config.max_waiting_requests
    return routers.bind(
        args.model,
        config.trust_remote_code,
        engines.bind(config, args.telemetry),
        room,
        args.api_keys,
        config.context_length,
        args.telemetry,
    )


def _scale(args: Settings, config: EngineConfig) -> dict[str, Any]:
    if args.max_replicas is None:
        return {"num_replicas": args.replicas}
    kwargs = args.autoscaling.model_dump()
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs=kwargs)  # type: ignore[no-untyped-call]
    scaling = AutoscalingConfig(
        min_replicas=args.replicas,
        initial_replicas=max(args.replicas, 1),
        max_replicas=args.max_replicas,
        # How many come for the requests that wait while there is none; else the policy decides, which
        # waits before it lets one go.
        target_ongoing_requests=config.max_running_requests,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=policy,
    )
    return {"autoscaling_config": scaling}


def _cluster_has_gpus() -> bool:
    if ray.is_initialized():
        return bool(ray.cluster_resources().get("GPU"))  # type: ignore[no-untyped-call]
    import torch  # seconds that a replica, which imports this too, does without

    return torch.cuda.is_available()  # `serve run deployments.app:build` builds before it starts Ray
