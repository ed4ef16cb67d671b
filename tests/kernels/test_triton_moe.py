"""The one-launch mixture of experts in Triton's interpreter, against the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subten.errors import KernelUnavailableError
from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH
from subten.kernels.moe import RouterSpec, moe_reference, one_launch, route
from subten.kernels.moe.packing import cut_down, wide_down
from subten.kernels.moe.plan import MoEShape, most_items, plan_moe, tune_moe
from subten.kernels.moe.triton_decode import MoEScratch, moe_decode
from subten.kernels.moe.triton_moe import TritonMoE
from support.device_code import quicken_interpreter
from support.interpreter import correct_numbers
from support.moe import HIDDEN, block, error, expected, logits_of, poisoned, tokens

SMS = 4
EXACT = 2e-3
RENORMALISED = RouterSpec(8, 3, True)
RULES = {
    "softmax, then top k (OLMoE)": (RouterSpec(8, 3, False), {}),
    "top k, then softmax (Mixtral)": (RENORMALISED, {}),
    "as many as there are": (RouterSpec(5, 5, True), {}),
    "one of many (40 experts)": (RouterSpec(40, 1, False), {}),
    "sigmoid": (RouterSpec(8, 2, False, "sigmoid"), {}),
    "sigmoid, corrected and scaled (GLM-4.5)": (RouterSpec(8, 2, True, "sigmoid", 2.5), {"corrected": True}),
    "gated shared expert (Qwen2-MoE)": (RouterSpec(6, 2, False), {"shared": 96}),
    "shared expert without gate": (RouterSpec(6, 2, True, "sigmoid"), {"shared": 32, "gated": False}),
}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken_interpreter(monkeypatch)
    correct_numbers(monkeypatch)


def run(x, weights, activations="16bit", sums="fixed", logits=None, **changes):
    """In float32. What is not written is NaN, and the scratch memory is left as it was found."""
    shape = MoEShape.of(weights)
    # Programs run one after the other here: the last one can't wait for others.
    plan = replace(plan_moe(shape, len(x), SMS, activations, sums), finishers=1, **changes)
    scratch = MoEScratch.allocate(plan, shape.hidden, x.device)
    out = torch.full((len(x), shape.hidden), torch.nan)
    logits = logits_of(x, weights) if logits is None else logits
    moe_decode(x, weights, plan, scratch, logits=logits, out=out)
    assert not any(tensor.any() for tensor in vars(scratch).values())
    return out


@pytest.mark.parametrize("rule", RULES)
def test_all_ways_of_routing(rule) -> None:
    spec, options = RULES[rule]
    weights, x = block(spec, **options), tokens(9)
    logits = logits_of(x, weights)
    assert error(run(x, weights), expected(x, weights, logits)) <= EXACT


@pytest.mark.parametrize("count", [1, 2, 7, 16, 17, 33, 64])
def test_any_number_of_tokens(count) -> None:
    weights, x = block(RENORMALISED, "channel"), tokens(count)
    assert error(run(x, weights), expected(x, weights, logits_of(x, weights))) <= EXACT


@pytest.mark.parametrize(
    ("kind", "activations", "allowed"),
    [
        ("bf16", "16bit", EXACT),
        ("fp16", "16bit", EXACT),
        ("channel", "16bit", EXACT),
        ("block", "16bit", EXACT),
        ("channel", "fp8x2", EXACT),
        ("block", "fp8x2", EXACT),
        ("channel", "fp8", 7e-2),
        ("block", "fp8", 7e-2),
    ],
)
@pytest.mark.parametrize("sums", ["fixed", "float"])
def test_all_kinds_of_weights(kind, activations, allowed, sums) -> None:
    """Partial blocks of scales among them: 96 neurons."""
    weights = block(RouterSpec(6, 2, True), kind, hidden=192, intermediate=96, shared=160)
    x = tokens(5, 192, dtype=torch.float16 if kind == "fp16" else torch.bfloat16)
    found = error(run(x, weights, activations, sums), expected(x, weights, logits_of(x, weights)))
    assert found <= allowed
    if activations == "fp8":
        assert found > EXACT, "one term in FP8 can't be that exact"


@pytest.mark.parametrize("kind", ["bf16", "block"])
@pytest.mark.parametrize("width", [32, 64])
def test_slices_of_the_down_projection_behind_each_other(kind, width) -> None:
    weights = block(RENORMALISED, kind, shared=64)
    x = tokens(6)
    tuning = replace(tune_moe(MoEShape.of(weights), SMS), slice=32)
    before, down = run(x, weights, tuning=tuning), wide_down(weights.experts, slice(None), torch.float64)
    at = weights.down.data_ptr()
    cut = cut_down(weights, width)
    assert cut.down.data_ptr() == at
    assert cut.down.shape == (8, 64 // width, HIDDEN, width)
    assert torch.equal(wide_down(cut.experts, slice(None), torch.float64), down)
    assert torch.equal(run(x, cut, tuning=tuning), before)


def test_all_tokens_to_one_expert() -> None:
    weights, x = block(RouterSpec(8, 1, True), "channel"), tokens(20)
    logits = torch.zeros(20, 8)
    logits[:, 5] = 4
    result = run(x, poisoned(weights, [0, 1, 2, 3, 4, 6, 7]), logits=logits)
    assert error(result, expected(x, weights, logits)) <= EXACT


@pytest.mark.parametrize("kind", ["bf16", "channel"])
def test_experts_without_a_token_are_not_read(kind) -> None:
    weights, x = block(RENORMALISED, kind), tokens(2)
    chosen, _ = route(logits_of(x, weights), weights.rule)
    idle = [expert for expert in range(8) if expert not in chosen]
    assert idle
    assert torch.equal(run(x, poisoned(weights, idle)), run(x, weights))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_equal_scores_go_to_the_lowest_expert(scoring) -> None:
    weights, x = block(RouterSpec(8, 3, True, scoring)), tokens(4)
    rows = [[0, 2, 2, 2, 2, 1, 2, 0], [1] * 8, [-1, -1, 3, -1, -1, -1, 3, -1], [0.0, -0.0] * 4]
    logits = torch.tensor(rows, dtype=torch.float32)
    assert error(run(x, weights, logits=logits), expected(x, weights, logits)) <= EXACT


@pytest.mark.parametrize(
    ("poison", "sums"),
    [(float("nan"), "fixed"), (float("inf"), "fixed"), (-float("inf"), "fixed"), (float("nan"), "float")],
)
@pytest.mark.parametrize(("kind", "activations"), [("bf16", "16bit"), ("block", "16bit"), ("channel", "fp8x2")])
def test_a_bad_token_does_not_leak_into_others(poison, kind, activations, sums) -> None:
    weights, x = block(RENORMALISED, kind, shared=32), tokens(6)
    clean = run(x, weights, activations, sums)
    x[4, 7] = poison
    result = run(x, weights, activations, sums)
    assert result[4].isnan().all()
    others = [0, 1, 2, 3, 5]
    # Which experts the bad token visits is another matter, and with it the order in which float32 is added up.
    tolerance = 0 if sums == "fixed" else 1e-6
    torch.testing.assert_close(result[others], clean[others], rtol=tolerance, atol=tolerance)


def test_a_token_too_large_for_the_sums_is_nan() -> None:
    weights, x = block(RENORMALISED), tokens(3)
    weights = replace(weights, down=weights.down * 2.0**20)
    assert run(x, weights).isnan().all()
    assert run(x, weights, sums="float").isfinite().all()


@pytest.mark.parametrize(("kind", "activations"), [("bf16", "16bit"), ("channel", "16bit"), ("block", "fp8x2")])
def test_the_same_bits_in_any_batch_and_order_of_work(kind, activations) -> None:
    weights, x = block(RENORMALISED, kind, shared=32), tokens(40)
    # Of one product: the last bits of torch's depend on how many rows there are.
    logits = logits_of(x, weights)
    together = run(x, weights, activations, logits=logits)
    mixed = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(run(x[mixed], weights, activations, logits=logits[mixed]), together[mixed])
    for count in (1, 20, 33):
        assert torch.equal(run(x[:count], weights, activations, logits=logits[:count]), together[:count])
    for programs in (1, 3, 24):
        assert torch.equal(run(x, weights, activations, logits=logits, programs=programs), together)


def test_more_tokens_to_an_expert_than_columns() -> None:
    weights, x = block(RENORMALISED, "block", shared=32), tokens(33)
    logits = logits_of(x, weights)
    logits[:, 2] = torch.where(torch.arange(33) % 5 == 1, -9, 9)
    tuning = tune_moe(MoEShape.of(weights), SMS)
    found = [run(x, weights, logits=logits, tuning=replace(tuning, columns=columns)) for columns in (8, 16, 64)]
    assert error(found[0], expected(x, weights, logits)) <= EXACT
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(("count", "columns"), [(1, 8), (9, 8), (33, 8), (64, 16)])
def test_no_routing_has_more_items_than_are_planned_for(count, columns) -> None:
    shape = MoEShape.of(block(RENORMALISED, shared=32))
    tuning = replace(tune_moe(shape, SMS), columns=columns)
    planned, seen = most_items(shape, count, tuning.columns, tuning.slice), 0
    for spread in (0.0, 0.5, 2.0, 8.0):
        logits = tokens(count, 8).float() + spread * torch.arange(8)
        visits = route(logits, RENORMALISED)[0].flatten().bincount(minlength=8)
        tiles = int((-(-visits // columns)).sum()) * shape.intermediate
        seen = max(seen, (tiles - (-count // columns) * shape.shared) // tuning.slice)
    assert 0.6 * planned <= seen <= planned


def test_one_plan_for_the_bits_at_all_numbers_of_tokens() -> None:
    shape = MoEShape.of(block(RouterSpec(8, 2, True), "block", hidden=256, intermediate=256))
    tunings = {plan_moe(shape, count, 132, "fp8x2").tuning for count in (1, 8, 32, 64)}
    assert len({(tuning.slice, tuning.block_k) for tuning in tunings}) == 1


def test_in_the_dtype_of_the_tokens_through_the_operation() -> None:
    moe = TritonMoE()
    weights, x = block(RENORMALISED, shared=32), tokens(5)
    moe._plans[MoEShape.of(weights), 8, x.device] = replace(plan_moe(MoEShape.of(weights), 8, SMS), finishers=1)
    result = moe(x, weights)
    assert result.dtype == torch.bfloat16
    assert error(result, moe_reference(x.float(), _in_float32(weights)).double()) < 1e-2
    assert torch.equal(moe(x, weights), result)
    assert moe(x[:0], weights).shape == (0, HIDDEN)


@pytest.mark.parametrize("kind", ["bf16", "block"])
@pytest.mark.parametrize("sums", ["fixed", "float"])
def test_onto_a_residual_stream(kind: str, sums: str) -> None:
    weights, x, residual = block(RENORMALISED, kind, shared=32), tokens(5), tokens(5, seed=3) * 30
    logits = logits_of(x, weights)
    plan = replace(plan_moe(MoEShape.of(weights), 5, SMS, sums=sums), finishers=1)
    out = torch.full((5, HIDDEN), torch.nan)
    moe_decode(x, weights, plan, logits=logits, residual=residual, factor=0.25, out=out)
    exact = residual.double() + 0.25 * expected(x, weights, logits)
    assert error(out - residual.float(), exact - residual.double()) <= EXACT


def test_prompts_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_launch, "most_tokens_in_launches", lambda _shape: MOST_TOKENS_OF_A_LAUNCH)
    weights, x = block(RENORMALISED, shared=32), tokens(MOST_TOKENS_OF_A_LAUNCH + 1)
    result = TritonMoE()(x, weights)
    assert error(result, moe_reference(x.float(), _in_float32(weights)).double()) < 2e-2


def test_short_prompts_go_through_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No expert is restored in 16 bit."""
    monkeypatch.setattr(one_launch, "moe_unfused", None)
    moe, weights, count = TritonMoE(), block(RENORMALISED, "channel", shared=32), MOST_TOKENS_OF_A_LAUNCH + 9
    x, residual = tokens(count), tokens(count, seed=3)
    logits = logits_of(x, weights)
    result = moe(x, weights, logits=logits, residual=residual, factor=0.5)
    exact = residual.double() + 0.5 * expected(x, weights, logits)
    assert error(result, exact) <= 4e-3
    alone = moe(x[-9:], weights, logits=logits[-9:], residual=residual[-9:], factor=0.5)
    assert torch.equal(result[-9:], alone)
    assert moe(x, weights).shape == x.shape


