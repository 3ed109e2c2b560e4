"""Router: the ingress. HTTP and text outside, token ids inside."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments import demo_model
from deployments.api import Api
from deployments.api_error import ApiError
from deployments.api_keys import read_keys
from deployments.balancer import balancer_of
from deployments.generation import Dispatcher
from deployments.logs import join_serve_logs
from deployments.metrics import ServeRecorder
from deployments.routing import key_of
from deployments.settings import TelemetrySettings
from deployments.submission import Refusal, Submission
from deployments.telemetry import Telemetry
from deployments.text import Tokenizer
from deployments.tracing import otlp_provider, tracer_to
from engine.collector import spare_collector

if TYPE_CHECKING:
    from deployments.replica import EngineReplica

logger = logging.getLogger(__name__)

QUIET = TelemetrySettings()

LEAVING = 2.0
"""Seconds in which Ray Serve, when a client leaves, has cancelled all that is done for it."""

ANSWER_TIMEOUT = 10.0
"""Seconds in which an engine answers a question about itself."""


class Router:
    """What Ray Serve runs to speak HTTP; it uses no GPU, and any number of them may run."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: str,
        trust_remote_code: bool,
        engines: DeploymentHandle[EngineReplica],
        max_sequences: int,
        api_keys: str | None = None,
        context_length: int | None = None,
        tells: TelemetrySettings = QUIET,
    ) -> None:
        join_serve_logs()
        keys = read_keys(Path(api_keys)) if api_keys else None
        self._model = model
        self._engines = engines
        self._balancer = balancer_of(engines.deployment_id)
        self._moving: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._balancer.on_replicas(lambda names: loop.call_soon_threadsafe(self._move, names))
        tracer = tracer_to(otlp_provider("Router") if tells.tracing else None)
        telemetry = Telemetry(ServeRecorder(), model, tracer)
        self._balancer.on_choice = telemetry.decided
        dispatcher = Dispatcher(self._submit, model, self._balancer.observe, telemetry.watch)
        self._dispatcher = dispatcher
        await dispatcher.open(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        # In an upgrade it may be an old engine that answers: what is set goes first.
        found = await self._context_length()
        path = await asyncio.to_thread(demo_model.resolve, model)
        tokenizer = await asyncio.to_thread(Tokenizer, path, context_length or found, trust_remote_code)
        self._api = Api(
            model,
            tokenizer,
            dispatcher,
            self._check_engines,
            keys,
            max_sequences,
            telemetry,
            self._timelines if tells.timeline else None,
        )
        spare_collector()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._api.app()

    async def drain(self, grace: float) -> None:
        """Take no more requests; return when all are answered, or told to come back after `grace` seconds."""
        await self._dispatcher.drain(grace)

    async def _context_length(self) -> int:
        """Of an engine that serves our model, once there is one."""
        while True:
            found: int | None = await self._engines.context_length.remote(self._model)
            if found is not None:
                return found
            await asyncio.sleep(1)  # an upgrade to another model, whose first engine is not up yet

    async def _submit(self, submission: Submission) -> Refusal | None:
        response = self._engines.submit.remote(submission)
        try:
            refusal: Refusal | None = await response
            return refusal
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # By Ray Serve, since the client left: to submit again would be wrong. Whoever answers that
            # client is cancelled too, perhaps later, and ends this; else it would count as our error.
            await asyncio.sleep(LEAVING)
            return Refusal("unavailable", "the request was cancelled")
        except RayActorError:  # whose text is for the operator, who finds it in Ray's logs
            return Refusal("lost", "the engine was lost")
        except (BackPressureError, DeploymentUnavailableError) as error:
            logger.warning("request %d: %s", submission.request, error)
            return Refusal("unavailable", "no engine takes requests")
        except Exception:
            logger.exception("request %d failed", submission.request)
            return Refusal("failed", "the server failed to answer")
        finally:
            self._balancer.finished(key_of(submission))

    def _move(self, replicas: frozenset[str]) -> None:
        """Ray Serve routes to these replicas, and may be about to stop others."""
        self._dispatcher.welcome(replicas)  # at once: a new one may be all that is left
        if self._moving is not None:
            self._moving.cancel()
        self._moving = asyncio.create_task(self._move_to(replicas))

    async def _move_to(self, replicas: frozenset[str]) -> None:
        # Where none of them can go on with it, a request had better finish where it is.
        try:
            asked = self._engines.broadcast("context_length", self._model)
            found = await asked.results_async(timeout_s=ANSWER_TIMEOUT, return_exceptions=True)
        except Exception as error:  # there are none, or none that answers
            logger.info("requests stay where they are: %s", error)
            return
        if any(isinstance(each, int) for each in found):
            self._dispatcher.keep(replicas)

    async def _timelines(self, steps: int) -> dict[str, list[dict[str, Any]]]:
        """Events of the last steps, by replica. Raises `ApiError` (503) if there is none, or one hangs."""
        asked = self._engines.broadcast("timeline", steps)
        try:
            found = await asked.results_async(timeout_s=ANSWER_TIMEOUT, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError) as error:
            raise ApiError.server_error("no engine answers", 503) from error
        return dict(each for each in found if not isinstance(each, BaseException))

    async def _check_engines(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                await self._engines.check_health.remote()
        except Exception as error:
            raise ApiError.server_error("no engine answers", 503) from error
