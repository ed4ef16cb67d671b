"""Errors as clients of the OpenAI API expect them: a status, and a body `{"error": {...}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from subten.errors import (
    CacheMemoryError,
    ContextLengthError,
    EngineStoppedError,
    ExtraMissingError,
    GuardError,
    ParameterError,
    SubtenError,
)

INVALID = "invalid_request_error"

_UNION_BRANCH = re.compile(r"(str|int|float|list\[.*|literal\[.*|constrained-.*|function-.*|[A-Z]\w+)$")
"""In the place of an error, which type of a union was tried: no part of what the client wrote."""


class ErrorDetail(BaseModel):
    """What was wrong, and what would be right."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one sentence.
        kind: OpenAI's `type`.
        code: OpenAI's `code`.
        param: the field of the request that is to blame.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=message, type=kind, param=param, code=code)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """What is sent."""
        return ErrorBody(error=self.detail).model_dump()


def from_subten(error: SubtenError) -> ApiError:
    """The answer to a request that the engine refused or could not finish."""
    message = str(error)
    if isinstance(error, ContextLengthError):
        return ApiError(400, message, code="context_length_exceeded")
    if isinstance(error, (ParameterError, ExtraMissingError, GuardError)):
        return ApiError(400, message, code=error.code)
    if isinstance(error, EngineStoppedError):
        return shutting_down(message)
    status = 503 if isinstance(error, CacheMemoryError) else 500
    return ApiError(status, message, kind="server_error", code=error.code)


def from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The answer to a body that is not what the endpoint takes; the first problem is named. Where a field may be of
    several types there is one for each of them: the one is named that comes deepest, which is of the type that was
    meant, and rather what is wrong with a value than that it is of another type."""
    of_first = [problem for problem in problems if problem["loc"][:2] == problems[0]["loc"][:2]]
    problem = max(of_first, key=lambda p: (len(_field(p)), not p["type"].endswith("_type")))
    field = ".".join(_field(problem))
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {problem['ctx']['error']}", code="invalid_json")
    where = f"{field}: " if field else ""
    return ApiError(400, f"{where}{problem['msg']}", param=field or None, code=str(problem["type"]))


def _field(problem: Mapping[str, Any]) -> list[str]:
    """The way to a field, without the types that were tried."""
    return [str(part) for part in problem["loc"][1:] if not _UNION_BRANCH.match(str(part))]


def shutting_down(message: str = "the server is shutting down; ask another one, or later") -> ApiError:
    """The answer to what can't be finished any more."""
    return ApiError(503, message, kind="server_error", code="engine_stopped", headers={"Retry-After": "10"})
