from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from subten.kernels.moe import RouterSpec, moe_reference, route
from subten.kernels.moe.packing import cut_down, wide_down, wide_gate_up
from subten.kernels.moe.unfused import moe_unfused
from support.moe import block, error, expected, logits_of, poisoned, tokens

RULE = RouterSpec(8, 3, True)


def in_float32(weights):
    shared = weights.shared
    if shared is not None:
        gate = None if shared.gate is None else shared.gate.float()
        shared = replace(shared, gate=gate)
    return replace(weights, router=weights.router.float(), shared=shared)


@pytest.mark.parametrize("kind", ["bf16", "channel", "block"])
@pytest.mark.parametrize("count", [1, 30, 100])
def test_equals_the_definition(kind, count) -> None:
    weights = in_float32(block(RULE, kind, shared=96))
    x = tokens(count, dtype=torch.float32)
    assert error(moe_unfused(x, weights), expected(x, weights, logits_of(x, weights))) < 1e-5


@pytest.mark.parametrize("moe", [moe_unfused, moe_reference])
@pytest.mark.parametrize("gated", [True, False])
def test_with_logits_that_are_known_and_onto_a_residual_stream(moe, gated: bool) -> None:
    weights = in_float32(block(RULE, "channel", shared=96, gated=gated))
    x, residual = tokens(9, dtype=torch.float32), tokens(9, seed=5, dtype=torch.float32)
    logits = logits_of(x, weights).roll(1, 0)
    found = moe(x, weights, logits=logits, residual=residual, factor=0.3)
    assert error(found, residual.double() + 0.3 * expected(x, weights, logits)) < 1e-5
    assert error(moe(x, weights, logits=logits, factor=0.3), 0.3 * expected(x, weights, logits)) < 1e-5


@pytest.mark.parametrize(
    "rule", [RouterSpec(8, 3, False), RouterSpec(8, 2, True, "sigmoid", 2.5), RouterSpec(5, 5, True)]
)
def test_all_ways_of_routing(rule) -> None:
    weights = in_float32(block(rule, corrected=rule.scoring == "sigmoid", shared=32, gated=False))
    x = tokens(12, dtype=torch.float32)
    assert error(moe_unfused(x, weights), expected(x, weights, logits_of(x, weights))) < 1e-5


def test_a_bad_token_does_not_leak_into_others() -> None:
    weights, x = block(RULE, shared=32), tokens(6)
    clean = moe_unfused(x, weights)
    x[4, 7] = torch.nan
    result = moe_unfused(x, weights)
    assert result[4].isnan().all()
    others = [0, 1, 2, 3, 5]
    assert torch.equal(result[others], clean[others])


def test_experts_without_a_token_have_no_influence() -> None:
    weights, x = block(RULE), tokens(2)
    idle = [expert for expert in range(8) if expert not in route(x @ weights.router.T, RULE)[0]]
    assert idle
    assert torch.equal(moe_unfused(x, poisoned(weights, idle)), moe_unfused(x, weights))


class OnDevice(TorchDispatchMode):
    """Refuses what a CUDA graph can't capture: numbers for the host, and shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "unique", "_unique2", "masked_select", "bincount"}, name
        return func(*args, **(kwargs or {}))


def test_nothing_goes_back_to_the_host() -> None:
    weights, x = block(RULE, shared=32), tokens(7)
    with OnDevice():
        moe_unfused(x, weights)
    with pytest.raises(AssertionError, match="nonzero"), OnDevice():
        (x > 0).nonzero()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["channel", "block"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (192, 96)])
def test_weights_are_restored_with_one_rounding(hidden, intermediate, kind, dtype) -> None:
    experts = block(RULE, kind, hidden=hidden, intermediate=intermediate).experts

    def restored(codes, scale):
        if kind == "block":
            rows, columns = (torch.arange(size) // 128 for size in codes.shape[1:])
            return (codes.float() * scale[:, rows][:, :, columns]).to(dtype)
        return (codes.float() * scale[..., None]).to(dtype)

    halves = zip(experts.gate_up.view(torch.uint8).chunk(2, 1), experts.gate_up_scale.chunk(2, 1), strict=True)
    gate_up = torch.cat([restored(half.view(experts.gate_up.dtype), scale) for half, scale in halves], 1)
    assert torch.equal(wide_gate_up(experts, slice(None), dtype), gate_up)
    down = restored(experts.down, experts.down_scale)
    assert torch.equal(wide_down(experts, slice(1, 3), dtype), down[1:3])
    before = experts.down.view(torch.uint8).clone()
    cut = cut_down(block(RULE, kind, hidden=hidden, intermediate=intermediate), 32).experts
    assert torch.equal(wide_down(cut, slice(None), dtype), down)
    assert torch.equal(experts.down.view(torch.uint8), before)
