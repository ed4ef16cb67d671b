"""API keys: who may ask."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from subten.errors import ParameterError, StorageError
from subten.server.api_errors import ApiError

GUARDED = "/v1/"
"""Paths below ask for a key. What monitors read, and the page, do not: they show no text of anybody."""


def read_keys(path: Path | None) -> list[str]:
    """The keys of a file, one per line; empty lines and those that begin with # are left out. Without a file, none.

    Raises:
        ParameterError: there is none, or one has characters that no header can carry.
        StorageError: the file can't be read.
    """
    if path is None:
        return []
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise StorageError(f"the key file {path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise StorageError(f"the key file {path} can't be read: it is not UTF-8 text") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ParameterError(f"the key file {path} has no key; write one per line")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ParameterError(f"the key file {path} has a key that is not plain ASCII without spaces")
    return keys


class KeyCheck:
    """Middleware that lets nobody without a key pass, before any of a body is read.

    Digests of equal length are compared, each of them always and in constant time, so that the time tells nothing of
    a key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED) or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a key is missing or wrong; send it in the header 'Authorization: Bearer KEY'",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(found) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
