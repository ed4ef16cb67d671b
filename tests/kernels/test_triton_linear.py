"""The linear layer for few tokens in Triton's interpreter, against the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.models.test_fp8_weights import checkpoint_of
from tests.models.tiny_models import CPU, ragged_inputs, random_tokens

from subten.kernels import select_kernels
from subten.kernels.linear.inputs import LinearWeights
from subten.kernels.linear.plan import LinearShape, tune_linear
from subten.kernels.linear.reference import linear_reference
from subten.kernels.linear.triton_decode import linear_decode
from subten.kernels.linear.triton_linear import TritonLinear, linear_many
from subten.kernels.linear.triton_rows import norm_rows
from subten.models import Decoder, load_weights, spec_from_config
from subten.models.weights import KeptWeights
from support.device_code import quicken_interpreter
from support.interpreter import correct_numbers
from support.linear import error, exactly, layer, norm_of, normed_exactly, rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN and infinity
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
EXACT = 1e-5
"""Of products of 16 bit whose sums are in float32."""
ROUNDED = 4e-3
"""Where tokens are rounded to bf16 behind the weight of a norm."""
SMS = 2


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken_interpreter(monkeypatch)
    correct_numbers(monkeypatch)


def run(x, weights, dtype=torch.float32, changes=None, **options):
    """What is not written is NaN."""
    outputs, inputs = weights.weight.shape
    tuning = tune_linear(LinearShape(inputs, outputs, weights.weight.itemsize), len(x), SMS)
    out = torch.full((len(x), outputs), torch.nan, dtype=dtype)
    return linear_decode(x, weights, out, replace(tuning, **(changes or {})), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 512), (17, 256), (5, 96), (33, 272), (70, 1000), (130, 33)])
def test_all_sizes(kind: str, outputs: int, inputs: int) -> None:
    weights, x = layer(outputs, inputs, kind, bias=True), rows(3, inputs, KINDS[kind])
    assert error(run(x, weights), exactly(x, weights)) <= EXACT
    norm, residual = norm_of(inputs, KINDS[kind]), rows(3, outputs, KINDS[kind], seed=5)
    options = {"norm": norm, "residual": residual, "factor": 0.22}
    found = run(x, weights, **options) - residual.float()
    assert error(found, exactly(x, weights, **options) - residual.double()) <= ROUNDED


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_any_number_of_tokens_and_the_same_bits_for_each(kind: str) -> None:
    """Alone, in a tile that is full, in one that is not, and in the second block of tokens."""
    weights, x, norm = layer(40, 320, kind), rows(64, 320), norm_of(320)
    together = run(x, weights, norm=norm)
    assert error(together, exactly(x, weights, norm=norm)) <= ROUNDED
    for count in (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63):
        assert torch.equal(run(x[-count:], weights, norm=norm), together[-count:])
    for rows_of_a_program in (16, 32, 64):
        assert torch.equal(run(x[:8], weights, norm=norm, changes={"rows": rows_of_a_program}), together[:8])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_once(dtype: torch.dtype) -> None:
    weights, x = layer(48, 256, "fp16" if dtype == torch.float16 else "fp8"), rows(5, 256, dtype)
    residual = rows(5, 48, dtype, seed=6)
    found = run(x, weights, dtype, residual=residual)
    wide = run(x, weights, residual=residual)
    assert found.dtype == dtype
    assert torch.equal(found, wide.to(dtype))


def test_tokens_after_the_norm_are_left_for_others() -> None:
    for count, inputs in ((1, 96), (9, 320), (33, 200)):
        x, norm, weights = rows(count, inputs), norm_of(inputs), layer(20, inputs, "bf16")
        normed = torch.full((count, inputs), torch.nan)
        run(x, weights, norm=norm, normed=normed)
        assert error(normed, normed_exactly(x, norm)) <= 1e-6


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_token_does_not_leak_into_others(kind: str, bad: float) -> None:
    weights, x, norm = layer(24, 256, kind), rows(11, 256), norm_of(256)
    clean, normed = run(x, weights, norm=norm), torch.empty(11, 256)
    x[4, 77] = bad
    found = run(x, weights, norm=norm, normed=normed)
    assert not found[4].isfinite().any()
    assert not normed[4].isfinite().all()
    others = [row for row in range(11) if row != 4]
    assert torch.equal(found[others], clean[others])
    assert normed[others].isfinite().all()


def test_large_and_small_tokens_beside_weights_in_fp8() -> None:
    """Residual streams reach tens of thousands; embeddings begin at hundredths."""
    weights, norm = layer(32, 256, "fp8"), norm_of(256)
    for size in (2.0**-7, 1.0, 2.0**12):
        x = rows(3, 256) * size
        assert error(run(x, weights, norm=norm), exactly(x, weights, norm=norm)) <= ROUNDED
        assert error(run(x, weights), exactly(x, weights)) <= ROUNDED


def test_rows_that_are_parts_of_wider_ones() -> None:
    weights, wide = layer(40, 128, "bf16"), rows(6, 400)
    x, residual = wide[:, 130:258], rows(6, 100)[:, 30:70]
    assert torch.equal(run(x, weights, residual=residual), run(x.contiguous(), weights, residual=residual.clone()))


def test_tiles() -> None:
    """Each with its reason in `tune_linear`; the step, which bits depend on, is one for all numbers of tokens."""
    rows_of = {
        (outputs, tokens): tune_linear(LinearShape(2048, outputs, 1), tokens, 132).rows
        for outputs in (2048, 5120, 151_936)
        for tokens in (1, 8, 32, 64)
    }
    assert [rows_of[2048, n] for n in (1, 8, 32, 64)] == [16, 16, 16, 16]
    assert [rows_of[5120, n] for n in (1, 8, 32, 64)] == [16, 16, 32, 32]
    assert [rows_of[151_936, n] for n in (1, 8, 32, 64)] == [64, 64, 32, 32]
    assert len({tune_linear(LinearShape(4096, 1, 2), n, 132).step for n in range(1, 65)}) == 1
    for shape in (LinearShape(2048, 2048, 1), LinearShape(4096, 151_936, 2)):
        for n in (1, 8, 9, 16, 32, 64):
            tuning = tune_linear(shape, n, 132)
            held = tuning.stages * 4 * tuning.step * (tuning.rows * shape.itemsize + 2 * tuning.columns)
            assert tuning.columns in (8, 16, 32)
            assert held <= 113 << 10, "two programs run on a multiprocessor"


def test_few_tokens_and_many_by_one_name() -> None:
    linear = TritonLinear()
    for kind in ("bf16", "fp8"):
        weights, norm = layer(48, 128, kind, bias=True), norm_of(128)
        for count in (1, 8, 70):
            x, residual = rows(count, 128), rows(count, 48, seed=4)
            normed = torch.empty_like(x)
            options = {"norm": norm, "residual": residual, "factor": 0.5}
            found = linear(x, weights, normed=normed, **options)
            assert found.dtype == torch.bfloat16
            assert error(found, exactly(x, weights, **options)) <= 2 * ROUNDED
            assert error(normed, normed_exactly(x, norm)) <= ROUNDED
            assert linear(x, weights, dtype=torch.float32).dtype == torch.float32
        assert linear(x[:0], weights).shape == (0, 48)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_many_tokens_are_as_good_as_the_reference(kind: str) -> None:
    weights, x, norm = layer(48, 128, kind, bias=True), rows(80, 128), norm_of(128)
    exact = exactly(x, weights, norm=norm)
    found, expected = linear_many(x, weights, norm=norm), linear_reference(x, weights, norm=norm)
    assert error(found, exact) <= 2 * error(expected, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [96, 1000, 2048])
def test_norms_of_many_tokens(kind: str, width: int) -> None:
    """Of rows that lie apart, into memory that held something else; as far off as the one rounding behind them."""
    dtype = KINDS[kind]
    x, norm = rows(70, width + 8, dtype)[:, :width], norm_of(width, dtype)
    out = torch.full((70, width), torch.nan, dtype=dtype)
    assert norm_rows(x, norm, out) is out
    assert error(out, normed_exactly(x, norm)) <= 2.0 ** (-11 if dtype is torch.float16 else -8)
    assert torch.equal(norm_rows(x[5:6], norm, torch.empty_like(out[5:6])), out[5:6])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "bias", "residual", "factor"),
    [("fp8", True, True, 0.22), ("fp8", False, False, 1.0), ("bf16", False, True, 1.0), ("fp16", True, True, 3.0)],
)
def test_what_is_behind_the_product_of_many_tokens(dtype, kind: str, bias: bool, residual: bool, factor) -> None:
    weights, x = layer(1100, 64, kind, bias=bias), rows(70, 64, KINDS[kind])
    added = rows(70, 1108, KINDS[kind], seed=7)[:, :1100] if residual else None
    product = torch.nn.functional.linear(x, weights.weight.to(x.dtype)).double()
    exact = product if weights.scale is None else product * weights.scale.double()
    exact = factor * (exact if weights.bias is None else exact + weights.bias.double())
    exact = exact if added is None else exact + added.double()
    found = linear_many(x, weights, residual=added, factor=factor, dtype=dtype)
    assert found.dtype == dtype
    assert error(found, exact) <= (1e-6 if dtype is torch.float32 else 2.0**-8)


def test_many_tokens_after_the_norm_are_left_for_others() -> None:
    weights, x, norm = layer(40, 96, "bf16"), rows(70, 96), norm_of(96)
    normed = torch.full_like(x, torch.nan)
    found = linear_many(x, weights, norm=norm, normed=normed)
    assert error(normed, normed_exactly(x, norm)) <= 2.0**-8
    assert torch.equal(found, torch.nn.functional.linear(normed, weights.weight))
    plain = torch.full_like(x, torch.nan)
    linear_many(x, weights, normed=plain)
    assert torch.equal(plain, x)


def test_many_may_be_none() -> None:
    weights, norm = layer(40, 96, "fp8"), norm_of(96)
    found = linear_many(rows(0, 96), weights, norm=norm, residual=rows(0, 40))
    assert found.shape == (0, 40)


def test_weights_that_are_zero_in_a_channel() -> None:
    weights = layer(20, 64, "fp8")
    weights.weight[7] = 0
    assert torch.equal(run(rows(2, 64), weights)[:, 7], torch.zeros(2))
    assert isinstance(weights, LinearWeights)


@pytest.mark.parametrize("case", ["qwen2_moe", "granitemoe-biases", "olmoe-clip", "qwen3"])
def test_a_decoder_of_such_layers(case: str) -> None:
    """Norms, biases, multipliers, gates of shared experts and weights in FP8, each where a family has it. The error,
    by what float32 makes of the same weights, is at most twice that of the references in bf16."""
    checkpoint = checkpoint_of(case, stored=("nothing",))
    checkpoint.tensors.update({name: tensor.bfloat16().float() for name, tensor in checkpoint.tensors.items()})
    spec, kernels = spec_from_config(checkpoint.config), select_kernels(CPU)
    inputs = ragged_inputs([random_tokens(7, seed=1), random_tokens(2, seed=1)])

    def errors(kept: KeptWeights) -> list[float]:
        exact, expected, found = (
            decoder.logits(decoder.forward(inputs, None))
            for decoder in (
                Decoder(spec, load_weights(checkpoint, spec, dtype=dtype, device=CPU, kept=kept), chosen)
                for dtype, chosen in (
                    (torch.float32, kernels),
                    (torch.bfloat16, kernels),
                    (torch.bfloat16, replace(kernels, linear=TritonLinear())),
                )
            )
        )
        assert found.dtype == torch.float32
        # A near tie of experts may be decided in another way: most tokens count.
        return [float(((x - exact).norm(dim=1) / exact.norm(dim=1)).median()) for x in (expected, found)]

    for kept in ("16bit", "fp8"):
        reference, ours = errors(kept)
        assert ours <= 2 * reference
