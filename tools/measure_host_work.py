"""Time that the host needs for a decode step, apart from the model: scheduling, books, tokens, text.

python tools/measure_host_work.py [OUT.json] [--batches 1,8,32] [--steps 500] [--model demo-moe] [--device cpu]

The step itself is left out: instead of layers, logits and the choice of tokens there is an answer, tokens of a text.
On a GPU what the host writes into its memory stays.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from subten import LLM, SamplingParams, load_model
from subten.engine.calibrate import shipped_text
from subten.engine.decode_step import DecodeStep
from subten.engine.loading import LoadedModel

PROMPT, WARM = 20, 30


class StillStep(DecodeStep):
    """Computes nothing; every sequence goes on with the same text, each from another place."""

    def answer_with(self, text: Sequence[int]) -> None:
        """From now on, instead of graphs too."""
        self._text, self._taken = torch.tensor(text), 0
        self._recorded = {}

    def _take(self, count: int, *_: object) -> tuple[Tensor, Tensor]:
        self._taken += 1
        tokens = self._text[(37 * torch.arange(count) + self._taken) % len(self._text)]
        return tokens, torch.stack([tokens, torch.ones_like(tokens)])


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step."""

    batch: int
    steps: int
    median_ms: float
    p10_ms: float
    p90_ms: float


def measure(model: LoadedModel, batch: int, steps: int) -> Row:
    """Greedy requests of as many sequences, none of which ends."""
    llm = LLM(model, kv="kv2", max_batch=batch, max_context=PROMPT + steps + 100, prefix_cache=False)
    text = llm.tokenizer.encode(shipped_text())
    llm._runner.decode_step.__class__ = StillStep
    llm._runner.decode_step.answer_with(text)
    params = SamplingParams(temperature=0, max_tokens=steps + 80, ignore_eos=True)
    for row in range(batch):
        for request in llm.intake.requests(text[PROMPT * row : PROMPT * (row + 1)], params):
            llm.loop.add(request)
    for _ in range(WARM):
        llm.loop.step()
    assert llm.stats().running == batch, "all prompts are done"
    gc.collect()
    gc.freeze()
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        llm.loop.step()
        taken.append(1000 * (time.perf_counter() - start))
    tenths = statistics.quantiles(taken, n=10)
    return Row(batch, steps, statistics.median(taken), tenths[0], tenths[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--model", default="demo-moe")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    loaded = load_model(args.model, device=args.device)
    rows = [measure(loaded, int(batch), args.steps) for batch in args.batches.split(",")]
    for row in rows:
        print(f"batch {row.batch:3}: {row.median_ms:.3f} ms per step (10% {row.p10_ms:.3f}, 90% {row.p90_ms:.3f})")
    if args.out is not None:
        device = torch.cuda.get_device_name() if loaded.device.type == "cuda" else platform.machine()
        machine = {"processor": device, "python": platform.python_version(), "torch": torch.__version__}
        args.out.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
