"""Experts in FP8 restored in one pass, in Triton's interpreter, against torch; and compiled without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from subten.kernels.moe import RouterSpec, restoring
from subten.kernels.moe.packing import EVERY, cut_down, wide_down, wide_gate_up
from subten.kernels.moe.restoring import in_one_pass, restored_down, restored_gate_up
from support.compiled import compiled
from support.device_code import quicken_interpreter
from support.interpreter import correct_numbers
from support.moe import block

RULE = RouterSpec(3, 2, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["channel", "block"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (192, 96)])
@pytest.mark.parametrize("cut", [False, True])
def test_the_same_bits_as_torch(cut, hidden, intermediate, kind, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial tiles and blocks among them."""
    quicken_interpreter(monkeypatch)
    correct_numbers(monkeypatch)
    weights = block(RULE, kind, hidden=hidden, intermediate=intermediate)
    experts = (cut_down(weights, 32) if cut else weights).experts
    gate_up, down = wide_gate_up(experts, EVERY, dtype), wide_down(experts, EVERY, dtype)
    assert torch.equal(restored_gate_up(experts, dtype), gate_up)
    monkeypatch.setattr(restoring, "in_one_pass", lambda *_: True)
    monkeypatch.setattr(restoring, "wide_gate_up", None)
    monkeypatch.setattr(restoring, "wide_down", None)
    assert torch.equal(restored_gate_up(experts, dtype), gate_up)
    assert torch.equal(restored_down(experts, dtype), down)
    assert gate_up.any(-1).all()
    assert down.shape == (3, hidden, intermediate)


@pytest.mark.parametrize("one_pass", [False, True])
def test_experts_in_16_bit_are_what_they_were(one_pass, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken_interpreter(monkeypatch)
    correct_numbers(monkeypatch)
    monkeypatch.setattr(restoring, "in_one_pass", lambda *_: one_pass)
    experts = block(RULE).experts
    assert restored_gate_up(experts, torch.bfloat16).data_ptr() == experts.gate_up.data_ptr()  # Nothing is copied.
    assert restored_down(experts, torch.bfloat16).data_ptr() == experts.down.data_ptr()
    if one_pass:
        monkeypatch.setattr(restoring, "wide_down", None)
    assert torch.equal(restored_down(cut_down(block(RULE), 32).experts, torch.bfloat16), experts.down)


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "found", "expected"),
    [
        ("cpu", (9, 0), torch.bfloat16, True, False),
        ("cuda", (8, 0), torch.bfloat16, True, False),
        ("cuda", (8, 9), torch.float16, True, True),
        ("cuda", (10, 0), torch.bfloat16, True, True),
        ("cuda", (9, 0), torch.float64, True, False),
        ("cuda", (9, 0), torch.bfloat16, False, False),
    ],
)
def test_where_it_is_taken(device, capability, dtype, found, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(restoring, "find_spec", lambda _name: SimpleNamespace() if found else None)
    assert in_one_pass(torch.device(device), dtype) is expected


def test_sixteen_bytes_at_a_time_on_all_generations_with_fp8(tmp_path: Path) -> None:
    results = compiled("compile_restore", tmp_path)
    assert {result["capability"] for result in results} == {89, 90, 100}
    for result in results:
        assert result["spilled"] == 0
        assert set(result["stores"]) == {"STG.E.128"}
        # Of 64 x 128 weights, 128 threads load 4 times 16, in 16 bit 8 times 8; the others are scales.
        assert result["loads"]["LDG.E.128"] == (8 if result["wide"] else 4)
        assert set(result["loads"]) == ({"LDG.E.128"} if result["wide"] else {"LDG.E.128", "LDG.E"})
