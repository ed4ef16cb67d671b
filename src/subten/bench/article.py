"""The tables of docs/benchmarks/README.md, from committed measurements: no number in them stands anywhere else.

What was not measured has no row, and a section without rows is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from subten.bench.latency_cases import BATCHES_TRIED
from subten.bench.linear_report import KERNELS as LINEAR_KERNELS
from subten.bench.published import Measured, Published, Row
from subten.bench.shapes import MAIN_CONTEXT, context_name
from subten.formats import CacheGeometry, PageLayout, get_format
from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH

PICTURES = ("latency.png", "roofline.png", "moe.png", "attention.png")
"""Files beside the document, each there where its section is."""

LIMIT_MS = 10.0
"""Below which a p99 is wanted, where no search for the largest batch says otherwise."""

_OURS = "kv2"
_SEED = "seed-32b-a7b"
_BY_KERNEL = 6


def render(found: Published) -> str:
    """All sections, in Markdown; empty where nothing was measured."""
    sections = [
        _article_table(found),
        _claims(found),
        _steps(found.steps),
        _profiles(found.steps),
        _prompts(found.prefill),
        _itl(found.itl),
        _moe(found.moe),
        _linear(found.linear),
        _attention(found.attention),
    ]
    written = [section for section in sections if section]
    return "\n\n".join(["## Results", *written]) if written else ""


# --- decode steps ----------------------------------------------------------------------------------------------


def _article_table(found: Published) -> str:
    steps = drawn_steps(found.steps)
    rows = [row for row in steps if row["batch"] == 1]
    if not rows:
        return ""
    limit = _limit(found)
    lines = [
        [
            row["shape"],
            row["kv"],
            row["moe"],
            _figure(row["p50_ms"], ".2f"),
            _figure(row["p99_ms"], ".2f"),
            _figure(row["p99_over_p50"], ".3f"),
            _figure(row["share"], ".0%"),
            _figure(row["cache_gb"], ".2f"),
            _figure(row["bits"], ".2f"),
            _largest_batch(found, _case(row)),
        ]
        for row in _in_order(rows)
    ]
    below = f"largest batch below {limit:g} ms"
    head = ["shape", "KV", "MoE", "p50 ms", "p99 ms", "p99/p50", "of reading", "cache GB", "bits", below]
    text = (
        f"One sequence of {context_name(MAIN_CONTEXT)} tokens: milliseconds of a decode step. "
        '"Of reading" is the time in which the machine reads the bytes that such a step must read, over the time it '
        "takes. A batch with `≥` is the largest that was tried, or that fits; of a range, only what is beyond it was "
        "too slow."
    )
    return "\n\n".join(["### The table", text, _table(head, lines, names=3), _provenance(found.steps)])


def _limit(found: Published) -> float:
    """What the largest batch is to stay below."""
    return min((row["limit_ms"] for row in _searched(found)), default=LIMIT_MS)


def _searched(found: Published) -> list[Row]:
    return [row for row in found.largest.rows if row["context"] == MAIN_CONTEXT]


def _largest_batch(found: Published, case: tuple[str, str, str]) -> str:
    """As a search found it, or from the batches of the case that were measured."""
    for row in _searched(found):
        if _case(row) == case:
            if row["batch"] is None:
                return "none"
            return f"{row['batch']}" if row["next_batch"] is not None else f"≥ {row['batch']}"
    return _bracket([step for step in drawn_steps(found.steps) if _case(step) == case], _limit(found))


def _bracket(steps: Sequence[Row], limit: float) -> str:
    """Where the largest batch below a limit is."""
    slow = min((row["batch"] for row in steps if row["p99_ms"] >= limit), default=None)
    fast = [row["batch"] for row in steps if slow is None or row["batch"] < slow]
    if not fast:
        return "none" if slow == 1 else ""
    least = max(fast)
    if slow is None:
        return f"≥ {least}"
    most = max(batch for batch in BATCHES_TRIED if batch < slow)
    return f"{least}" if least == most else f"{least} to {most}"


def _claims(found: Published) -> str:
    steps = drawn_steps(found.steps)
    lines = []
    bits = [row["bits"] for row in steps if row["kv"] == _OURS]
    if bits:
        geometry = CacheGeometry(32, 8, 128)
        wide, coded = (
            PageLayout(get_format(name), 128, ahead=1).cache_bytes(geometry, 65536, 32) / 2**30
            for name in ("bf16", _OURS)
        )
        lines.append(
            [
                "the KV cache shrinks by 75%",
                f"`{_OURS}` takes {_span(bits, '.2f')} bits per element at "
                f"{context_name(MAIN_CONTEXT)}, windows and all: {1 - max(bits) / 16:.0%} less than 16 bit",
            ]
        )
        lines.append(
            [
                "batch 32 at 64k in 16 bit takes over 64 GB",
                f"by the byte formula, 32 layers of 8 KV heads of 128 channels take {wide:.0f} GiB in 16 bit, and "
                f"{coded:.0f} GiB in `{_OURS}`",
            ]
        )
    for row in _in_order(row for row in steps if row["shape"] == _SEED and row["batch"] == 1):
        if row["kv"] in (_OURS, "bf16"):
            lines.append(
                [
                    f"a token in less than 10 ms, 8 experts, 32B parameters, 7B active: {row['kv']}, {row['moe']}",
                    f"p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms at batch 1",
                ]
            )
    by_shape: dict[str, list[str]] = {}
    for row in _in_order(row for row in steps if row["batch"] == 1 and row["moe"] == "fused"):
        by_shape.setdefault(row["shape"], []).append(f"{_largest_batch(found, _case(row))} over {row['kv']}")
    lines += [
        [f"the same, by batch: `{shape}`, fused, {context_name(MAIN_CONTEXT)}", f"up to batch {', '.join(batches)}"]
        for shape, batches in by_shape.items()
    ]
    ratios: dict[int, list[float]] = {}
    for row in _in_order(_with_figures(found.steps)):
        if row["moe"] == "fused" and row["kv"] == _OURS:
            ratios.setdefault(row["context"], []).append(row["p99_over_p50"])
    if ratios:
        spans = (f"{_span(of, '.3f')} at {context_name(context)}" for context, of in sorted(ratios.items()))
        lines.append(
            ["latency is deterministic", f"p99/p50 of fused steps over `{_OURS}` is {', '.join(spans)}, all batches"]
        )
    if not lines:
        return ""
    return "\n\n".join(["### The article's claims", _table(["the article says", "measured"], lines, names=2)])


def _steps(measured: Measured) -> str:
    rows = _with_figures(measured)
    if not rows:
        return ""
    parts = [
        "### Steps by batch",
        'p50 / p99 in ms; "host" is what the host alone takes of a step at the largest batch, measured with graphs '
        "that do nothing.",
        *_remarks(rows),
    ]
    unusual = _unusual(rows)
    for shape in _unique(row["shape"] for row in rows):
        own = [row for row in rows if row["shape"] == shape]
        batches = sorted({row["batch"] for row in own})
        lines = []
        for context, kv, moe in _unique((r["context"], r["kv"], r["moe"]) for r in _in_order(own)):
            of = {r["batch"]: r for r in own if (r["context"], r["kv"], r["moe"]) == (context, kv, moe)}
            cells = [_times(of[batch], unusual) if batch in of else "" for batch in batches]
            host = _figure(of[max(of)]["host_ms"], ".2f")
            lines.append([context_name(context), kv, moe, *cells, host])
        head = ["context", "KV", "MoE", *(f"batch {batch}" for batch in batches), "host"]
        parts += [f"`{shape}`:", _table(head, lines, names=3)]
    reasons = _reasons([row for row in measured.rows if row["p50_ms"] is None])
    if reasons:
        parts += ["Without a figure:", "\n".join(reasons)]
    if drawn_steps(measured):
        parts += ["![p99 by batch](latency.png)", "![Share of the time that is reading](roofline.png)"]
    return "\n\n".join(parts)


def _usual(rows: Sequence[Row]) -> str | None:
    """The remark of most rows; None is to have none."""
    notes: list[str | None] = [row["note"] for row in rows]
    return max(notes, key=notes.count)


def _unusual(rows: Sequence[Row]) -> list[str | None]:
    """Remarks that the others have."""
    return [note for note in _unique(row["note"] for row in rows) if note != _usual(rows)]


def _remarks(rows: Sequence[Row]) -> list[str]:
    """What is said of the rows in front of their tables: of most of them, and of those with a star."""
    usual = _usual(rows)
    said = [] if usual is None else [f"Of all without a star, {usual}."]
    starred = [f"- \\* {note or 'nothing else ran on this host'}" for note in _unusual(rows)]
    return said + (["\n".join(starred)] if starred else [])


def _times(row: Row, starred: Sequence[str | None]) -> str:
    return f"{row['p50_ms']:.2f} / {row['p99_ms']:.2f}" + r"\*" * (row["note"] in starred)


def _reasons(rows: Sequence[Row]) -> list[str]:
    """A line for the rows of one shape and cache, with the smallest batch's reason."""
    lines = []
    for shape, context, kv in _unique((r["shape"], r["context"], r["kv"]) for r in _in_order(rows)):
        own = [row for row in rows if (row["shape"], row["context"], row["kv"]) == (shape, context, kv)]
        batches = sorted({row["batch"] for row in own})
        first = next(row["note"] for row in own if row["batch"] == batches[0])
        number = ", ".join(map(str, batches))
        lines.append(f"- `{shape}`, {context_name(context)}, {kv}, batch {number}: {first}")
    return lines


