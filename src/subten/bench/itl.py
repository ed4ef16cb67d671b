"""Tokens of running streams while a long prompt is computed beside them, by the engine's own loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter

import torch

from subten.bench import model_shapes
from subten.bench.filled_cache import CacheKind
from subten.bench.latency import BenchModel, release_memory, undisturbed
from subten.bench.latency_cases import with_moe
from subten.bench.latency_report import percentile
from subten.bench.latency_session import load
from subten.bench.machine import describe, first_line, measured_device, require_sound_device
from subten.bench.recording import Recorder
from subten.bench.shapes import context_name, parse_context
from subten.bench.terminal import announce, names
from subten.engine.graphs import GraphRecorder
from subten.engine.intake import Intake
from subten.engine.loop import EngineLoop
from subten.engine.pacing import Pacer
from subten.engine.request import Request
from subten.engine.runner import Runner
from subten.engine.sampling import SamplingParams
from subten.engine.scheduler import Policy, Scheduler
from subten.errors import ContextLengthError, ParameterError, SubtenError
from subten.formats import KVFormat, get_format
from subten.kvcache import CacheBooks
from subten.models.spec import DecoderSpec
from subten.outputs import OutputFile

_STREAM_PROMPT = 256
_WARM_CHUNKS = 3
"""Of a prompt beside the streams before anything is measured: kernels of prompts are compiled by it."""
_ALONE = 200
"""Tokens of the streams while nothing else runs."""
_SPARE = 2
"""Tokens of a stream: the one that its own prompt gives, and one that never comes."""
_NONE = "none"


@dataclass(frozen=True)
class ItlWishes:
    """What is measured.

    Attributes:
        prompt: tokens of the long prompt.
        chunk_size: of its steps.
        streams: that run beside it.
        seconds: after which it is left as it is.
    """

    prompt: int
    chunk_size: int
    streams: int
    seconds: float


@dataclass(frozen=True)
class ItlRow:
    """Streams beside a prompt. A figure that is not there is None; `note` says why.

    Attributes:
        shape: name of the model.
        kv: format of the cache.
        prompt: tokens of the long prompt, its last chunk left out.
        chunk_size: of its steps.
        streams: that run beside it.
        budget_ms: from one token of a stream to the next; None is a whole chunk after each token.
        alone_p50_ms: from token to token while nothing else runs.
        alone_p99_ms: likewise.
        tokens: of a stream while the prompt was computed.
        p50_ms: from token to token meanwhile.
        p99_ms: likewise.
        max_ms: likewise.
        within: share of these times that are not above the budget; None without one.
        prompt_s: seconds until the prompt had its first token.
        note: why a figure is not there, or None.
    """

    shape: str
    kv: str
    prompt: int
    chunk_size: int
    streams: int
    budget_ms: float | None
    alone_p50_ms: float | None = None
    alone_p99_ms: float | None = None
    tokens: int | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    within: float | None = None
    prompt_s: float | None = None
    note: str | None = None


class _Streams:
    """An engine's loop over an empty cache, and streams that run in it."""

    def __init__(self, model: BenchModel, fmt: KVFormat, wishes: ItlWishes, budget_ms: float | None) -> None:
        loaded = model.loaded
        kind = CacheKind.of(loaded, fmt, _context(wishes, loaded.spec, budget_ms))
        layout, batch = kind.layout, wishes.streams + 1
        pages = batch * (layout.pages_for(kind.context) + 1)
        books = CacheBooks(layout, pages, batch)
        runner = Runner(
            loaded,
            layout,
            pages,
            batch,
            model.calibration(fmt, mean_key=False),
            "chunk",
            kind.choice.load(),
            batch,
            kind.context,
            GraphRecorder(loaded.device) if loaded.device.type == "cuda" else None,
        )
        scheduler = Scheduler(books, runner.storage, layout, Policy(batch, wishes.chunk_size, False, None))
        pacer = Pacer(None if budget_ms is None else budget_ms / 1000)
        self._loop = EngineLoop(runner, scheduler, pacer, snapshots=False)
        self._intake = Intake(loaded.tokenizer, loaded.spec.vocab_size, kind.context)
        self._vocab_size = loaded.spec.vocab_size
        self._running: list[Request] = []
        for _ in range(wishes.streams):
            self._running.append(self.begin(_STREAM_PROMPT, kind.context - _STREAM_PROMPT))

    def begin(self, prompt: int, tokens: int) -> Request:
        """Another request, of random tokens."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        (request,) = self._intake.requests(torch.randint(self._vocab_size, (prompt,)).tolist(), params)
        self._loop.add(request)
        return request

    def gaps(self, until: Callable[[], bool]) -> list[float]:
        """Seconds from one token of the first stream to the next, in the hands of who takes the steps."""
        first, found, before = self._running[0], list[float](), perf_counter()
        while not until():
            count = len(first.output)
            self._loop.step()
            for request in self._running:
                request.deltas.clear()
            if len(first.output) > count:
                now = perf_counter()
                found.append(now - before)
                before = now
            if first.finish_reason is not None:
                break
        return found

    def tokens(self) -> int:
        """Of the first stream so far."""
        return len(self._running[0].output)


def measure_itl(model: BenchModel, shape: str, fmt: KVFormat, wishes: ItlWishes, budget_ms: float | None) -> ItlRow:
    """Streams alone, and then beside a prompt.

    Raises:
        SubtenError: a subclass says what can't be had.
    """
    streams = _Streams(model, fmt, wishes, budget_ms)
    warm = streams.begin(_warm_tokens(wishes), 1)
    streams.gaps(lambda: warm.finish_reason is not None)
    deadline = monotonic() + wishes.seconds
    with undisturbed():
        enough = streams.tokens() + _ALONE
        alone = streams.gaps(lambda: streams.tokens() >= enough or monotonic() > deadline)
        start = perf_counter()
        # Whole chunks, as those that nothing has to be compiled for.
        prompt = streams.begin(wishes.prompt - wishes.chunk_size, 1)
        beside = streams.gaps(lambda: prompt.finish_reason is not None or monotonic() > deadline)
        seconds = perf_counter() - start
    done = prompt.finish_reason is not None
    return ItlRow(
        shape=shape,
        kv=fmt.name,
        prompt=wishes.prompt,
        chunk_size=wishes.chunk_size,
        streams=wishes.streams,
        budget_ms=budget_ms,
        alone_p50_ms=1000 * percentile(alone, 50) if alone else None,
        alone_p99_ms=1000 * percentile(alone, 99) if alone else None,
        tokens=len(beside),
        p50_ms=1000 * percentile(beside, 50) if beside else None,
        p99_ms=1000 * percentile(beside, 99) if beside else None,
        max_ms=1000 * max(beside) if beside else None,
        within=None if budget_ms is None or not beside else sum(g <= budget_ms / 1000 for g in beside) / len(beside),
        prompt_s=seconds if done else None,
        note=None if done else _unfinished(prompt, seconds),
    )


def run_itl(
    models: str, kv: str, budget: str, wishes: ItlWishes, json_path: Path | None, device: str, commit: str | None
) -> bool:
    """Measure, print and save; whether every row has its figures.

    Raises:
        ParameterError: a list that makes no sense.
        ContextLengthError: a model takes fewer tokens than the prompt has, or a stream beside it may need.
        KernelUnavailableError: there is no GPU, or it stopped working.
        StorageError: the file can't be written.
    """
    shapes = model_shapes.chosen_models(models)
    formats, budgets = [get_format(name) for name in names(kv)], _budgets(budget)
    for shape in shapes:
        _require_room(shape, wishes, budgets)
    target = measured_device(device)
    file = None if json_path is None else OutputFile(json_path)
    recorder, rows = Recorder(describe(target, commit), file), list[ItlRow]()
    announce(recorder.machine)
    for shape in shapes:
        model = load(shape, "channel", target)
        model = replace(model, loaded=with_moe(model.loaded, "fused")[0])
        for fmt in formats:
            for budget_ms in budgets:
                try:
                    row = measure_itl(model, shape, fmt, wishes, budget_ms)
                except (SubtenError, RuntimeError) as failure:
                    if target.type == "cuda":
                        require_sound_device(failure)
                    numbers = wishes.prompt, wishes.chunk_size, wishes.streams
                    row = ItlRow(shape, fmt.name, *numbers, budget_ms, note=first_line(failure))
                release_memory(target)
                rows.append(row)
                recorder.take(itl_line(row), itl=rows)
        del model
        release_memory(target)
    return all(row.note is None for row in rows)


def itl_line(row: ItlRow) -> str:
    """A row on one line."""
    budget = "whole chunks" if row.budget_ms is None else f"budget {row.budget_ms:g} ms"
    head = f"{row.shape} {row.kv}, prompt of {context_name(row.prompt)} in chunks of {row.chunk_size}, {budget}:"
    if row.p50_ms is None:
        return f"{head} no figure: {row.note}"
    return (
        f"{head} alone p50 {row.alone_p50_ms:.2f} p99 {row.alone_p99_ms:.2f} ms; beside it p50 {row.p50_ms:.2f} "
        f"p99 {row.p99_ms:.2f} max {row.max_ms:.2f} ms over {row.tokens} tokens"
        + ("" if row.within is None else f", {row.within:.1%} within")
        + ("" if row.prompt_s is None else f"; the prompt took {row.prompt_s:.1f} s")
        + (f" ({row.note})" if row.note else "")
    )


def parse_wishes(prompt: str, chunk_size: int, streams: int, seconds: float) -> ItlWishes:
    """From the command line.

    Raises:
        ParameterError: the prompt is not longer than that of a stream, or than a chunk.
    """
    tokens, least = parse_context(prompt), 2 * max(_STREAM_PROMPT, chunk_size)
    if tokens < least:
        raise ParameterError(f"--prompt has {tokens} tokens; with chunks of {chunk_size} it takes {least} or more")
    return ItlWishes(tokens, chunk_size, streams, seconds)


def _budgets(text: str) -> list[float | None]:
    try:
        found = [None if name == _NONE else float(name) for name in names(text)]
    except ValueError as error:
        raise ParameterError(
            f"--budget is '{text}'; it takes milliseconds or {_NONE}, separated by commas"
        ) from error
    if not found or any(ms is not None and not ms > 0 for ms in found):
        raise ParameterError(f"--budget is '{text}'; it takes milliseconds or {_NONE}, separated by commas")
    return found


def _context(wishes: ItlWishes, spec: DecoderSpec, budget_ms: float | None) -> int:
    """Tokens of the longest sequence: the prompt, or a stream that must not end before the prompt is computed."""
    chunk = wishes.chunk_size
    of_prompts = [_STREAM_PROMPT] * (wishes.streams - 1) + [_warm_tokens(wishes), wishes.prompt - chunk]
    chunks = sum(-(-tokens // chunk) for tokens in of_prompts)
    # With a budget, there may be a token behind every layer of a chunk.
    tokens = _ALONE + chunks * (1 if budget_ms is None else spec.num_layers)
    return max(wishes.prompt, _STREAM_PROMPT + tokens + _SPARE)


def _warm_tokens(wishes: ItlWishes) -> int:
    return min(_WARM_CHUNKS * wishes.chunk_size, wishes.prompt // 2)


def _require_room(shape: str, wishes: ItlWishes, budgets: Sequence[float | None]) -> None:
    spec = model_shapes.spec_of(shape)
    room = spec.max_positions
    if wishes.prompt > room:
        raise ContextLengthError(f"--prompt has {wishes.prompt} tokens, and {shape} takes {room}; shorten the prompt")
    longest = max(_context(wishes, spec, budget_ms) for budget_ms in budgets)
    if longest > room:
        raise ContextLengthError(
            f"a stream beside this prompt may need {longest} tokens, and {shape} takes {room}; "
            "take a shorter prompt, larger chunks or fewer streams"
        )


def _unfinished(prompt: Request, seconds: float) -> str:
    return f"after {seconds:.0f} s {prompt.cached} of {len(prompt.prompt)} tokens of the prompt were computed"
