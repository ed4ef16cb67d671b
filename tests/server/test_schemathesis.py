"""Requests made from the OpenAPI document, valid and not: no answer is a 5xx, and nothing is left behind."""

from __future__ import annotations

from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

# Imported before a server runs: CPython 3.11 can't compile modules in two threads at a time (gh-106905).
from schemathesis.specs.openapi import schemas  # noqa: F401
from tests.server.serving import Live

OPERATIONS = [
    *("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /v1/models/{model}"),
    *("GET /health", "GET /version", "GET /metrics"),
]


POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("operation", "mode"),
    # What takes no body can hardly be asked wrongly.
    [*((own, POSITIVE) for own in OPERATIONS), *((own, NEGATIVE) for own in OPERATIONS if own.startswith("POST"))],
)
def test_no_request_is_a_server_error(server: Live, operation: str, mode: GenerationMode) -> None:
    api = schemathesis.openapi.from_dict(server.app.openapi())
    method, path = operation.split(" ")
    seen: Counter[int] = Counter()

    @given(case=api[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=12 if method == "POST" else 5,
        phases=[Phase.generate],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            # Nearly all would name another model and be 404, or ask for long answers. In a copy: the generator may
            # give the same object again, and must find it as it was.
            body = {**case.body, "model": server.name}
            for name, most in (("max_tokens", 8), ("max_completion_tokens", 8), ("n", 2)):
                if name == "max_tokens" or isinstance(body.get(name), int):
                    given = body.get(name)
                    body[name] = min(given, most) if isinstance(given, int) else most
            case.body = body
        response = case.call(base_url=server.url, timeout=60)
        seen[response.status_code] += 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
    assert seen


def test_the_document_has_every_operation(server: Live) -> None:
    paths = server.app.openapi()["paths"]
    assert sorted(f"{m.upper()} {path}" for path, methods in paths.items() for m in methods) == sorted(OPERATIONS)
