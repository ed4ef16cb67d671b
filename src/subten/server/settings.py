"""Settings of the server: what the command line says, else the environment, else the default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

ENVIRONMENT = "SUBTEN_SERVE_"
"""What the names of environment variables begin with; the rest is a field's name in capitals."""
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+")


def _origin(text: str) -> str:
    """Browsers send no path and no slash behind the host: an origin with one would never match."""
    if not _ORIGIN.fullmatch(text):
        raise ValueError("it must be * or an origin without a path, such as http://localhost:3000")
    return text


class ServerSettings(BaseSettings):
    """Everything about the server that is not about the model. A field `x` is also the environment variable
    `SUBTEN_SERVE_X`."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT, extra="forbid", frozen=True)

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine only."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes a free one, which the log names."""
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    """Name that requests give as `model`; by default that of the model."""
    api_key_file: Path | None = None
    """File with one key per line; without one, everybody who can connect may ask."""
    allowed_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()
    """Origins whose pages may call the server (CORS); none by default."""
    max_queue: Annotated[int, Field(ge=0)] = 128
    """Answers that may wait beside those being generated; more are refused with 429."""
    max_body_bytes: Annotated[int, Field(ge=1)] = 4 * 2**20
    """Largest request body; a larger one is refused with 413."""
    body_timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that a request's body may take to arrive."""
    send_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that a client may leave a piece of a stream unread; then its answers are ended."""
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 4.0
    """After SIGTERM, how long answers that are under way may go on."""
    schema_seconds: Annotated[float, Field(gt=0)] = 2.0
    """Longest time that compiling a JSON schema or tool definitions may take."""
    schema_bytes: Annotated[int, Field(ge=1)] = 64 * 2**10
    """Longest JSON schema, or tool definitions together."""
    grammar_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Largest compiled grammar."""
    log_prompts: bool = False
    """Write prompts and answers into the log; they are left out otherwise."""
