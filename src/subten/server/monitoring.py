"""`/v1/models`, `/health`, `/version`, `/metrics` and the page at `/`."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel
from starlette.responses import HTMLResponse, Response

from subten import __version__
from subten.server.api_errors import shutting_down
from subten.server.dependencies import ERRORS, service_of
from subten.server.service import Service

router = APIRouter(tags=["monitoring"])

Serving = Annotated[Service, Depends(service_of)]


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["subten"]
    max_model_len: int
    """Tokens of prompt and answer together."""
    kv_format: str


class Models(BaseModel):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """That the server takes requests."""

    status: Literal["ok"]


class Version(BaseModel):
    """Of the server."""

    version: str


@router.get("/v1/models", responses=ERRORS)
async def models(service: Serving) -> Models:
    """What can be given as `model`."""
    return Models(object="list", data=[_model(service)])


@router.get("/v1/models/{model:path}", responses=ERRORS)
async def model(model: str, service: Serving) -> Model:
    """One of them."""
    service.check_model(model)
    return _model(service)


@router.get("/health", responses={503: ERRORS[503]})
async def health(service: Serving) -> Health:
    """Whether the server takes requests; not while it shuts down, nor after the engine has failed."""
    if not service.capacity.open or service.engine.failed:
        raise shutting_down()
    return Health(status="ok")


@router.get("/version")
async def version() -> Version:
    """The version of subten."""
    return Version(version=__version__)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Serving) -> Response:
    """Figures in the text format of Prometheus."""
    return Response(await service.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page() -> HTMLResponse:
    """Live figures, and a chat to try."""
    text = files("subten.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


def _model(service: Service) -> Model:
    return Model(
        id=service.model_name,
        object="model",
        created=service.started,
        owned_by="subten",
        max_model_len=service.max_context,
        kv_format=service.kv_format,
    )
