"""The ASGI application of a service."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from subten import __version__
from subten.engine import LLM
from subten.server import chat, completions, monitoring
from subten.server.api_errors import ApiError, from_validation
from subten.server.keys import KeyCheck, read_keys
from subten.server.limits import BodyLimit
from subten.server.service import Service
from subten.server.settings import ServerSettings

log = logging.getLogger(__name__)


def create_app(llm: LLM, settings: ServerSettings | None = None, keys: Sequence[str] | None = None) -> FastAPI:
    """An application that serves a model.

    Args:
        llm: the model with its cache; it belongs to the application from then on, and is closed with it.
        settings: of the server.
        keys: of who may ask; where there are none, everybody may [default: those of the settings' file].

    Raises:
        SubtenError: the key file can't be used.
    """
    settings = settings or ServerSettings()
    if keys is None:
        keys = read_keys(settings.api_key_file)
    service = Service(llm, settings)
    # The pages that FastAPI would serve at /docs load scripts from elsewhere.
    app = FastAPI(title="subten", version=__version__, lifespan=_lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    for router in (chat.router, completions.router, monitoring.router):
        app.include_router(router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    # The last one added sees a request first.
    app.add_middleware(BodyLimit, most=settings.max_body_bytes, seconds=settings.body_timeout)
    if keys:
        app.add_middleware(KeyCheck, keys=keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    await service.grammars.start()
    yield
    await service.close()


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    service: Service = request.app.state.service
    service.metrics.refused(error.status)
    log.info("refused", extra={"path": request.url.path, "status": error.status, "code": error.detail.code})
    return JSONResponse(error.body(), error.status, error.headers)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _on_api_error(request, from_validation(error.errors()))


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """What the framework itself refuses: no such path, no such method, a body that can't be parsed at all."""
    assert isinstance(error, HTTPException)
    return await _on_api_error(request, ApiError(error.status_code, error.detail, headers=error.headers))


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    log.error("a request failed because of a bug", extra={"path": request.url.path}, exc_info=error)
    message = f"the server has a bug: {type(error).__name__}; its log says more"
    return await _on_api_error(request, ApiError(500, message, kind="server_error", code="internal"))
