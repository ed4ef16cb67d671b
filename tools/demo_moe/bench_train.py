"""Time variants of the training step on random tokens, to choose shape and method before the real run.

    python -m tools.demo_moe.bench_train --seconds 12

One line per variant: tokens per second, model utilisation, peak memory, seconds of compilation. A variant that fails
says why, and the next one runs.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import torch
from tools.demo_moe.model import DemoConfig, DemoModel
from tools.demo_moe.muon import Muon
from tools.train_demo_moe import PEAK_FLOPS


@dataclass(frozen=True)
class Variant:
    """What to time. ``compile`` is a mode of torch.compile, or "none"."""

    name: str
    config: DemoConfig
    experts: str = "dense"
    batch: int = 64
    context: int = 1024
    compile: str = "default"


_WIDE = DemoConfig()
_DEEP = replace(_WIDE, hidden_size=384, num_heads=6, num_layers=12)
_LONG = replace(_WIDE, max_context=2048)
VARIANTS = (
    Variant("wide dense", _WIDE),
    Variant("wide grouped", _WIDE, experts="grouped"),
    Variant("wide dense, batch 128", _WIDE, batch=128),
    Variant("wide dense, context 2048", _LONG, batch=32, context=2048),
    Variant("deep dense", _DEEP),
    Variant("wide dense, not compiled", _WIDE, compile="none"),
)


def measure(variant: Variant, seconds: float, device: torch.device) -> str:
    """Train on random tokens for a while and describe the result in one line."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = DemoModel(variant.config, variant.experts, dtype).to(device)
    muon = Muon(model.matrices(), lr=1e-3)
    adam = torch.optim.AdamW(model.other_parameters(), lr=1e-3, fused=device.type == "cuda")
    forward = model if variant.compile == "none" else torch.compile(model, mode=variant.compile)
    tokens = torch.randint(variant.config.vocab_size, (8, variant.batch, variant.context + 1), device=device)

    def step(i: int) -> torch.Tensor:
        result = forward(tokens[i % 8])
        (result.cross_entropy + 0.01 * result.balance + 0.001 * result.router_z).backward()
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        return result.cross_entropy

    began = time.monotonic()
    step(0)
    step(1)
    _wait(device)
    compiled = time.monotonic() - began
    began = time.monotonic()
    steps = 0
    while time.monotonic() - began < seconds:
        for _ in range(5):
            loss = step(steps)
            steps += 1
        _wait(device)
    rate = steps * variant.batch * variant.context / (time.monotonic() - began)
    used = rate * variant.config.training_flops_per_token(variant.context) / PEAK_FLOPS
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return (
        f"{variant.name:26s} {rate / 1e6:7.3f} M tokens/s  mfu {used:5.1%}  memory {memory:5.1f} GiB  "
        f"compiled in {compiled:5.1f} s  {variant.config.parameters / 1e6:.1f} M parameters  "
        f"loss {float(loss.detach()):.3f}"
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Time every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--only", type=int, nargs="+", default=range(len(VARIANTS)), help="numbers of variants")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_float32_matmul_precision("high")
    for variant in [VARIANTS[i] for i in arguments.only]:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            print(measure(variant, arguments.seconds, device), flush=True)
        except (RuntimeError, NotImplementedError, torch._dynamo.exc.TorchDynamoException) as error:
            print(
                f"{variant.name:26s} failed: {type(error).__name__}: {str(error).splitlines()[0][:300]}", flush=True
            )


if __name__ == "__main__":
    main()