def _profiles(measured: Measured) -> str:
    rows = [row for row in _with_figures(measured) if row["profile"]]
    if not rows:
        return ""
    parts = [
        "### Where the time of a step goes",
        "Kernels of one step, by what all launches of each take together. A kernel may begin before the one in front "
        "of it has ended, and then waits for it: that is part of its time here, so that all together are more than a "
        "step.",
    ]
    for row in _in_order(rows):
        profile = row["profile"]
        lines = [
            [
                f"`{kernel['name'][:60]}`",
                f"{kernel['us']:.0f}",
                f"{kernel['launches']:.0f}",
                f"{kernel['us'] / profile['us']:.0%}",
            ]
            for kernel in profile["kernels"][:_BY_KERNEL]
        ]
        title = f"{_named(row)}: {profile['us']:.0f} us in {profile['launches']:.0f} launches"
        title += f" (source {row['profile_source']})"
        parts += [title, _table(["kernel", "us", "launches", "share"], lines, names=1)]
    return "\n\n".join(parts)


def _prompts(measured: Measured) -> str:
    rows = _with_figures(measured)
    if not rows:
        return ""
    lines = [
        [
            row["shape"],
            row["kv"],
            context_name(row["context"]),
            str(row["chunk_size"]),
            f"{row['p50_ms']:.1f}",
            f"{row['max_ms']:.1f}",
            f"{row['host_ms']:.1f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['tflop_per_s']:.0f}",
            f"{row['floor_ms']:.1f}",
            f"{row['share']:.0%}",
        ]
        for row in rows
    ]
    head = [
        "shape",
        "KV",
        "context",
        "chunk",
        "p50 ms",
        "slowest",
        "host ms",
        "tokens/s",
        "TFLOP/s",
        "floor ms",
        "share",
    ]
    text = (
        "A chunk of a prompt behind a context of one sequence. The floor is the longer one of its products, at the "
        "rate of a large one in 16 bit, and reading all once. Where the host takes as long as the chunk, the host "
        "bounds it."
    )
    return "\n\n".join(["### Prompts", text, _table(head, lines, names=2), _provenance(measured)])


