"""`LLM`: a model with a cache, and the loop that turns requests into text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from subten.engine.calibrate import calibration_for
from subten.engine.canary import check_quality
from subten.engine.loading import LoadedModel, load_model
from subten.engine.memory import plan_pools
from subten.engine.request import Completion, Delta, Request
from subten.engine.runner import Runner, Work
from subten.engine.sampling import SamplingParams, sample
from subten.engine.scheduler import Scheduler
from subten.engine.usage import CacheUsage
from subten.errors import ContextLengthError, ParameterError
from subten.formats import DEFAULT_FORMAT, KVFormat, PageLayout, get_format
from subten.kernels.attention import PrefillRule
from subten.kernels.select import CACHED_ATTENTION, Use, select_attention
from subten.kvcache import CacheBooks

Prompt = str | Sequence[int]


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
        chunk_size: prompt tokens per step.
        prefix_cache: keep the state at the end of prompts and answers, so that a prompt which continues one
            of them is not computed again.
        max_kld: refuse the format if it diverges from 16 bit by more than so many nats per token on the canary
            text (canary.py); None does not look.
        dtype: as in `load_model`; ignored, like `device`, for a loaded model.
        device: as in `load_model`.
        kernels: as in `load_model`; for a loaded model, `cached_attention` alone counts.
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
        chunk_size: int = 256,
        prefix_cache: bool = True,
        max_kld: float | None = None,
        dtype: str = "auto",
        device: str = "auto",
        kernels: Mapping[str, str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if chunk_size < 1:
            raise ParameterError(f"chunk_size is {chunk_size}; it must be 1 or more")
        if prefill not in ("window", "chunk"):
            raise ParameterError(f"prefill is '{prefill}'; it must be window or chunk")
        fmt = get_format(kv) if isinstance(kv, str) else kv
        self.kv = fmt.with_windows(sinks, recent)
        if not isinstance(model, LoadedModel):
            model = load_model(model, dtype=dtype, device=device, kernels=kernels, progress=progress)
        self.model = model
        self.tokenizer = model.tokenizer
        requested = (kernels or {}).get(CACHED_ATTENTION, model.attention)
        layout = PageLayout(self.kv, model.geometry.head_dim)
        attention = select_attention(Use(model.device, model.dtype, (layout,)), requested)
        self.attention = attention.name
        self.layout = replace(layout, ahead=attention.ahead)
        pools = plan_pools(
            self.layout,
            model.geometry,
            model_context=model.spec.max_positions,
            max_context=max_context,
            max_batch=max_batch,
            cache_bytes=cache_bytes,
            device=model.device,
        )
        self.max_context = pools.max_context
        if max_kld is not None:
            check_quality(model, self.kv, self.max_context, max_kld)
        self._chunk_size = chunk_size
        namespace = f"{model.fingerprint} {model.dtype} {self.kv} {prefill} {chunk_size}"
        self._books = CacheBooks(
            self.layout, pools.num_pages, pools.num_windows, hashlib.sha256(namespace.encode()).digest()
        )
        calibration = calibration_for(model) if self.kv.calibrated else None
        self._runner = Runner(
            model, self.layout, pools.num_pages, pools.num_windows, calibration, prefill, attention.load()
        )
        self._scheduler = Scheduler(self._books, self.layout, max_batch, chunk_size, prefix_cache)
        self._prefix_cache = prefix_cache
        self._usage = CacheUsage(0, 0, 0, 0)

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
            One completion per prompt, in order.

        Raises:
            ContextLengthError: a prompt is as long as the context or longer.
            ParameterError: an empty prompt, a token id outside the vocabulary, or as many `params` as do not
                match the prompts.
        """
        listed = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(listed)
        if len(params) != len(listed):
            raise ParameterError(f"there are {len(params)} params for {len(listed)} prompts; give one or one each")
        requests = [self._request(prompt, p) for prompt, p in zip(listed, params, strict=True)]
        try:
            for request in requests:
                self._scheduler.add(request)
            while any(request.finish_reason is None for request in requests):
                self._step()
        finally:
            for request in requests:
                self._scheduler.remove(request)
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Answer one prompt piece by piece. Closing the generator cancels the request and frees its pages.

        Raises:
            ContextLengthError: the prompt is as long as the context or longer.
            ParameterError: an empty prompt or a token id outside the vocabulary.
        """
        request = self._request(prompt, params or SamplingParams())
        return self._stream(request)

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
            ParameterError: no tokens, or a token id outside the vocabulary.
        """
        token_ids = self._checked(token_ids)
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
                    work = Work(self._books.append(sequence, part), part)
                    logits = self._runner.run([work], all_logits=True)
                    self._usage = self._measure()
                    yield logits
                    start = end
        finally:
            self._books.free(sequence)

    def cache_usage(self) -> CacheUsage:
        """What the cache held for the sequences of the latest step."""
        return self._usage

    def check_integrity(self) -> None:
        """Assert that the cache's books add up; for tests and for a server that is idle."""
        self._books.check_integrity()

    def _stream(self, request: Request) -> Generator[Delta, None, None]:
        self._scheduler.add(request)
        try:
            while request.finish_reason is None or request.deltas:
                while request.deltas:
                    yield request.deltas.pop(0)
                if request.finish_reason is None:
                    self._step()
        finally:
            self._scheduler.remove(request)

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        self._runner.copy(batch.copies)
        logits = self._runner.run(batch.work)
        self._usage = self._measure()
        ready = [(row, r) for row, r in enumerate(batch.requests) if not r.prefilling]
        self._take_tokens(ready, logits)
        for _, request in ready:
            at_turn = len(request.output) == 1 or request.finish_reason in ("stop", "length")
            if self._prefix_cache and request.sequence is not None and at_turn:
                self._runner.copy(self._books.snapshot(request.sequence))
            if request.finish_reason is not None:
                self._scheduler.remove(request)

    def _take_tokens(self, ready: Sequence[tuple[int, Request]], logits: Tensor) -> None:
        rows = logits[[row for row, _ in ready]]
        finite = torch.isfinite(rows).all(-1).tolist()
        for (_, request), fine in zip(ready, finite, strict=True):
            if not fine:
                request.fail("the model's logits are not finite for this request; its weights or input are damaged")
        going = [index for index, fine in enumerate(finite) if fine]
        if going:
            tokens = sample(rows[going], [ready[index][1].sample_row() for index in going])
            for index, token in zip(going, tokens.tolist(), strict=True):
                ready[index][1].take(token)

    def _measure(self) -> CacheUsage:
        geometry, lengths = self.model.geometry, self._books.lengths()
        tokens = sum(lengths)
        held = self._books.held_pages() * self.layout.page_bytes(geometry)
        held += len(lengths) * self.layout.window_bytes(geometry)
        elements = geometry.elements(tokens)
        return CacheUsage(tokens, elements, held, 2 * elements)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        token_ids = self._checked(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if len(token_ids) >= self.max_context:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens and the context {self.max_context}, which must hold the "
                "answer too; shorten the prompt"
            )
        max_length = min(self.max_context, len(token_ids) + params.max_tokens)
        return Request(tuple(token_ids), params, self.tokenizer, max_length)

    def _checked(self, token_ids: Sequence[int]) -> Sequence[int]:
        if not token_ids:
            raise ParameterError("the prompt has no tokens; give it some text")
        vocab = self.model.spec.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab:
                raise ParameterError(f"token id {token} is outside the model's vocabulary of {vocab}")
        return token_ids


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [[p for p in prompts if isinstance(p, int)]]
    return [p for p in prompts if not isinstance(p, int)]
