"""What a monitor sees. Names and meanings are vLLM's where it has one, so that dashboards made for it work here."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from subten.engine import EngineStats

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    1,
    5,
)
_REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """The figures of one server.

    Args:
        model: the served model's name, the label of all figures of the engine.
        compilations: how many kernels have been compiled so far.
    """

    def __init__(self, model: str, compilations: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._compilations = compilations
        ProcessCollector(registry=self._registry)
        gauge, counter = self._gauge, self._counter
        self._running = gauge("vllm:num_requests_running", "Answers that are being computed.")
        self._waiting = gauge("vllm:num_requests_waiting", "Answers that wait for a part of the cache.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Share of the pages that are in use; 1 is all of them.")
        self._preemptions = gauge("vllm:num_preemptions_total", "Times that an answer's pages were taken for others.")
        self._bits = gauge("subten:kv_bits_per_element", "Measured bits per element of K and V, windows included.")
        self._held = gauge("subten:kv_cache_bytes", "Bytes of pages and windows that running answers hold.")
        self._sessions = gauge("subten:kv_snapshots", "States kept for prompts that continue them.")
        self._compiled = gauge("subten:compilations_total", "Kernels compiled since the server was warm.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens of answers.")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked up.")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Tokens of prompts that were in the cache.")
        self._finished = Counter(
            "vllm:request_success",
            "Answers that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._refused = Counter(
            "subten:http_errors", "Answers that were errors, by status.", ["status"], registry=self._registry
        )
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN
        )
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "From one token of an answer to the next.", _INTER_TOKEN
        )
        self.request_seconds = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST
        )
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS
        )

    def finished(self, reason: str) -> None:
        """Count an answer that has ended."""
        self._finished.labels(**self._labels, finished_reason=reason).inc()

    def refused(self, status: int) -> None:
        """Count an error that was sent."""
        self._refused.labels(str(status)).inc()

    def exposition(self, stats: EngineStats | None) -> bytes:
        """The text that Prometheus reads.

        Args:
            stats: of the engine now; None where it has stopped.
        """
        if stats is not None:
            self._running.set(stats.running)
            self._waiting.set(stats.waiting)
            self._usage.set(1 - stats.available_pages / stats.pages if stats.pages else 0)
            self._preemptions.set(stats.preemptions)
            self._bits.set(stats.cache.bits_per_element)
            self._held.set(stats.cache.held_bytes if stats.running else 0)
            self._sessions.set(stats.snapshots)
        self._compiled.set(self._compilations())
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, [*self._labels], registry=self._registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, [*self._labels], registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, [*self._labels], registry=self._registry, buckets=buckets)
        return family.labels(**self._labels)
