"""The application of the streaming benchmark: the real Router in front of an engine that only counts.

Beside the real routes, the same Router process answers the same requests in two other ways:
`/items` takes each token as one item of a Ray Serve stream, and `/local` writes tokens that are made
on the spot, which is what the ingress alone can write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI, Request, Response
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.handle import DeploymentHandle

from deployments.api import Api, EventStream
from deployments.generation import Dispatcher
from deployments.protocol import CompletionRequest, parse
from deployments.responses import DONE, StreamedAnswer
from deployments.router import Router
from deployments.submission import Refusal, Submission

if TYPE_CHECKING:
    from benchmarks.streaming_engine import PacedReplica  # imports torch

MODEL = "demo"
MAX_REQUESTS = 1024
ROUTER: Any = "deployments.routing.TokenRouter"


class StreamingRouter(Router):
    """The real one, and beside it the two other ways."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engines: DeploymentHandle[PacedReplica], context_length: int
    ) -> None:
        await super().__init__(
            MODEL, False, cast(Any, engines), max_sequences=MAX_REQUESTS, context_length=context_length
        )
        self._replicas = engines
        self._item_dispatcher = Dispatcher(self._submit_items, MODEL)
        await self._item_dispatcher.open("127.0.0.1")
        self._items = Api(MODEL, self._api._tokenizer, self._item_dispatcher, self._check_engines)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = super().__serve_build_asgi_app__()
        app.add_api_route("/items", self._items.complete, methods=["POST"])
        app.add_api_route("/local", self._local, methods=["POST"])
        return app

    async def _submit_items(self, submission: Submission) -> Refusal | None:
        stream: Any = self._replicas.options(stream=True).items.remote(submission)
        async for record in stream:
            self._item_dispatcher._deliver(record)
        return None

    async def _local(self, http: Request) -> Response:
        """Completion events from here, each written by itself."""
        request = parse(await http.body(), CompletionRequest)
        text: str = self._api._tokenizer._decode(cast(list[int], request.prompts[0]))
        answer = StreamedAnswer(MODEL, False, False, 1)

        async def events() -> AsyncIterator[bytes]:
            for _ in range(request.max_tokens or 1):
                yield answer.delta(0, text)
                await asyncio.sleep(0)  # the others' turn
            yield answer.finish(0, "length") + DONE

        return EventStream(events(), lambda: None)


def build(words: list[int], context_length: int, routers: int) -> Application:
    """`words`: the tokens that the engine makes, in turn."""
    from benchmarks.streaming_engine import PacedReplica

    engines = serve.deployment(
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=2 * MAX_REQUESTS,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )(PacedReplica)
    ingress = serve.deployment(
        num_replicas=routers, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=2 * MAX_REQUESTS
    )(serve.ingress()(StreamingRouter))
    return ingress.bind(engines.bind(MODEL, words, context_length), context_length)
