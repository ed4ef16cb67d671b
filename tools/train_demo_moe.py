"""Train the demo model from scratch on one GPU, in commands of a fixed length with a checkpoint between them.

    python -m tools.train_demo_moe --tokens DIR --state FILE --out DIR --minutes 9 --until 0.5
    python -m tools.train_demo_moe --tokens DIR --state FILE --out DIR --minutes 9 --until 1 --resume

The learning rate is a function of the share of the whole time budget that has passed: ``--until`` says which share
has
passed when this command ends. It warms up, stays, and falls linearly to zero over the second half, so the last
weights are the ones to ship. ``--minutes`` counts from the start of the process and includes compilation and the
evaluation at
the end. ``--out`` receives the weights in small files (``weights_file``) and the log. ``--smoke`` trains a few
seconds on random tokens, on a GPU with the real shape, elsewhere with a tiny one.

The order of the data and the initial weights come from ``--seed``; how many steps fit into the time does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tools.demo_moe.model import EXPERT_METHODS, DemoConfig, DemoModel
from tools.demo_moe.muon import Muon
from tools.demo_moe.token_data import MIX, TokenMix, bits_per_byte, mix_with_samples, read_tokens
from tools.demo_moe.weights_file import write_weights
from torch import Tensor

WARM_UP = 0.01
COOL_DOWN = 0.5
PEAK_FLOPS = 790e12
"""Dense bfloat16 products per second that an H200 reaches; utilisation is reported against it."""
_SYNC_EVERY = 10
_SAVE_EVERY_SECONDS = 200.0
_EVALUATION_SECONDS = 20.0
_TINY = DemoConfig(
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    expert_size=32,
    max_context=128,
)


def rate_factor(progress: float) -> float:
    """The learning rate as a share of its peak, at a share of the time budget."""
    return max(0.0, min(1.0, progress / WARM_UP, (1.0 - progress) / COOL_DOWN))


def main() -> None:
    """Parse the command line and train."""
    arguments = parse(sys.argv[1:])
    Trainer(arguments, time.monotonic()).run()


def parse(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, help="folder of .u16 files")
    parser.add_argument("--state", type=Path, help="checkpoint between the commands")
    parser.add_argument("--out", type=Path, help="folder for the weights and the log")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--until", type=float, default=1.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--experts", choices=EXPERT_METHODS, default="dense")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--lr", type=float, default=4e-3, help="of Muon, for the hidden matrices")
    parser.add_argument("--adam-lr", type=float, default=3e-3, help="of AdamW, for the embedding, norms and routers")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--router-z", type=float, default=1e-3, help="weight of the router's z-loss")
    parser.add_argument("--sampled", type=float, default=0.0, help="share of a batch that is teacher-sampled text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the chain on a CPU")
    arguments = parser.parse_args(words)
    if not arguments.smoke and not (arguments.tokens and arguments.state and arguments.out):
        parser.error("--tokens, --state and --out are needed, unless --smoke is given")
    return arguments


class Trainer:
    """One command: model, optimisers, data, and the clock that ends it."""

    def __init__(self, arguments: argparse.Namespace, started: float) -> None:
        self.arguments = arguments
        self.started = started
        self.device = torch.device(arguments.device)
        torch.manual_seed(arguments.seed)
        torch.set_float32_matmul_precision("high")
        if arguments.smoke:
            arguments.minutes = 0.5
        tiny = arguments.tiny or (arguments.smoke and self.device.type == "cpu")
        config = _TINY if tiny else DemoConfig()
        self.context = min(arguments.context, config.max_context) if tiny else arguments.context
        self.config = replace(config, max_context=max(config.max_context, self.context))
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = DemoModel(self.config, arguments.experts, dtype).to(self.device)
        self.muon = Muon(self.model.matrices(), lr=arguments.lr, weight_decay=arguments.weight_decay)
        self.adam = torch.optim.AdamW(
            self.model.other_parameters(),
            lr=arguments.adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )
        self.rates = {self.muon: arguments.lr, self.adam: arguments.adam_lr}
        self.step = 0
        self.begin = 0.0
        self.log: list[dict[str, Any]] = []
        self.streams = self._streams()
        if arguments.resume:
            self._load()
        elif arguments.state is not None and arguments.state.exists() and not arguments.smoke:
            raise SystemExit(f"{arguments.state} exists: give --resume, or remove it to start again")
        shares = mix_with_samples(arguments.sampled) if arguments.sampled else MIX
        self.mix = TokenMix(self.streams, shares, self.context, arguments.batch, arguments.seed)
        forward: Callable[[Tensor], Any] = self.model
        self.forward = forward if arguments.no_compile or self.device.type == "cpu" else torch.compile(forward)

    def run(self) -> None:
        """Train until the clock says so, then evaluate and write everything."""
        tail = 0.0 if self.arguments.smoke else _EVALUATION_SECONDS
        deadline = self.started + 60 * self.arguments.minutes - tail
        self._warm()
        began = time.monotonic()
        if began >= deadline:
            raise SystemExit(f"no time left to train: {began - self.started:.0f} s went into starting")
        print(
            f"{self.config.parameters / 1e6:.2f} M parameters, "
            f"{self.config.active_parameters / 1e6:.2f} M per token; "
            f"started in {began - self.started:.0f} s; {json.dumps(self._arguments())}",
            flush=True,
        )
        span = self.arguments.until - self.begin
        saved = last = began
        losses: list[Tensor] = []
        loads: list[Tensor] = []
        progress = self.begin
        while True:
            result = self._update(progress)
            losses.append(torch.stack((result.cross_entropy, result.balance, result.router_z)).detach())
            loads.append(result.load)
            self.step += 1
            if self.step % _SYNC_EVERY:
                continue
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.monotonic()
            progress = self.begin + span * min(1.0, (now - began) / (deadline - began))
            done = now >= deadline
            if self.step % (10 * _SYNC_EVERY) == 0 or done:
                self._report(torch.stack(losses), torch.stack(loads), now - last, progress)
                losses, loads, last = [], [], now
            if done:
                break
            if now - saved > _SAVE_EVERY_SECONDS and not self.arguments.smoke:
                self._save(progress)
                saved = time.monotonic()
        if not self.arguments.smoke:
            self._finish()

    def _update(self, progress: float) -> Any:
        for optimiser, rate in self.rates.items():
            for group in optimiser.param_groups:
                group["lr"] = rate * rate_factor(progress)
        result = self.forward(self.mix.batch(self.step))
        loss = (
            result.cross_entropy + self.arguments.balance * result.balance + self.arguments.router_z * result.router_z
        )
        loss.backward()
        self.muon.step()
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        return result

    def _warm(self) -> None:
        # Compile and run once outside the timed part; the gradient is thrown away.
        result = self.forward(self.mix.batch(self.step))
        result.cross_entropy.backward()
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _report(self, losses: Tensor, loads: Tensor, seconds: float, progress: float) -> None:
        cross_entropy, balance, router_z = (float(v) for v in losses.mean(dim=0))
        load = loads.mean(dim=0)
        tokens = losses.shape[0] * self.arguments.batch * self.context / seconds
        used = tokens * self.config.training_flops_per_token(self.context) / PEAK_FLOPS
        row = {
            "step": self.step,
            "progress": round(progress, 4),
            "loss": round(cross_entropy, 4),
            "balance": round(balance, 4),
            "router_z": round(router_z, 3),
            "tokens_per_second": round(tokens),
            "mfu": round(used, 4),
            "least_load": round(float(load.min()), 4),
            "most_load": round(float(load.max()), 4),
            "tokens": self.step * self.arguments.batch * self.context,
        }
        self.log.append(row)
        print(" ".join(f"{k} {v}" for k, v in row.items()), flush=True)

    def _streams(self) -> dict[str, Tensor]:
        if self.arguments.smoke:
            generator = torch.Generator().manual_seed(self.arguments.seed)
            ids = torch.randint(self.config.vocab_size, (2_000_000,), generator=generator).to(torch.int16)
            return dict.fromkeys(MIX, ids.to(self.device))
        names = mix_with_samples(self.arguments.sampled) if self.arguments.sampled else MIX
        streams = {name: read_tokens(self.arguments.tokens / f"{name}.u16").to(self.device) for name in names}
        for name, ids in streams.items():
            if int(ids.max()) >= self.config.vocab_size:
                raise SystemExit(
                    f"{name}.u16 holds id {int(ids.max())}, and the model has {self.config.vocab_size} entries"
                )
        return streams

    def _arguments(self) -> dict[str, str]:
        # Paths of this machine stay out of what is kept.
        return {k: str(v) for k, v in vars(self.arguments).items() if not isinstance(v, Path)}

    def _finish(self) -> None:
        self._save(self.arguments.until)
        out: Path = self.arguments.out
        about = {
            "config": self.config.to_dict(),
            "step": self.step,
            "progress": self.arguments.until,
            "rounds": self.mix.rounds(self.step),
            "arguments": self._arguments(),
        }
        size = write_weights(self.model.state_dict(), about, out)
        (out / "log.json").write_text(json.dumps(self.log) + "\n")
        print(
            f"saved {size / 1e6:.1f} MB of weights; read through: "
            + " ".join(f"{k} {v:.2f}" for k, v in about["rounds"].items()),
            flush=True,
        )
        results = evaluate(self.model, self.arguments.tokens, self.context, self.device)
        self.log.append({"step": self.step, "bits_per_byte": results})
        self._save(self.arguments.until)
        (out / "log.json").write_text(json.dumps(self.log) + "\n")
        print(f"done after {time.monotonic() - self.started:.0f} s", flush=True)

    def _save(self, progress: float) -> None:
        path: Path = self.arguments.state
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "config": self.config.to_dict(),
                "model": self.model.state_dict(),
                "muon": self.muon.state_dict(),
                "adam": self.adam.state_dict(),
                "step": self.step,
                "progress": progress,
                "log": self.log,
            },
            partial,
        )
        partial.replace(path)
        print(f"checkpoint at step {self.step}", flush=True)

    def _load(self) -> None:
        state = torch.load(self.arguments.state, map_location=self.device, weights_only=True)
        if state["config"] != self.config.to_dict():
            raise SystemExit(f"{self.arguments.state} holds another shape: {state['config']}")
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.begin, self.log = state["step"], state["progress"], state["log"]


@torch.no_grad()
def evaluate(model: DemoModel, tokens: Path, context: int, device: torch.device) -> dict[str, float]:
    """Bits per byte of the held-out texts and the validation parts: windows of the context, half new each."""
    results = {}
    for path in sorted([*tokens.glob("heldout-*.u16"), *tokens.glob("*.validation.u16")]):
        ids = read_tokens(path).to(device)
        num_bytes = int(path.with_suffix(".bytes").read_text())
        first = model.config.vocab_size - 2  # <|endoftext|>
        value = bits_per_byte(model.token_losses, ids, num_bytes, context=context, stride=context // 2, first=first)
        results[path.stem] = round(value, 4)
        print(f"bits per byte {path.stem:24s} {value:.4f} ({ids.numel()} tokens)", flush=True)
    return results


if __name__ == "__main__":
    main()
