"""Weights that are kept in e4m3: experts as a checkpoint stores them, linear layers quantised on the way in."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from tests.models.tiny_models import CPU, MemoryCheckpoint, build, ragged_inputs, random_tokens

from subten.checkpoints import fp8
from subten.engine.loading import choose_weights
from subten.errors import ParameterError
from subten.kernels import select_kernels
from subten.kernels.moe.packing import wide_down, wide_gate_up
from subten.models import Decoder, load_weights, spec_from_config, weight_reader

ALL = slice(None)


@dataclass(frozen=True)
class FP8Checkpoint(MemoryCheckpoint):
    """Tensors whose names contain one of `stored` are in e4m3, with scales of one kind."""

    kind: fp8.FP8Scales = "block"
    stored: tuple[str, ...] = ("experts.",)

    def fp8_scales(self, name: str) -> fp8.FP8Scales | None:
        return self.kind if any(word in name for word in self.stored) else None

    def load_fp8(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        self.loaded.append(name)
        if self.kind == "block":
            return fp8.quantise_blocks(self.tensors[name])
        codes, scale = fp8.quantise_channels(self.tensors[name])
        return codes, scale[..., 0]

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if self.fp8_scales(name) is None:
            return super().load(name, dtype)
        codes, scale = self.load_fp8(name)
        wide = fp8.dequantise_blocks if self.kind == "block" else fp8.dequantise_channels
        return wide(codes, scale).to(dtype)


def checkpoint_of(case: str, **options: object) -> FP8Checkpoint:
    model = build(case)
    config = json.loads(model.config.to_json_string())
    return FP8Checkpoint(config, _saved(model), [], **options)


def _saved(model) -> dict[str, torch.Tensor]:
    import tempfile
    from pathlib import Path

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def load(checkpoint: FP8Checkpoint, kept: str, dtype: torch.dtype = torch.float32):
    return load_weights(checkpoint, spec_from_config(checkpoint.config), dtype=dtype, device=CPU, kept=kept)


def logits(checkpoint: FP8Checkpoint, kept: str, **kernels: str) -> torch.Tensor:
    decoder = Decoder(spec_from_config(checkpoint.config), load(checkpoint, kept), select_kernels(CPU, kernels))
    return decoder.logits(decoder.forward(ragged_inputs([random_tokens(9), random_tokens(3)]), None))


@pytest.mark.parametrize("kind", ["block", "channel"])
@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe", "granitemoe"])
def test_stored_experts_are_what_the_checkpoint_holds(case: str, kind: fp8.FP8Scales) -> None:
    """And the logits are those of the weights restored at load, in both ways of computing them."""
    words = ("experts.", "shared_expert.", "input_linear", "output_linear")
    checkpoint = checkpoint_of(case, kind=kind, stored=words)
    kept, wide = load(checkpoint, "stored"), load(checkpoint, "16bit")
    found = 0
    for layer, expected in zip(kept.layers, wide.layers, strict=True):
        if not hasattr(layer.feed_forward, "experts"):
            continue
        if case == "granitemoe" and kind == "block":
            # Its gate and up lie in one tensor and share a block.
            assert layer.feed_forward.gate_up.dtype == torch.float32
            continue
        found += 1
        blocks = [(layer.feed_forward.experts, expected.feed_forward.experts)]
        if layer.feed_forward.shared is not None:
            blocks.append((layer.feed_forward.shared.expert, expected.feed_forward.shared.expert))
        for block, restored in blocks:
            assert block.gate_up.dtype == block.down.dtype == torch.float8_e4m3fn
            assert torch.equal(wide_gate_up(block, ALL, torch.float32), restored.gate_up)
            assert torch.equal(wide_down(block, ALL, torch.float32), restored.down)
        assert layer.feed_forward.router.dtype == torch.float32
        assert layer.attention.qkv.scale is None
    assert found or (case, kind) == ("granitemoe", "block")
    expected_logits = logits(checkpoint, "16bit")
    torch.testing.assert_close(logits(checkpoint, "stored"), expected_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(checkpoint, "stored", moe="unfused"), expected_logits, rtol=1e-4, atol=1e-4)


def test_experts_that_are_stored_in_two_ways_are_restored() -> None:
    checkpoint = checkpoint_of("mixtral", stored=("experts.1.",))
    assert load(checkpoint, "stored").layers[0].feed_forward.gate_up_scale is None
    quantised = load(checkpoint, "fp8").layers[0].feed_forward
    assert quantised.gate_up_scale.shape == quantised.gate_up.shape[:2]


@pytest.mark.parametrize("case", ["llama", "qwen2-tied", "mixtral", "qwen2_moe", "granitemoe-biases"])
def test_all_matrices_can_be_quantised_and_each_tensor_is_read_once(case: str) -> None:
    checkpoint = checkpoint_of(case, stored=("nothing",))
    kept, wide = load(checkpoint, "fp8", torch.bfloat16), load(checkpoint, "16bit")
    assert sorted(checkpoint.loaded) == sorted([*checkpoint.tensors, *checkpoint.tensors])
    pairs = [(kept.output, wide.output)]
    for layer, expected in zip(kept.layers, wide.layers, strict=True):
        pairs += [(getattr(layer.attention, n), getattr(expected.attention, n)) for n in ("qkv", "o")]
        if hasattr(layer.feed_forward, "experts"):
            for found, exact in (
                (wide_gate_up(layer.feed_forward.experts, ALL, torch.float32), expected.feed_forward.gate_up),
                (wide_down(layer.feed_forward.experts, ALL, torch.float32), expected.feed_forward.down),
            ):
                assert_rounded(found, exact)
        else:
            dense = layer.feed_forward, expected.feed_forward
            pairs += [(dense[0].gate_up, dense[1].gate_up), (dense[0].down, dense[1].down)]
        assert layer.input_norm.dtype == torch.bfloat16
        bias = layer.attention.qkv.bias
        assert bias is None or bias.dtype == torch.bfloat16
    for found, exact in pairs:
        assert found.weight.dtype == torch.float8_e4m3fn
        assert found.scale.dtype == torch.float32
        assert_rounded(found.wide(torch.float32), exact.weight)
    assert kept.embedding.dtype == torch.bfloat16


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """To four bits of mantissa, or to the smallest step of e4m3 below."""
    step = exact.abs().amax(-1, keepdim=True) / 448 * 2.0**-10
    assert ((found - exact).abs() <= exact.abs() * 2.0**-4 + step * 1.01).all()


def test_quantising_takes_some_rows_at_a_time(monkeypatch) -> None:
    weight = torch.randn(37, 24)
    whole = weight_reader.quantise_rows(weight)
    monkeypatch.setattr(weight_reader, "_AT_ONCE", 5 * 24)
    for found, expected in zip(weight_reader.quantise_rows(weight), whole, strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_the_demo_model_as_stored_gives_the_same_logits() -> None:
    from subten.engine import load_model
    from subten.engine.calibrate import without_cache

    logits = {}
    for kept in ("auto", "stored", "fp8"):
        model = load_model("demo-moe", device="cpu", weights=kept)
        ids = model.tokenizer.encode("When in the Course of human events, it becomes necessary")
        logits[kept] = model.decoder.logits(model.decoder.forward(without_cache(ids, CPU), None))
        assert model.weights == {"auto": "16bit"}.get(kept, kept)
    torch.testing.assert_close(logits["stored"], logits["auto"], rtol=0, atol=1e-4)
    divergence = torch.nn.functional.kl_div(
        logits["fp8"].log_softmax(-1), logits["auto"].log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert 0 < float(divergence) < 0.01


def test_what_is_kept_depends_on_the_device(monkeypatch) -> None:
    cuda = torch.device("cuda")
    assert choose_weights("auto", CPU) == "16bit"
    assert choose_weights("fp8", CPU) == "fp8"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_weights("auto", cuda) == "stored"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_weights("auto", cuda) == "16bit"
    with pytest.raises(ParameterError, match=r"'fp8' need a GPU of compute capability 8.9 or more"):
        choose_weights("fp8", cuda)
    with pytest.raises(ParameterError, match="weights is 'int4'; it must be auto or one of 16bit, stored, fp8"):
        choose_weights("int4", CPU)