@pytest.mark.parametrize(("kind", "count", "unfused"), [("bf16", 65, 1), ("channel", 128, 0), ("channel", 129, 1)])
def test_which_prompts_go_through_grouped_gemms(
    kind: str, count: int, unfused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(one_launch, "most_tokens_in_launches", lambda shape: 64 if shape.scales == "none" else 128)
    monkeypatch.setattr(one_launch, "moe_unfused", lambda x, *_, **__: calls.append(x) or x)
    moe = TritonMoE()
    monkeypatch.setattr(moe, "launch", lambda x, *_: x)
    x = tokens(count)
    assert torch.equal(moe(x, block(RENORMALISED, kind)), x)
    assert len(calls) == unfused


def test_what_it_does_not_serve_is_refused() -> None:
    weights = block(RENORMALISED)
    wide = replace(weights, gate_up=weights.gate_up.float(), down=weights.down.float())
    narrow = block(RENORMALISED, intermediate=40)
    for given, reason in ((wide, "16 bit or FP8, not torch.float32"), (narrow, "not 128 and 40")):
        with pytest.raises(KernelUnavailableError, match=reason):
            TritonMoE()(tokens(2), given)


def _in_float32(weights):
    shared = weights.shared and replace(
        weights.shared,
        gate_up=weights.shared.gate_up.float(),
        down=weights.shared.down.float(),
        gate=weights.shared.gate.float(),
    )
    return replace(
        weights,
        router=weights.router.float(),
        gate_up=weights.gate_up.float(),
        down=weights.down.float(),
        shared=shared,
    )