def _itl(measured: Measured) -> str:
    rows = [row for row in measured.rows if row["p50_ms"] is not None]
    if not rows:
        return ""
    lines = [
        [
            row["shape"],
            row["kv"],
            f"{context_name(row['prompt'])} in chunks of {row['chunk_size']}",
            _budget(row),
            f"{_figure(row['alone_p50_ms'], '.2f')} / {_figure(row['alone_p99_ms'], '.2f')}",
            f"{row['p50_ms']:.2f} / {row['p99_ms']:.2f}",
            f"{row['max_ms']:.2f}",
            _figure(row["within"], ".1%"),
            _figure(row["prompt_s"], ".1f"),
        ]
        for row in rows
    ]
    head = [
        "shape",
        "KV",
        "prompt",
        "budget ms",
        "alone",
        "beside it",
        "slowest",
        "within",
        "first token of the prompt s",
    ]
    text = "A stream while a long prompt is computed beside it: from token to token, p50 / p99 in ms."
    notes = "\n".join(
        f"- {row['shape']}, {row['kv']}, budget {_budget(row)}: {row['note']}" for row in rows if row["note"]
    )
    parts = ["### A prompt beside a stream", text, _table(head, lines, names=3), notes, _provenance(measured)]
    return "\n\n".join(filter(None, parts))


