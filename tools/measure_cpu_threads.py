"""How fast models are on a CPU by the number of threads, alone and beside programs that keep the cores busy.

python tools/measure_cpu_threads.py OUT.json [--models demo-moe,smollm2] [--threads 1,2] [--busy 4]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from subten import LLM, SamplingParams
from subten.bench.host import describe_host
from subten.engine import load_model

PROMPT, ANSWER, TIMES = 700, 60, 3
TEXT = "The government of the United States is bound by what its Constitution says. "


def main() -> None:
    """Parse the command line, measure, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="demo-moe,smollm2")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--formats", default="kv2,bf16")
    parser.add_argument("--busy", type=int, default=4, help="programs beside it")
    args = parser.parse_args()
    host, rows = describe_host(), []
    for busy in (0, args.busy):
        with busy_programs(busy):
            for model in args.models.split(","):
                for threads in map(int, args.threads.split(",")):
                    for kv in args.formats.split(","):
                        row = {"model": model, "kv": kv, "threads": threads, "busy_programs": busy}
                        rows.append(row | measure(model, kv, threads))
                        print(rows[-1], flush=True)
    what = f"a prompt of {PROMPT} tokens and {ANSWER} greedy tokens after it, batch 1, float32; best of {TIMES}"
    content = {"what": what, "host": host | {"torch": torch.__version__}, "rows": rows}
    args.out.write_text(json.dumps(content, indent=1) + "\n")


def measure(model: str, kv: str, threads: int) -> dict[str, float]:
    """Seconds of the prompt, and tokens per second after it."""
    torch.set_num_threads(threads)
    loaded = load_model(model, device="cpu")
    llm = LLM(loaded, kv=kv, max_context=PROMPT + ANSWER, max_batch=1, prefix_cache=False)
    prompt = loaded.tokenizer.encode(TEXT * PROMPT)[:PROMPT]
    prefills, rates = [], []
    for _ in range(TIMES):
        start = time.perf_counter()
        answer = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True))
        next(answer)
        first = time.perf_counter()
        tokens = sum(len(delta.token_ids) for delta in answer)
        prefills.append(first - start)
        rates.append(tokens / (time.perf_counter() - first))
    return {"prefill_s": round(min(prefills), 3), "tokens_per_second": round(max(rates), 1)}


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """So many that compute without end."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


if __name__ == "__main__":
    main()
