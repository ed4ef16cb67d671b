"""`LLM`: a model with a cache, and calls that wait for its text."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from subten.engine.calibrate import calibration_for
from subten.engine.canary import check_quality
from subten.engine.graphs import GraphRecorder, why_no_graphs
from subten.engine.intake import Intake, Prompt
from subten.engine.loading import LoadedModel, load_model
from subten.engine.loop import EngineLoop
from subten.engine.memory import plan_pools
from subten.engine.pacing import Pacer
from subten.engine.request import Completion, Delta, Request
from subten.engine.runner import Runner, Work
from subten.engine.sampling import SamplingParams
from subten.engine.scheduler import Policy, Scheduler
from subten.engine.usage import CacheUsage, EngineStats
from subten.errors import ContextLengthError, KernelUnavailableError, ParameterError
from subten.formats import DEFAULT_FORMAT, KVFormat, PageLayout, get_format
from subten.kernels.attention import PrefillRule
from subten.kernels.compilations import count_allocations, count_compilations
from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH, sizes
from subten.kernels.select import CACHED_ATTENTION, Use, select_attention
from subten.kvcache import CacheBooks

log = logging.getLogger(__name__)

CHUNK_SIZES = {"cpu": 256, "cuda": 1024}
"""Prompt tokens of a step, by type of device. On an H200, 1024 at a time take half to a third as long each as 256 do
(docs/benchmarks): those have fewer programs in attention than the GPU has multiprocessors, and take the host nearly
as long to launch."""


class LLM:
    """A model with a KV cache of a chosen format.

    Args:
        model: folder, .gguf file, name of a shipped or pulled model, or a model already loaded (which several
            `LLM`s may share).
        kv: format of the cache, by name or as data.
        max_context: tokens that one sequence may have; None is what the model and the memory allow.
        max_batch: sequences that are computed together.
        cache_bytes: memory for the cache; None is a share of what is free.
        sinks: tokens at the start of a sequence that stay in 16 bit; None is the format's own.
        recent: newest tokens that stay in 16 bit; None is the format's own.
        prefill: what a prompt's chunk sees of itself. "chunk": its own tokens in 16 bit (better, as in other
            engines). "window": what decoding would see, so that results do not depend on chunking.
        chunk_size: prompt tokens per step; while others decode, one such step of prompts follows each of theirs.
            None is 1024 on a GPU, which smaller ones leave idle, and 256 on a CPU.
        itl_budget_ms: milliseconds from one token of a stream to the next that prompts have to leave to those that
            decode; then a prompt's step is taken some layers at a time (pacing.py). None: whole steps.
        reserve: tokens beyond its present length for which a request has memory set aside when others are admitted.
            None is its longest answer: what runs is never interrupted. With less, more requests run at a time, and
            one that outgrows the memory interrupts the youngest for a while.
        prefix_cache: keep the state at the end of prompts and answers, so that a prompt which continues one
            of them is not computed again.
        sessions: conversations to make room for while they are idle, beside the batch: each may keep the states of
            its last two turns. None keeps as many states as there are sequences in a batch. The least recently used
            ones make room.
        session_ttl: seconds after which a state that nobody has come back to is dropped; None keeps it.
        max_kld: refuse the format if it diverges from 16 bit by more than so many nats per token on the canary
            text (canary.py); None does not look.
        dtype: as in `load_model`; ignored, like `device`, for a loaded model.
        device: as in `load_model`.
        kernels: as in `load_model`; for a loaded model, `cached_attention` alone counts.
        weights: as in `load_model`; ignored for a loaded model.
        cuda_graphs: launch decode steps as CUDA graphs, captured here. None: where the device and the kernels allow
            it. True: refuse to go without.
        progress: called with (tensors loaded, tensors in all).

    Raises:
        SubtenError: a subclass says what can't be had.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        kv: str | KVFormat = DEFAULT_FORMAT,
        max_context: int | None = None,
        max_batch: int = 8,
        cache_bytes: int | None = None,
        sinks: int | None = None,
        recent: int | None = None,
        prefill: PrefillRule = "chunk",
        chunk_size: int | None = None,
        itl_budget_ms: float | None = None,
        reserve: int | None = None,
        prefix_cache: bool = True,
        sessions: int | None = None,
        session_ttl: float | None = None,
        max_kld: float | None = None,
        dtype: str = "auto",
        device: str = "auto",
        kernels: Mapping[str, str] | None = None,
        weights: str = "auto",
        cuda_graphs: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if max_batch < 1:
            raise ParameterError(f"max_batch is {max_batch}; it must be 1 or more")
        if max_kld is not None and not max_kld >= 0:
            raise ParameterError(f"max_kld is {max_kld}; it must be 0 or more, or None")
        if chunk_size is not None and chunk_size < 1:
            raise ParameterError(f"chunk_size is {chunk_size}; it must be 1 or more, or None")
        if itl_budget_ms is not None and not itl_budget_ms > 0:
            raise ParameterError(f"itl_budget_ms is {itl_budget_ms}; it must be above 0, or None")
        if reserve is not None and reserve < 1:
            raise ParameterError(f"reserve is {reserve}; it must be 1 or more, or None")
        if sessions is not None and sessions < 0:
            raise ParameterError(f"sessions is {sessions}; it must be 0 or more, or None")
        if session_ttl is not None and not session_ttl > 0:
            raise ParameterError(f"session_ttl is {session_ttl}; it must be above 0, or None")
        if prefill not in ("window", "chunk"):
            raise ParameterError(f"prefill is '{prefill}'; it must be window or chunk")
        fmt = get_format(kv) if isinstance(kv, str) else kv
        self.kv = fmt.with_windows(sinks, recent)
        self.max_batch, self.sessions, self.session_ttl = max_batch, sessions, session_ttl
        if not isinstance(model, LoadedModel):
            model = load_model(model, dtype=dtype, device=device, kernels=kernels, weights=weights, progress=progress)
        self.model = model
        self.tokenizer = model.tokenizer
        requested = (kernels or {}).get(CACHED_ATTENTION, model.attention)
        layout = PageLayout(self.kv, model.geometry.head_dim)
        attention = select_attention(Use(model.device, model.dtype, (layout,)), requested)
        self.attention = attention.name
        self.layout = replace(layout, ahead=attention.ahead)
        obstacle = why_no_graphs(model.device, model.kernels, attention, bool(model.spec.expert_sizes))
        if cuda_graphs and obstacle is not None:
            raise KernelUnavailableError(f"decode steps can't be CUDA graphs: {obstacle}; leave cuda_graphs at None")
        captured = obstacle is None and cuda_graphs is not False
        log.info("decode steps: %s", "CUDA graphs" if captured else f"no CUDA graphs ({obstacle or 'not wanted'})")
        pools = plan_pools(
            self.layout,
            model.geometry,
            model_context=model.spec.max_positions,
            max_context=max_context,
            max_batch=max_batch,
            sessions=sessions,
            cache_bytes=cache_bytes,
            device=model.device,
        )
        self.max_context = pools.max_context
        if max_kld is not None:
            check_quality(model, self.kv, self.max_context, max_kld)
        if chunk_size is None:
            chunk_size = CHUNK_SIZES[model.device.type]
        self._chunk_size = chunk_size
        namespace = f"{model.fingerprint} {model.dtype} {self.kv} {prefill} {chunk_size}"
        self._books = CacheBooks(
            self.layout,
            pools.num_pages,
            pools.num_windows,
            hashlib.sha256(namespace.encode()).digest(),
            session_ttl,
        )
        calibration = calibration_for(model) if self.kv.calibrated else None
        self._runner = Runner(
            model,
            self.layout,
            pools.num_pages,
            pools.num_windows,
            calibration,
            prefill,
            attention.load(),
            max_batch,
            self.max_context,
            GraphRecorder(model.device) if captured else None,
        )
        policy = Policy(max_batch, chunk_size, prefix_cache, reserve)
        self._scheduler = Scheduler(self._books, self._runner.storage, self.layout, policy)
        pacer = Pacer(None if itl_budget_ms is None else itl_budget_ms / 1000)
        self.intake = Intake(model.tokenizer, model.spec.vocab_size, self.max_context)
        """Makes requests; with `loop`, for those who take the steps themselves, as `AsyncEngine` does."""
        self.loop = EngineLoop(self._runner, self._scheduler, pacer, prefix_cache, self._remember_usage)
        self._usage = CacheUsage(0, 0, 0, 0)
        if captured:
            self._warm_up()
            # A garbage collection takes as long as several steps; what is here now will stay.
            gc.collect()
            gc.freeze()
        self._compilations, self._allocations = count_compilations(model.device), count_allocations(model.device)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer one or several prompts, all of them in one batch as far as the cache allows.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: one for all, or one per prompt.

        Returns:
            The completions of each prompt, in order: one, or as many as `n` of its params.

        Raises:
            ContextLengthError: a prompt is as long as the context or longer.
            ParameterError: an empty prompt, a token id outside the vocabulary, or as many `params` as do not
                match the prompts.
        """
        listed = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(listed)
        if not isinstance(params, Sequence):
            raise ParameterError(f"params is a {type(params).__name__}; it must be SamplingParams, or a list of them")
        if len(params) != len(listed):
            raise ParameterError(f"there are {len(params)} params for {len(listed)} prompts; give one or one each")
        answers = [self.intake.requests(prompt, p) for prompt, p in zip(listed, params, strict=True)]
        requests = [request for of_prompt in answers for request in of_prompt]
        with self._begun(answers):
            while any(request.finish_reason is None for request in requests):
                self.loop.step()
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Answer one prompt piece by piece. Closing the generator cancels the request and frees its pages. Of several
        answers (`n`) the pieces come as they do; each says whose it is.

        Raises:
            ContextLengthError: the prompt is as long as the context or longer.
            ParameterError: an empty prompt or a token id outside the vocabulary.
        """
        return self._stream(self.intake.requests(prompt, params or SamplingParams()))

    def score(self, token_ids: Sequence[int], decode_tail: int = 0) -> Generator[Tensor, None, None]:
        """The serving path on a given text: what the model thinks comes next after each token.

        Args:
            token_ids: the text, one token at least.
            decode_tail: so many tokens at the end are taken one at a time, as in decoding; the ones before
                chunk by chunk.

        Yields:
            float32 logits [n, vocab] of consecutive positions, together one row per token.

        Raises:
            ContextLengthError: the text is longer than the context.
            ParameterError: no tokens, a token id outside the vocabulary, or a tail of less than nothing.
        """
        if decode_tail < 0:
            raise ParameterError(f"decode_tail is {decode_tail}; it must be 0 or more")
        token_ids = self.intake.checked(token_ids)
        if len(token_ids) > self.max_context:
            raise ContextLengthError(
                f"the text has {len(token_ids)} tokens and the context {self.max_context}; cut the text"
            )
        sequence = self._books.open().sequence
        try:
            prefilled = max(0, len(token_ids) - decode_tail)
            ends = [*range(self._chunk_size, prefilled, self._chunk_size), *range(prefilled, len(token_ids) + 1)]
            start = 0
            for end in ends:
                if end > start:
                    part = token_ids[start:end]
                    step = self._runner.begin([Work(self._books.append(sequence, part), part)])
                    step.advance(step.layers_left)
                    self._remember_usage()
                    yield from step.all_logits(0, len(part))
                    start = end
        finally:
            self._books.free(sequence)

    def cache_usage(self) -> CacheUsage:
        """What the cache holds for the sequences that are running, or held for the last ones that were."""
        return self._measure() if self._books.lengths() else self._usage

    def stats(self) -> EngineStats:
        """How busy the engine is."""
        self._books.expire()
        return EngineStats(
            self._scheduler.running,
            self._scheduler.waiting,
            self._scheduler.preemptions,
            self._books.pages.count,
            self._books.available_pages,
            self._books.snapshots,
            self.cache_usage(),
            self._runner.decode_step.graphs,
            self._compilations(),
            self._allocations(),
        )

    def check_integrity(self) -> None:
        """Assert that the cache's books add up; for tests and for a server that is idle."""
        self._books.check_integrity()

    def _stream(self, answers: list[Request]) -> Generator[Delta, None, None]:
        with self._begun([answers]):
            while any(request.finish_reason is None or request.deltas for request in answers):
                for request in answers:
                    while request.deltas:
                        yield request.deltas.pop(0)
                if any(request.finish_reason is None for request in answers):
                    self.loop.step()

    @contextmanager
    def _begun(self, answers: Sequence[Sequence[Request]]) -> Generator[None, None, None]:
        """Requests that are under way inside the context, and whose part of the cache is free behind it."""
        for first, *_ in answers:
            self.loop.add(first)
        try:
            yield
        finally:
            for request in (request for of_prompt in answers for request in of_prompt[::-1]):
                self.loop.cancel(request)

    def _warm_up(self) -> None:
        """Take prompts of all kinds once, so that none of them has to wait for a kernel to be compiled."""
        few = sizes(MOST_TOKENS_OF_A_LAUNCH)
        longest = min(self._chunk_size, self.max_context)
        for length in sorted({*few, *(size + 1 for size in few)}):
            if length <= longest:
                list(self.score([0] * length))
        self._take_chunks(longest)
        # Two of a prompt, as the second one reads codes.
        self._take_chunks(*[min(longest, self.max_context // 2)] * 2)
        self._usage = CacheUsage(0, 0, 0, 0)

    def _take_chunks(self, *lengths: int) -> None:
        """Compute a prompt in chunks of these lengths, as prompts that others wait for are."""
        sequence = self._books.open().sequence
        try:
            for tokens in ([0] * length for length in lengths if length):
                self._runner.run([Work(self._books.append(sequence, tokens), tokens)])
        finally:
            self._books.free(sequence)

    def _remember_usage(self) -> None:
        self._usage = self._measure()

    def _measure(self) -> CacheUsage:
        geometry, lengths = self.model.geometry, self._books.lengths()
        tokens = sum(lengths)
        held = self._books.held_pages() * self.layout.page_bytes(geometry)
        held += len(lengths) * self.layout.window_bytes(geometry)
        elements = geometry.elements(tokens)
        return CacheUsage(tokens, elements, held, 2 * elements)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ParameterError(
            f"the prompts are a {type(prompts).__name__}; give a text, a list of token ids, or a list of either"
        )
    token_ids = [p for p in prompts if isinstance(p, int)]
    if token_ids and len(token_ids) < len(prompts):
        raise ParameterError("the prompts mix token ids with texts or lists; put each prompt's token ids into a list")
    return [token_ids] if token_ids else [p for p in prompts if not isinstance(p, int)]