def _budget(row: Row) -> str:
    return _figure(row["budget_ms"], "g") or "none"


# --- kernels ---------------------------------------------------------------------------------------------------


def _moe(measured: Measured) -> str:
    parts = [part for part in (_moe_launches(measured), _moe_prompts(measured)) if part]
    return "\n\n".join(["### Mixtures of experts", *parts, _provenance(measured)]) if parts else ""


def _moe_launches(measured: Measured) -> str:
    rows = drawn_moe(measured)
    if not rows:
        return ""
    lines = [
        [
            row["shape"],
            row["weights"],
            row["kernel"],
            row["activations"],
            row["sums"],
            str(row["tokens"]),
            f"{row['us']:.1f}",
            f"{row['floor_us']:.1f}",
            f"{row['share']:.0%}",
            _figure(row["peer_us"], ".1f"),
            row["peer"] or "",
            _figure(row["ratio"], ".2f"),
        ]
        for row in rows
    ]
    head = [
        "shape",
        "weights",
        "kernel",
        "activations",
        "sums",
        "tokens",
        "us",
        "floor us",
        "share",
        "peer us",
        "fastest peer",
        "peer/ours",
    ]
    return "\n\n".join(
        [
            "One block in one launch, from the router's logits to the output. The floor is reading the experts. The "
            "picture has those in FP8 by blocks, where there are any, and sums with the same bits in any order.",
            _table(head, lines, names=5),
            "![One block: ours, floor and peers](moe.png)",
        ]
    )


def _moe_prompts(measured: Measured) -> str:
    """Ways side by side: a column for each kernel with its activations and sums, and for each peer."""
    cases: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in measured.rows:
        if row["tokens"] > MOST_TOKENS_OF_A_LAUNCH and row["us"] is not None:
            ways = cases.setdefault((row["shape"], row["weights"], row["tokens"]), {})
            ways[f"{row['kernel']} {row['activations']} {row['sums']}"] = row["us"]
            ways |= {f"({name})": us for name, us in row["peers"].items()}
    if not cases:
        return ""
    columns = sorted(_unique(way for ways in cases.values() for way in ways), key=lambda way: way.startswith("("))
    lines = [
        [shape, weights, str(tokens), *(_figure(ways.get(way), ".0f") for way in columns)]
        for (shape, weights, tokens), ways in cases.items()
    ]
    return "\n\n".join(
        [
            "Prompts, us of one block: in launches for 64 tokens, one behind the other, and `unfused`, where experts "
            "in FP8 are restored in the call. Peers are in parentheses; `unfused bf16` has its experts restored "
            "beforehand.",
            _table(["shape", "weights", "tokens", *columns], lines, names=2),
        ]
    )


def _linear(measured: Measured) -> str:
    rows = drawn_linear(measured)
    if not rows:
        return ""
    lines = [
        [
            row["layer"],
            f"{row['outputs']}x{row['inputs']}",
            row["weights"],
            row["kernel"],
            str(row["tokens"]),
            f"{row['us']:.2f} ({row['us_p10']:.2f}, {row['us_p90']:.2f})",
            f"{row['floor_us']:.2f}",
            f"{row['share']:.0%}",
            _figure(row["peer_us"], ".2f"),
            row["peer"] or "",
            _figure(row["ratio"], ".2f"),
        ]
        for row in rows
    ]
    head = [
        "layer",
        "outputs x inputs",
        "weights",
        "kernel",
        "tokens",
        "us (p10, p90)",
        "floor us",
        "share",
        "peer us",
        "fastest peer",
        "peer/ours",
    ]
    text = (
        "One layer in one launch, with its norm or residual, in a chain of its copies. The floor is reading weights "
        "and tokens. Peers compute the product alone."
    )
    return "\n\n".join(["### Linear layers", text, _table(head, lines, names=4), _provenance(measured)])


