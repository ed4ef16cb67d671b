"""Average two checkpoints of one training run, and choose the weights of the average on validation text.

    python -m tools.demo_moe.average_weights --first DIR --second DIR --tokens DIR --out DIR

For each share in ``SHARES`` the weights ``(1 - share) * first + share * second`` are scored on the validation streams
named in ``CHOSEN_ON``: bits per byte of windows of the model's context that do not overlap, evenly spaced over each
stream. The average with the least mean goes to ``--out``, in the form that ``export.py`` reads, with every try in
``weights.json``. Held-out texts play no part. Averages along one trajectory tend to be flatter minima than its ends
(Izmailov et al. 2018, arXiv:1803.05407).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from tools.demo_moe.model import DemoConfig, DemoModel
from tools.demo_moe.token_data import read_tokens
from tools.demo_moe.weights_file import read_weights, write_weights
from torch import Tensor

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
CHOSEN_ON = ("prose.validation", "guide.validation")


def average(first: Mapping[str, Tensor], second: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """``(1 - share) * first + share * second`` in float32. Raises ValueError if the parameters differ in name."""
    if first.keys() != second.keys():
        raise ValueError(f"the checkpoints differ in {sorted(first.keys() ^ second.keys())[:3]}")
    return {name: torch.lerp(tensor.float(), second[name].float(), share) for name, tensor in first.items()}


def spaced_windows(ids: Tensor, context: int, tokens: int) -> Tensor:
    """Int64 [windows, context + 1]: about ``tokens`` tokens of a stream in windows evenly spaced over it."""
    count = max(1, min(tokens, ids.numel() - 1) // context)
    starts = torch.arange(count) * ((ids.numel() - 1) // count)
    return ids.long()[starts[:, None] + torch.arange(context + 1)]


@torch.inference_mode()
def bits_per_token(model: DemoModel, windows: Tensor) -> float:
    """Mean over all tokens of the windows but the first of each."""
    return sum(float(model.token_losses(window[None]).mean()) for window in windows) / len(windows) / math.log(2)


def main() -> None:
    """Parse the command line, score every share, write the best average."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=Path, required=True, help="folder written by the training command")
    parser.add_argument("--second", type=Path, required=True, help="a later one of the same run")
    parser.add_argument("--tokens", type=Path, required=True, help="folder of .u16 files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--validation-tokens", type=int, default=30_000, help="of each stream")
    arguments = parser.parse_args()
    first, _ = read_weights(arguments.first)
    second, about = read_weights(arguments.second)
    config = DemoConfig(**about["config"])
    model = DemoModel(config, compute_dtype=torch.float32)
    streams, tokens_per_byte = {}, {}
    for name in CHOSEN_ON:
        ids = read_tokens(arguments.tokens / f"{name}.u16")
        tokens_per_byte[name] = ids.numel() / int((arguments.tokens / f"{name}.bytes").read_text())
        streams[name] = spaced_windows(ids, config.max_context, arguments.validation_tokens)
    tries = []
    for share in SHARES:
        model.load_state_dict(average(first, second, share))
        scores = {
            name: round(bits_per_token(model, windows) * tokens_per_byte[name], 4)
            for name, windows in streams.items()
        }
        mean = sum(scores.values()) / len(scores)
        tries.append({"share_of_second": share, "bits_per_byte": scores, "mean": round(mean, 4)})
        print(tries[-1], flush=True)
    best = min(tries, key=lambda row: row["mean"])
    write_weights(average(first, second, best["share_of_second"]), {**about, "averaging": tries}, arguments.out)
    print(f"wrote the average with a share of {best['share_of_second']} of the second")


if __name__ == "__main__":
    main()
