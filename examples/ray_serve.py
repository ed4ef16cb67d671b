"""Replicas of a server behind Ray Serve; the requests of a session go to the replica that has its pages.

    pip install 'subten[serve,structured,ray]'
    SUBTEN_MODEL=demo-moe serve run examples.ray_serve:application

A client says which session a request belongs to in the header `x-session-id`::

    client.chat.completions.create(..., extra_headers={"x-session-id": "conversation-17"})

Ray's consistent-hash router turns it into a replica. Prefixes are then found where they were computed, as a
conversation begins with what it had before; where a replica is added or has gone, only the sessions of its part of
the ring move. Requests without the header go anywhere.
"""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from subten.engine import LLM
from subten.server.app import create_app

REPLICAS = int(os.environ.get("SUBTEN_REPLICAS", "2"))


class NamesReplica:
    """Middleware that says in the header `x-replica` who has answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""

        async def send_with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                replica = serve.get_replica_context().replica_id.unique_id
                MutableHeaders(scope=message)["x-replica"] = replica
            await send(message)

        await self._app(scope, receive, send_with_name)


def replica_app() -> FastAPI:
    """What each replica runs: a server with a model and a cache of its own."""
    model = os.environ.get("SUBTEN_MODEL", "demo-moe")
    app = create_app(LLM(model, max_batch=8, max_context=800, sessions=32, session_ttl=3600.0))
    app.add_middleware(NamesReplica)
    return app


@serve.deployment(
    num_replicas=REPLICAS,
    max_ongoing_requests=256,  # Back-pressure is the server's: 429 with Retry-After.
    request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
    ray_actor_options={"num_cpus": 0.5},  # On GPUs: {"num_gpus": 1}
)
@serve.ingress(replica_app)
class Replica:
    """A replica; everything is in its application."""


application: Any = Replica.bind()  # type: ignore[attr-defined]
