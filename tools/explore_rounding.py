"""One row per idea: what a way of coding keys and values costs in perplexity and KL divergence.

For exploring, not for published figures of a format: whole sequences are run at once, with keys and values replaced
by what they read back as wherever a query would see them through codes (the `window` rule). No pages, no decoding;
`subten eval kv` measures the path that serves. Results agree with it to about 0.3 points of perplexity.

    python tools/explore_rounding.py MODEL TEXT OUT.json [--device cuda] [--tokens 2048] [--rows NAME;NAME]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from subten.engine import load_model
from subten.engine.calibrate import shipped_text, without_cache
from subten.engine.moments import moments_of, output_moment
from subten.evals.metrics import kl_divergence, token_nll
from subten.formats.affine import load_affine, store_affine, unbiasing
from subten.formats.coding import pair_energy, whitening_matrix, without_channels
from subten.formats.hadamard import hadamard
from subten.formats.quantizers import GAUSSIAN_STEP
from subten.formats.shaping import NoiseShaper, descent_pass, feedback_pass, fit_grid, in_steps
from subten.formats.spec import TensorFormat
from subten.kernels.attention.inputs import MeanKey
from subten.models.decoder import Decoder


@dataclass(frozen=True)
class Coding:
    """How one side (keys or values) is coded.

    Attributes:
        bits: of a code; 16 leaves the side as it is.
        shaped: rounding weighs errors; otherwise every element goes to its nearest level.
        sweeps: of coordinate descent after the feedback pass, each with its refit.
        feedback: the first pass hands errors on (otherwise it is rounding to nearest).
        ordered: coordinates from the costliest to the cheapest, not as they come.
        damping: added to the metric's diagonal.
        whitening: power of the moment that is taken out before the Hadamard transform (0: none).
        geometric: transform by the geometric mean of both moments instead (the power is not used).
        pairs: rotary pairs kept in 16 bit.
        mean: remove the mean key.
        affine: how scale and offset are stored.
        gain: power of <y, y> / <read, y> (in the metric) by which scale and offset are raised in the end: least
            squares shrinks what is read; 1 makes it unbiased, 1/2 keeps its length.
        two_axis: one more scale per channel and page of 64 tokens.
    """

    bits: int = 2
    shaped: bool = True
    sweeps: int = 1
    feedback: bool = True
    ordered: bool = True
    damping: float = 0.1
    whitening: float = 0.0
    geometric: bool = False
    pairs: int = 0
    mean: bool = False
    affine: str = "packed"
    gain: float = 0.0
    two_axis: bool = False


@dataclass(frozen=True)
class Row:
    """One experiment: keys, values, windows, and layers that are coded otherwise."""

    name: str
    key: Coding
    value: Coding
    sinks: int = 4
    recent: int = 32
    wider_layers: int = 0
    """So many layers, the ones with the highest KLD alone, get 4 bits for keys and values."""


NEAREST = Coding(shaped=False)
NEAREST_K = replace(NEAREST, pairs=1)
SHAPED = Coding()
KV2 = replace(SHAPED, pairs=1, whitening=0.375, mean=True)


def rows() -> list[Row]:
    """All experiments, in the order of the table in docs/formats/quality.md."""
    first = replace(SHAPED, sweeps=0, ordered=False)
    k0, k1 = replace(first, pairs=1), replace(SHAPED, pairs=1)
    gain = {"gain": 1.0}
    n_k, n_v, u_k, u_v, u1 = (replace(c, gain=1.0) for c in (NEAREST_K, NEAREST, KV2, SHAPED, k1))
    wide = Coding(bits=16)
    return [
        Row("nearest, fp16 scales", replace(NEAREST_K, affine="fp16"), replace(NEAREST, affine="fp16")),
        Row("nearest", NEAREST_K, NEAREST),
        Row("feedback, one pass", k0, first),
        Row("feedback, 1 sweep", replace(k0, sweeps=1), replace(first, sweeps=1)),
        Row("ordered, feedback, 1 sweep", k1, SHAPED),
        Row("ordered, feedback, 6 sweeps", replace(k1, sweeps=6), replace(SHAPED, sweeps=6)),
        Row("ordered, no feedback, 1 sweep", replace(k1, feedback=False), replace(SHAPED, feedback=False)),
        Row("geometric-mean keys, nearest", replace(NEAREST_K, geometric=True), NEAREST),
        Row("keys whitened, shaped", replace(k1, whitening=0.25), SHAPED),
        Row("mean removed, nearest", replace(NEAREST_K, mean=True), NEAREST),
        Row("mean removed, no pair, shaped", replace(SHAPED, mean=True), SHAPED),
        Row("mean removed, shaped", replace(k1, mean=True), SHAPED),
        Row("mean removed, whitened, shaped", KV2, SHAPED),
        Row("lengths kept: nearest", replace(NEAREST_K, gain=0.5), replace(NEAREST, gain=0.5)),
        Row("unbiased: nearest", n_k, n_v),
        Row("unbiased: two-axis scales, nearest", replace(n_k, two_axis=True), n_v),
        Row("unbiased: mean removed, nearest", replace(n_k, mean=True), n_v),
        Row("unbiased: whitened, nearest", replace(n_k, whitening=0.25), n_v),
        Row("unbiased: mean removed, whitened, nearest", replace(n_k, mean=True, whitening=0.25), n_v),
        Row("unbiased: feedback, one pass", replace(k0, **gain), replace(first, **gain)),
        Row("unbiased: shaped", u1, u_v),
        Row("unbiased: keys shaped only", u1, n_v),
        Row("unbiased: values shaped only", n_k, u_v),
        Row("unbiased: whitened 0.25, shaped", replace(u1, whitening=0.25), u_v),
        Row("unbiased: whitened 0.5, shaped", replace(u1, whitening=0.5), u_v),
        Row("unbiased: mean removed, shaped", replace(u1, mean=True), u_v),
        Row("kv2", u_k, u_v),
        Row("kv2 with fp16 scales", replace(u_k, affine="fp16"), replace(u_v, affine="fp16")),
        *(Row(f"kv2 with gain {g}", replace(u_k, gain=g), replace(u_v, gain=g)) for g in (0.75, 1.25)),
        *(Row(f"kv2 with damping {d}", replace(u_k, damping=d), replace(u_v, damping=d)) for d in (0.03, 0.3, 1.0)),
        *(Row(f"kv2 with keys whitened {w}", replace(u_k, whitening=w), u_v) for w in (0.125, 0.25, 0.5)),
        Row("kv2 with values whitened 0.25", u_k, replace(u_v, whitening=0.25)),
        Row("kv2 without a pair", replace(u_k, pairs=0), u_v),
        Row("kv2 with two pairs", replace(u_k, pairs=2), u_v),
        Row("kv2 with 2 sweeps", replace(u_k, sweeps=2), replace(u_v, sweeps=2)),
        Row("kv2 with 6 sweeps", replace(u_k, sweeps=6), replace(u_v, sweeps=6)),
        Row("kv2 with geometric-mean keys", replace(u_k, geometric=True), u_v),
        Row("kv2, 4 layers in 4 bit", u_k, u_v, wider_layers=4),
        *(
            Row(f"kv2, {s} sinks, {r} recent", u_k, u_v, sinks=s, recent=r)
            for s, r in ((0, 32), (64, 32), (4, 128), (64, 128))
        ),
        Row("k4v2", replace(u_k, bits=4, affine="fp16"), u_v),
        Row("k4v2, keys nearest", Coding(bits=4, shaped=False, pairs=1, affine="fp16"), u_v),
        Row("kv4", replace(u_k, bits=4, affine="fp16"), replace(u_v, bits=4, affine="fp16")),
        Row(
            "kv4 nearest",
            Coding(bits=4, shaped=False, pairs=1, affine="fp16"),
            Coding(bits=4, shaped=False, affine="fp16"),
        ),
        Row("kv2, values in 16 bit", u_k, wide),
        Row("kv2, keys in 16 bit", wide, u_v),
    ]


class Explorer:
    """A model whose attention sees coded keys and values."""

    def __init__(self, model: str, device: str, calibration_text: str) -> None:
        self.model = load_model(model, device=device, dtype="float32")
        kernels = replace(self.model.kernels, dense_attention=self._attend)
        self.decoder = Decoder(self.model.spec, self.model.decoder.weights, kernels)
        self.row: Row | None = None
        self.only_layer: int | None = None
        self.wider: Sequence[int] = ()
        self._layer = 0
        self._spaces: dict[tuple[int, str, Coding], tuple[Tensor, Tensor, NoiseShaper | None, Tensor]] = {}
        self._measure(calibration_text)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [tokens, vocab]."""
        self._layer = 0
        return self.decoder.logits(self.decoder.forward(without_cache(list(token_ids), self.model.device), None))

    @torch.inference_mode()
    def _measure(self, text: str) -> None:
        ids = self.model.tokenizer.encode(text)[: min(1536, self.model.spec.max_positions)]
        self._moments = []

        def observe(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
            weights = self.decoder.weights.layers[layer].attention.o.wide(torch.float32)
            output = output_moment(weights, self.model.geometry)
            both = [moments_of(q, k, output, self.decoder.rope, remove_mean=mean) for mean in (False, True)]
            seen = v[len(v) // 16 :].transpose(0, 1)
            self._moments.append((both, seen.transpose(1, 2) @ seen / seen.shape[1]))

        self.decoder.forward(without_cache(ids, self.model.device), None, observe)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, _start: Tensor, scale: float) -> Tensor:
        layer, self._layer = self._layer, (self._layer + 1) % self.model.spec.num_layers
        tokens, num_kv_heads, head_dim = k.shape
        rows = q.view(tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3) * scale
        position = torch.arange(tokens, device=q.device)
        scores = rows @ k.permute(1, 2, 0)[:, None]
        hidden = position[None] > position[:, None]
        if self.row is None or (self.only_layer is not None and layer != self.only_layer):
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out = weights @ v.transpose(0, 1)[:, None]
        else:
            read_k, read_v = self._coded(layer, self.row, k, v)
            coded = (position[None] <= position[:, None] - self.row.recent) & (position[None] >= self.row.sinks)
            scores = torch.where(coded, rows @ read_k.permute(1, 2, 0)[:, None], scores)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out = (weights * coded) @ read_v.transpose(0, 1)[:, None]
            out = out + (weights * ~coded) @ v.transpose(0, 1)[:, None]
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _coded(self, layer: int, row: Row, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        key, value = row.key, row.value
        if layer in self.wider:
            key, value = (replace(c, bits=4, affine="fp16") for c in (key, value))
        mean = self._moments[layer][0][1][1]
        common = MeanKey(mean, self.decoder.rope).at(torch.arange(len(k), device=k.device)) if key.mean else 0.0
        return self._round_trip(layer, "key", key, k - common) + common, self._round_trip(layer, "value", value, v)

    def _space(self, layer: int, side: str, c: Coding) -> tuple[Tensor, Tensor, NoiseShaper | None, Tensor]:
        """to_coded, from_coded, shaper and kept channels."""
        if (layer, side, c) not in self._spaces:
            moments = self._moments[layer][0][int(c.mean)][0]
            cost, energy = (
                (moments.query, moments.key) if side == "key" else (moments.output, self._moments[layer][1])
            )
            pairs = pair_energy(moments.key).topk(c.pairs, dim=-1).indices
            kept = torch.cat([pairs, pairs + cost.shape[-1] // 2], dim=-1)
            cost, energy = (without_channels(x.double(), kept) for x in (cost, energy))
            eye = torch.eye(cost.shape[-1], dtype=torch.float64, device=cost.device)
            transform = eye.expand_as(cost)
            if c.whitening:
                transform = whitening_matrix(energy, c.whitening)
            if c.geometric:
                transform = geometric_mean(cost, energy)
            rotation = hadamard(eye)
            to_coded, from_coded = transform @ rotation, rotation @ torch.linalg.inv(transform)
            shaper = None
            if c.shaped:
                metric = from_coded @ cost @ from_coded.transpose(1, 2)
                shaper = NoiseShaper.from_metric(metric, c.damping, ordered=c.ordered)
            self._spaces[layer, side, c] = to_coded.float(), from_coded.float(), shaper, kept
        return self._spaces[layer, side, c]

    def _round_trip(self, layer: int, side: str, c: Coding, x: Tensor) -> Tensor:
        if c.bits == 16:
            return x
        to_coded, from_coded, shaper, kept = self._space(layer, side, c)
        index = kept[None].expand(len(x), -1, -1)
        rest = x.scatter(-1, index, 0.0).transpose(0, 1) @ to_coded
        fmt = TensorFormat(bits=c.bits, offset=True, affine=c.affine)  # type: ignore[arg-type]
        read = _nearest(rest, fmt, c) if shaper is None else _shaped(rest, fmt, c, shaper)
        return (read @ from_coded).transpose(0, 1).scatter(-1, index, x.gather(-1, index))


def geometric_mean(cost: Tensor, energy: Tensor) -> Tensor:
    """The symmetric T for which the energy of T x equals the cost of T^-1 e, both regularised by 0.1."""

    def normal(x: Tensor) -> Tensor:
        mean = x.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        return x / mean + 0.1 * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)

    def power(x: Tensor, exponent: float) -> Tensor:
        values, vectors = torch.linalg.eigh(x)
        return vectors @ (values.clamp_min(1e-12)[:, :, None] ** exponent * vectors.transpose(1, 2))

    half, inverse = power(normal(energy), 0.5), power(normal(energy), -0.5)
    return power(inverse @ power(half @ normal(cost) @ half, 0.5) @ inverse, 0.5)


def _nearest(y: Tensor, fmt: TensorFormat, c: Coding) -> Tensor:
    """Max's grid for a Gaussian, a refit, and each element to its nearest level."""
    levels = (1 << fmt.bits) - 1
    channel = torch.ones_like(y[:, :1])
    if c.two_axis:
        pages = torch.nn.functional.pad(y, (0, 0, 0, -y.shape[1] % 64)).unflatten(1, (-1, 64))
        channel = pages.square().mean(2, keepdim=True).sqrt().clamp_min(1e-6).expand_as(pages).flatten(1, 2)
        channel = channel[:, : y.shape[1]]
        y = y / channel
    mean = y.mean(-1, keepdim=True)
    scale = (y - mean).square().mean(-1, keepdim=True).sqrt() * GAUSSIAN_STEP[fmt.bits]
    codes = ((y - mean) / scale.clamp_min(1e-12) + levels / 2).round().clamp(0, levels)
    centre = codes.mean(-1, keepdim=True)
    spread = (codes - centre).square().sum(-1, keepdim=True).clamp_min(1e-12)
    scale = ((codes - centre) * y).sum(-1, keepdim=True) / spread
    scale, offset = _stored(scale, mean - scale * centre, fmt)
    if fmt.affine == "packed":
        codes = ((y - offset) / scale.clamp_min(1e-12)).round().clamp(0, levels)
    read = scale * codes + offset
    gain = unbiasing(y.square().sum(-1, keepdim=True), (read * y).sum(-1, keepdim=True)) ** c.gain
    scale, offset = _stored(scale * gain, offset * gain, fmt)
    return (scale * codes + offset) * channel


def _stored(scale: Tensor, offset: Tensor, fmt: TensorFormat) -> tuple[Tensor, Tensor]:
    return load_affine(store_affine(scale, offset, fmt), fmt)


def _shaped(y: Tensor, fmt: TensorFormat, c: Coding, shaper: NoiseShaper) -> Tensor:
    """`subten.formats.shaping.shape` with its passes as parameters."""
    levels = (1 << fmt.bits) - 1
    y = y.transpose(1, 2).take_along_dim(shaper.order[:, :, None], 1).contiguous()
    mean = y.mean(1, keepdim=True)
    scale = (y - mean).square().mean(1, keepdim=True).sqrt() * GAUSSIAN_STEP[fmt.bits]
    offset = mean - scale * (levels / 2)
    start = in_steps(y, scale, offset)
    codes = feedback_pass(start, shaper, levels) if c.feedback else start.round().clamp(0, levels)
    for sweep in range(c.sweeps):
        scale, offset = fit_grid(y, codes, scale, shaper)
        if sweep == c.sweeps - 1:
            scale, offset = _stored(scale, offset, fmt)
        codes = descent_pass(in_steps(y, scale, offset), codes, shaper, levels)
    scale, offset = fit_grid(y, codes, scale, shaper)
    weighted = shaper.metric @ y
    energy = (y * weighted).sum(1, keepdim=True)
    explained = ((scale * codes + offset) * weighted).sum(1, keepdim=True)
    gain = unbiasing(energy, explained) ** c.gain
    scale, offset = _stored(scale * gain, offset * gain, fmt)
    read = scale * codes + offset
    return torch.empty_like(read).scatter_(1, shaper.order[:, :, None].expand_as(read), read).transpose(1, 2)


@dataclass(frozen=True)
class Loss:
    """Mean negative log likelihood and KL divergence from 16 bit, per predicted token."""

    nll: float
    kld: float


@torch.inference_mode()
def measure(run: Callable[[Sequence[int]], Tensor], windows: Sequence[Sequence[int]], base: list[Tensor]) -> Loss:
    """Compare a run with log probabilities `base` of the same windows; fills `base` where it is empty."""
    first = not base
    nll, kld, count = 0.0, 0.0, 0
    for number, window in enumerate(windows):
        found = run(window).log_softmax(-1)[:-1]
        if first:
            base.append(found)
        nll += token_nll(found, torch.tensor(window[1:], device=found.device)).double().sum().item()
        kld += kl_divergence(base[number], found).double().sum().item()
        count += len(window) - 1
    return Loss(nll / count, kld / count)


def main() -> None:
    """Parse the command line, measure, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--rows")
    args = parser.parse_args()
    calibration = args.calibration.read_text() if args.calibration else shipped_text()
    explorer = Explorer(args.model, args.device, calibration)
    ids = explorer.model.tokenizer.encode(args.text.read_text()[: args.tokens * 12], add_special_tokens=False)
    bos = explorer.model.tokenizer.bos_prefix
    step = args.context - len(bos)
    windows = [[*bos, *ids[i * step : (i + 1) * step]] for i in range(args.tokens // args.context)]
    base: list[Tensor] = []
    exact = measure(explorer.logits, windows, base)
    print(f"16 bit: perplexity {math.exp(exact.nll):.3f}", flush=True)
    wanted = args.rows.split(";") if args.rows else None
    found: list[dict[str, object]] = []
    for row in rows():
        if wanted is not None and row.name not in wanted:
            continue
        start = time.perf_counter()
        explorer.row = row
        if row.wider_layers:
            alone = []
            for layer in range(explorer.model.spec.num_layers):
                explorer.only_layer = layer
                alone.append(measure(explorer.logits, windows, base).kld)
            explorer.only_layer = None
            explorer.wider = torch.tensor(alone).topk(row.wider_layers).indices.tolist()
        loss = measure(explorer.logits, windows, base)
        increase = math.exp(loss.nll - exact.nll) - 1
        seconds = time.perf_counter() - start
        print(f"{row.name:42s} {100 * increase:+7.2f}%  KLD {loss.kld:.4f}  {seconds:.0f} s", flush=True)
        found.append(asdict(row) | {"ppl_increase": increase, "kld": loss.kld, "wider": list(explorer.wider)})
        explorer.wider = ()
    shared = {
        "model": explorer.model.name,
        "fingerprint": explorer.model.fingerprint,
        "tokens": len(windows) * args.context,
        "context": args.context,
        "calibration": str(args.calibration.name if args.calibration else "shipped text"),
        "perplexity_16bit": math.exp(exact.nll),
        "device": explorer.model.device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    args.out.write_text(json.dumps([shared | row for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
