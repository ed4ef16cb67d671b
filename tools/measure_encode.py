"""What coding costs a CPU: share of a prefill, and of decoding, that goes into turning tokens into codes.

python tools/measure_encode.py MODEL TEXT OUT.json [--tokens 2048] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from subten import LLM, SamplingParams
from subten.engine import load_model
from subten.evals.figures import versions
from subten.kernels.attention import append

ANSWER = 64


def main() -> None:
    """Parse the command line, measure, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", default="kv2,kv2-plain,kv4,bf16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.model, device="cpu")
    tokens = min(args.tokens, model.spec.max_positions - ANSWER - 1)
    prompt = model.tokenizer.encode(args.text.read_text()[: tokens * 12], add_special_tokens=False)[:tokens]
    spent = 0.0
    write = append.write_tokens

    def timed(*arguments: Any) -> None:
        nonlocal spent
        start = time.perf_counter()
        write(*arguments)
        spent += time.perf_counter() - start

    append.write_tokens = timed
    rows = []
    for name in args.formats.split(","):
        llm = LLM(model, kv=name, max_context=tokens + ANSWER + 1, max_batch=1, prefix_cache=False)
        answer = llm.stream(prompt, SamplingParams(max_tokens=ANSWER + 1, temperature=0))
        spent, start = 0.0, time.perf_counter()
        next(answer)
        prefill, prefill_coding = time.perf_counter() - start, spent
        start = time.perf_counter()
        count = sum(len(delta.token_ids) for delta in answer)
        decode = time.perf_counter() - start
        row = {
            "model": model.name,
            "format": name,
            "tokens": tokens,
            "threads": args.threads,
            "prefill_s": prefill,
            "prefill_coding_s": prefill_coding,
            "prefill_coding_share": prefill_coding / prefill,
            "decode_tokens_per_s": count / decode,
            "decode_coding_share": (spent - prefill_coding) / decode,
        }
        print(f"{name:10s} coding is {row['prefill_coding_share']:.1%} of {prefill:.1f} s of prefill", flush=True)
        rows.append(row | {"versions": versions()})
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
