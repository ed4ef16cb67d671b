"""What a monitor sees is what has happened."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.serving import Live

VLLM = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:request_success_total"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:request_prompt_tokens_bucket"),
    "vllm:request_generation_tokens_bucket",
}
OURS = {"subten:kv_bits_per_element", "subten:kv_cache_bytes", "subten:kv_snapshots", "subten:compilations_total"}


def test_names_are_those_of_vllm_and_ours(server: Live) -> None:
    server.client().completions.create(model=server.name, prompt="abc", max_tokens=2)
    server.assert_idle()
    text = server.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    samples = {sample.name for family in families for sample in family.samples}
    assert samples >= VLLM | OURS
    for family in families:
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == server.name


def test_counts_are_exact(server: Live) -> None:
    def count() -> dict[str, float]:
        server.assert_idle()
        return server.metrics()

    before = count()
    answer = server.client().completions.create(
        model=server.name, prompt="count these tokens", max_tokens=7, n=2, seed=1, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    after = count()

    def added(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert added("vllm:prompt_tokens_total") == answer.usage.prompt_tokens == 18
    assert added("vllm:generation_tokens_total") == answer.usage.completion_tokens == 14
    assert added("vllm:time_to_first_token_seconds_count") == 2
    assert added("vllm:inter_token_latency_seconds_count") == 12
    assert added("vllm:e2e_request_latency_seconds_count") == 1
    assert added("vllm:request_success_total") == 2
    assert added("vllm:prefix_cache_queries_total") == 18
    assert after["subten:compilations_total"] == 0


def test_what_the_engine_refuses_is_no_prompt(server: Live) -> None:
    before = server.metrics()
    answer = server.post("/v1/completions", json={"model": server.name, "prompt": [1, 2, 99999]})
    assert answer.status_code == 400
    after = server.metrics()
    assert {name for name in after if name.startswith("vllm:") and after[name] != before.get(name, 0)} == set()


def test_answers_that_end_before_their_first_token_have_ended_too(server: Live) -> None:
    """Of a batch of four, two answers wait while the client goes away."""
    server.assert_idle()
    before = server.metrics()
    asked = {"model": server.name, "prompt": "z" * 200, "max_tokens": 350, "stream": True}
    with server.few_steps(40):
        with server.client().completions.create(**asked, n=6, extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))
        server.assert_idle()
    after = server.metrics()
    assert after["vllm:request_success_total"] - before.get("vllm:request_success_total", 0) == 6
    begun = after["vllm:time_to_first_token_seconds_count"] - before["vllm:time_to_first_token_seconds_count"]
    assert begun <= 4


def test_gauges_show_what_runs(server: Live) -> None:
    asked = {"model": server.name, "prompt": "y" * 300, "max_tokens": 290, "stream": True}
    with (
        server.few_steps(40),
        server.client().completions.create(**asked, n=3, extra_body={"ignore_eos": True}) as stream,
    ):
        next(iter(stream))
        now = server.metrics()
        assert now["vllm:num_requests_running"] == 3
        assert 0 < now["vllm:kv_cache_usage_perc"] <= 1
        assert now["subten:kv_bits_per_element"] == pytest.approx(server.llm.cache_usage().bits_per_element, rel=0.5)
        assert now["subten:kv_cache_bytes"] > 0
    server.assert_idle()
    now = server.metrics()
    assert (now["vllm:num_requests_running"], now["vllm:kv_cache_usage_perc"]) == (0, 0)
    assert now["subten:kv_snapshots"] > 0


def test_errors_are_counted_by_status(server: Live) -> None:
    before = server.metrics().get("subten:http_errors_total", 0)
    assert server.post("/v1/completions", json={}).status_code == 400
    assert server.metrics()["subten:http_errors_total"] == before + 1
