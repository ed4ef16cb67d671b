"""Bits per byte of an exported folder on held-out texts, and how its router behaves there.

    python -m tools.demo_moe.eval_heldout --folder DIR [--against DIR] --texts DIR --out FILE

Protocol: each text is tokenised whole and scored in windows of the model's context that advance by half of it; every
token is scored once, with at least half a context before it (``token_data.bits_per_byte``); the sum of the losses is
divided by the bytes of the text in UTF-8. Line ends are LF. The arithmetic is float32 in transformers'
implementation,
on the stored weights, which for FP8 are dequantised. ``--against`` evaluates a second folder, to compare with.

The router: the share of the routed tokens that each expert of each layer gets, and how many distinct experts one
decode step touches in a layer when ``b`` sequences are decoded together, from ``b`` tokens of random places.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tools.demo_moe.folders import load_folder
from tools.demo_moe.token_data import bits_per_byte
from torch import Tensor
from transformers import AutoTokenizer

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_DRAWS = 2000


class Evaluation:
    """One folder: its model and tokenizer, and the experts chosen for every token scored so far."""

    def __init__(self, folder: Path) -> None:
        self.model = load_folder(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.config = self.model.config
        self.chosen: list[Tensor] = []

    @torch.inference_mode()
    def bits_per_byte(self, text: str) -> float:
        """Of one text, by the protocol above."""
        ids = torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        context = self.config.max_position_embeddings
        return bits_per_byte(
            self._token_losses,
            ids,
            len(text.encode()),
            context=context,
            stride=context // 2,
            first=self.config.eos_token_id,
            batch=4,
        )

    def _token_losses(self, tokens: Tensor) -> Tensor:
        result = self.model(tokens[:, :-1], output_router_logits=True, use_cache=False)
        top = [logits.topk(self.config.num_experts_per_tok, dim=-1).indices for logits in result.router_logits]
        self.chosen.append(torch.stack(top))
        logits = result.logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(
            tokens.shape[0], -1
        )

    def routing(self, seed: int = 0) -> dict[str, Any]:
        """Load per layer and expert, and distinct experts per step and layer for each of ``BATCHES``."""
        return routing_statistics(torch.cat(self.chosen, dim=1), self.config.num_experts, seed)


def routing_statistics(chosen: Tensor, num_experts: int, seed: int) -> dict[str, Any]:
    """Statistics of the experts chosen [layers, tokens, top-k]."""
    layers, tokens, k = chosen.shape
    load = F.one_hot(chosen, num_experts).sum(dim=(1, 2)) / (tokens * k)
    generator = torch.Generator().manual_seed(seed)
    distinct = {}
    for batch in BATCHES:
        places = torch.randint(tokens, (_DRAWS, batch), generator=generator)
        used = torch.zeros(layers, _DRAWS, num_experts, dtype=torch.bool)
        used.scatter_(
            2, chosen[:, places].flatten(2), torch.ones((), dtype=torch.bool).expand(layers, _DRAWS, batch * k)
        )
        distinct[batch] = round(float(used.sum(dim=-1).double().mean()), 3)
    return {
        "tokens": tokens,
        "load": [[round(float(v), 4) for v in row] for row in load],
        "least_share_of_tokens": round(float(load.min()) * k, 4),
        "distinct_experts_per_layer": distinct,
        "distinct_if_uniform": {b: round(num_experts * (1 - (1 - k / num_experts) ** b), 3) for b in BATCHES},
    }


def main() -> None:
    """Parse the command line, evaluate, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="folder of .txt files")
    parser.add_argument("--characters", type=int, default=1_300_000, help="of each text at most")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for folder in [arguments.folder] + ([arguments.against] if arguments.against else []):
        evaluation = Evaluation(folder)
        scores = {}
        for path in sorted(arguments.texts.glob("*.txt")):
            scores[path.stem] = round(
                evaluation.bits_per_byte(path.read_text(encoding="utf-8")[: arguments.characters]), 4
            )
            print(f"{folder.name}: {path.stem} {scores[path.stem]:.4f} bits per byte", flush=True)
        results[folder.name] = {"bits_per_byte": scores, "routing": evaluation.routing()}
        print(json.dumps(results[folder.name]["routing"]), flush=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
