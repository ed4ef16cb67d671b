"""What all endpoints share: the service, and the errors that they document."""

from __future__ import annotations

from typing import Any, cast

from fastapi import Request

from subten.server.api_errors import ErrorBody
from subten.server.service import Service

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is wrong; the message says where."},
    401: {"model": ErrorBody, "description": "No key, or a wrong one."},
    404: {"model": ErrorBody, "description": "There is no such model."},
    408: {"model": ErrorBody, "description": "The body did not arrive in time."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    429: {"model": ErrorBody, "description": "Over capacity; Retry-After says when to come back."},
    503: {"model": ErrorBody, "description": "Shutting down, or short of memory."},
    "default": {"model": ErrorBody, "description": "Any other error."},
}


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    return cast("Service", request.app.state.service)
