"""Plans from any server with the OpenAI API: streaming chat completions, one connection for each candidate."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from subten.agent.speculation.proposer import Message, Piece
from subten.errors import ExtraMissingError, ParameterError, ProposerError

if TYPE_CHECKING:
    import httpx

_CONNECT_SECONDS = 10.0
_LONGEST_COMPLAINT = 200


class EndpointProposer:
    """Asks `URL/chat/completions`. A piece of text that comes is counted as one token.

    Args:
        url: of the API, such as http://127.0.0.1:8000/v1.
        model: its name there.
        key: for servers that want one.
        max_tokens: longest answer.
        temperature: of all answers.
        silence: seconds without a byte after which an answer has failed.

    Raises:
        ParameterError: the URL is no http or https URL, the key can't be sent, or the temperature is no such number.
        ExtraMissingError: httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        max_tokens: int = 2048,
        temperature: float = 0.8,
        silence: float = 60.0,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ExtraMissingError(
                "an endpoint needs httpx; install it with: pip install 'subten[agent]'"
            ) from error
        if not _is_url(url):
            raise ParameterError(f"the endpoint is '{url}'; it must be a URL such as http://127.0.0.1:8000/v1")
        if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
            raise ParameterError("the endpoint's key must be one line of plain ASCII without spaces")
        if not 0 <= temperature < math.inf:
            raise ParameterError(f"temperature is {temperature}; it must be a finite number of at least 0")
        self.name = f"{model} at {url}"
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "stream": True}
        self._client = httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(silence, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None),
        )

    async def propose(self, messages: Sequence[Message], count: int, seed: int) -> Sequence[EndpointCandidate]:
        """See Proposer. Each candidate connects when it is first read, and reports what goes wrong."""
        shown = [dict(message) for message in messages]
        return [
            EndpointCandidate(self._client, self._url, {**self._body, "messages": shown, "seed": seed + index})
            for index in range(count)
        ]

    async def close(self) -> None:
        """Close all connections. Twice is once."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class EndpointCandidate:
    """One stream."""

    def __init__(self, client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> None:
        self._client = client
        self._url = url
        self._body = body
        self._response: httpx.Response | None = None

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """See Candidate.

        Raises:
            ProposerError: the server can't be reached, refuses, or breaks off.
        """
        import httpx

        try:
            request = self._client.build_request("POST", self._url, json=self._body)
            self._response = response = await self._client.send(request, stream=True)
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode(errors="replace")
                raise ProposerError(
                    f"the endpoint {self._url} answered with status {response.status_code}: "
                    f"{said[:_LONGEST_COMPLAINT]}"
                )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProposerError(f"the endpoint {self._url} can't be reached: {_said(error)}") from error
        try:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if text := self._text(data):
                        yield Piece(text)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise ProposerError(f"the endpoint {self._url} broke off: {_said(error)}") from error
        raise ProposerError(f"the endpoint {self._url} broke off before the end of its answer")

    async def release(self) -> None:
        """See Candidate. The server sees that its reader has gone."""
        if self._response is not None:
            await self._response.aclose()

    def _text(self, data: str) -> str:
        """What an event adds to the answer."""
        try:
            chunk: Any = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProposerError(f"the endpoint {self._url} sent an event that is not valid JSON") from error
        if isinstance(chunk, dict) and chunk.get("error"):
            said = chunk["error"]
            message = said.get("message") if isinstance(said, dict) else said
            raise ProposerError(f"the endpoint {self._url} reports: {str(message)[:_LONGEST_COMPLAINT]}")
        try:
            content = chunk["choices"][0]["delta"].get("content")
        except (KeyError, IndexError, TypeError, AttributeError):
            return ""  # usage, roles, and what else servers send
        return content if isinstance(content, str) else ""


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        return False