def _attention(measured: Measured) -> str:
    rows = [row for row in measured.rows if row["us"] is not None and row["context"] == MAIN_CONTEXT]
    if not rows:
        return ""
    lines = [
        [
            f"{row['batch']}x{row['kv_heads']}x{row['group']}",
            row["format"] + (" + mean key" if row["mean_key"] else ""),
            row["kernel"],
            f"{row['us']:.1f}",
            _figure(row["baseline_us"], ".1f"),
            _figure(row["fa3_us"], ".1f"),
            _figure(row["fa3_fp8_us"], ".1f"),
            _figure(row["ratio"], ".2f"),
            _figure(row["read_share"], ".0%"),
        ]
        for row in rows
    ]
    head = [
        "batch x KV heads x group",
        "cache",
        "kernel",
        "us",
        "torch 16 bit",
        "FA3 16 bit",
        "FA3 FP8",
        "torch/ours",
        "of reading",
    ]
    parts = [
        "### Attention",
        f"One layer at {context_name(MAIN_CONTEXT)}, heads of 128 channels; microseconds.",
        _table(head, lines, names=3),
    ]
    if drawn_attention(measured):
        parts.append("![Attention: speed against 16 bit by context](attention.png)")
    return "\n\n".join([*parts, _provenance(measured)])


# --- what is drawn ---------------------------------------------------------------------------------------------


def drawn_steps(measured: Measured) -> list[Row]:
    """Steps at the main context."""
    return [row for row in _with_figures(measured) if row["context"] == MAIN_CONTEXT]


def drawn_moe(measured: Measured) -> list[Row]:
    """All blocks of up to one launch that have a figure."""
    return [row for row in measured.rows if row["us"] is not None and row["tokens"] <= MOST_TOKENS_OF_A_LAUNCH]


def pictured_moe(measured: Measured) -> list[Row]:
    """Of each shape, weights by blocks if there are any, with fixed sums."""
    rows = [row for row in drawn_moe(measured) if row["sums"] == "fixed"]
    by_block = {row["shape"] for row in rows if row["weights"] == "block"}
    return [row for row in rows if row["weights"] == "block" or row["shape"] not in by_block]


def drawn_linear(measured: Measured) -> list[Row]:
    """Of each layer and number of tokens the kernel that is chosen, of those that have a figure."""
    rows = [row for row in measured.rows if row["us"] is not None]
    found: dict[Any, Row] = {}
    for row in sorted(rows, key=lambda row: LINEAR_KERNELS.index(row["kernel"])):
        found.setdefault(_linear_case(row), row)
    return [row for row in rows if found[_linear_case(row)] is row]


def _linear_case(row: Row) -> tuple[Any, ...]:
    return tuple(row[part] for part in ("layer", "outputs", "inputs", "tokens", "weights"))


def drawn_attention(measured: Measured) -> list[Row]:
    """Attention without the term of a mean key, where there is one in 16 bit to compare it with."""
    return [row for row in measured.rows if row["ratio"] is not None and not row["mean_key"]]


def _span(figures: Sequence[float], spec: str) -> str:
    """Least and largest of them; one, where they are printed alike."""
    least, largest = format(min(figures), spec), format(max(figures), spec)
    return least if least == largest else f"{least} to {largest}"


# --- Markdown --------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], names: int) -> str:
    """The first `names` columns are text."""
    marks = ["---"] * names + ["---:"] * (len(head) - names)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, marks, *lines))


def _provenance(measured: Measured) -> str:
    said = _unique(
        f"[{name}](../../benchmarks/results/{name}): {machine['device']}, which reads "
        f"{machine['read_tb_per_s']:.2f} TB/s; torch {machine['torch']}, Triton {machine['triton']}, driver "
        f"{machine['driver']}; source {machine['commit']}."
        for name, machine in measured.runs
    )
    return "\n".join(said)


def _with_figures(measured: Measured) -> list[Row]:
    return [row for row in measured.rows if row["p50_ms"] is not None]


def _named(row: Row) -> str:
    return f"`{row['shape']}`, batch {row['batch']}, {context_name(row['context'])}, {row['kv']}, {row['moe']}"


def _case(row: Row) -> tuple[str, str, str]:
    return row["shape"], row["kv"], row["moe"]


def _in_order(rows: Iterable[Row]) -> list[Row]:
    """By shape as they come, then from what others do to what we do."""
    listed = list(rows)
    shapes = _unique(row["shape"] for row in listed)
    kinds = {"bf16": 0, "fp8": 1, "int4": 2, "kv4": 3, _OURS: 4}
    return sorted(
        listed,
        key=lambda r: (
            shapes.index(r["shape"]),
            r["context"],
            kinds.get(r["kv"], 5),
            r["kv"],
            -(r["moe"] == "unfused"),
            r.get("batch") or 0,
        ),
    )


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _figure(x: float | None, spec: str) -> str:
    return "" if x is None else f"{x:{spec}}"
