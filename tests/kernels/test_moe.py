from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from subten.kernels.moe import MoEWeights, RouterSpec, SharedExpertWeights, moe_reference, route
from subten.kernels.moe.reference import expected_active_experts, moe_bytes, moe_flops


def block(rule, hidden=24, intermediate=10, shared=None, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    num_experts = rule.num_experts
    return MoEWeights(
        rule=rule,
        router=weight(num_experts, hidden) * 3,
        gate_up=weight(num_experts, 2 * intermediate, hidden),
        down=weight(num_experts, hidden, intermediate),
        shared=None
        if shared is None
        else SharedExpertWeights(
            gate_up=weight(2 * shared, hidden), down=weight(hidden, shared), gate=weight(1, hidden)
        ),
    )


def tokens(count, hidden=24, seed=1):
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))


def dense_in_float64(x, weights):
    """Every expert on every token, weighted by a matrix that is zero where a token is not routed."""
    x = x.double()
    probabilities = torch.softmax(x @ weights.router.double().T, dim=-1)
    threshold = probabilities.sort(dim=-1).values[:, -weights.rule.top_k, None]
    mixing = torch.where(probabilities >= threshold, probabilities, 0)
    if weights.rule.renormalize:
        mixing = mixing / mixing.sum(dim=-1, keepdim=True)
    hidden = torch.einsum("th,eih->eti", x, weights.gate_up.double())
    gate, up = hidden.chunk(2, dim=-1)
    outputs = torch.einsum("eti,ehi->eth", gate * torch.sigmoid(gate) * up, weights.down.double())
    result = torch.einsum("te,eth->th", mixing, outputs)
    if weights.shared is not None:
        gate, up = (x @ weights.shared.gate_up.double().T).chunk(2, dim=-1)
        output = (gate * torch.sigmoid(gate) * up) @ weights.shared.down.double().T
        result = result + torch.sigmoid(x @ weights.shared.gate.double().T) * output
    return result


@given(
    count=st.integers(0, 20),
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 9),
    renormalize=st.booleans(),
    shared=st.sampled_from([None, 6]),
    seed=st.integers(0, 1000),
)
def test_equals_the_dense_computation(count, num_experts, top_k, renormalize, shared, seed):
    weights = block(RouterSpec(num_experts, min(top_k, num_experts), renormalize), shared=shared, seed=seed)
    x = tokens(count, seed=seed + 1)
    torch.testing.assert_close(moe_reference(x, weights).double(), dense_in_float64(x, weights), atol=3e-6, rtol=1e-5)


def test_float64_is_computed_in_float64():
    weights = block(RouterSpec(6, 2, False), shared=12, dtype=torch.float64)
    x = tokens(9).double()
    torch.testing.assert_close(moe_reference(x, weights), dense_in_float64(x, weights), atol=1e-14, rtol=1e-13)


def test_bfloat16_result_is_close_and_in_bfloat16():
    weights = block(RouterSpec(6, 2, True), shared=12, dtype=torch.bfloat16)
    x = tokens(16).bfloat16()
    result, exact = moe_reference(x, weights), dense_in_float64(x, weights)
    assert result.dtype == torch.bfloat16
    # bfloat16 routing may pick the other expert of a near tie, so the bound is on most tokens, not on all.
    error = (result.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.median() < 0.01


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_token_has_the_same_result_in_any_batch(renormalize):
    weights = block(RouterSpec(8, 3, renormalize), shared=5)
    x = tokens(12)
    alone = torch.cat([moe_reference(row[None], weights) for row in x])
    torch.testing.assert_close(moe_reference(x, weights), alone, atol=1e-6, rtol=1e-6)
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(moe_reference(x[shuffled], weights), alone[shuffled], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_token_does_not_leak_into_others(poison):
    weights = block(RouterSpec(4, 2, True), shared=5)
    x = tokens(9)
    clean = moe_reference(x, weights)
    x[4, 7] = poison
    result = moe_reference(x, weights)
    assert result[4].isnan().any()
    others = [row for row in range(9) if row != 4]
    torch.testing.assert_close(result[others], clean[others], atol=1e-6, rtol=1e-6)


def test_experts_that_no_token_chose_are_not_read():
    weights = block(RouterSpec(8, 2, True))
    x = tokens(2)
    experts, _ = route(x @ weights.router.T, weights.rule)
    idle = [expert for expert in range(8) if expert not in experts]
    assert idle
    poisoned = replace(weights, gate_up=weights.gate_up.clone(), down=weights.down.clone())
    poisoned.gate_up[idle], poisoned.down[idle] = torch.nan, torch.nan
    assert torch.equal(moe_reference(x, poisoned), moe_reference(x, weights))


def test_router_ties_go_to_the_lowest_index():
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 3.0, 0.0, 3.0]])
    experts, _ = route(logits, RouterSpec(5, 2, True))
    assert experts.tolist() == [[1, 2], [0, 1], [0, 2]]
    wide = torch.zeros(3, 256)
    assert route(wide, RouterSpec(256, 8, False))[0].tolist() == [list(range(8))] * 3


def test_router_without_renormalisation_keeps_the_probabilities():
    logits = torch.tensor([[1.0, 3.0, 0.0, 2.0]])
    experts, weights = route(logits, RouterSpec(4, 2, False))
    assert experts.tolist() == [[1, 3]]
    torch.testing.assert_close(weights[0], torch.softmax(logits[0], -1)[[1, 3]])


@given(st.integers(0, 10_000))
def test_renormalising_is_the_softmax_of_the_chosen_logits(seed):
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)) * 5
    experts, renormalised = route(logits, RouterSpec(16, 4, True))
    _, plain = route(logits, RouterSpec(16, 4, False))
    torch.testing.assert_close(renormalised, plain / plain.sum(-1, keepdim=True))
    torch.testing.assert_close(renormalised, torch.softmax(logits.gather(-1, experts), dim=-1))


def test_routing_survives_logits_that_underflow_as_probabilities():
    experts, weights = route(torch.tensor([[0.0, -300.0, -200.0, -400.0]]), RouterSpec(4, 3, False))
    assert experts.tolist() == [[0, 2, 1]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("shared", [None, 6])
@pytest.mark.parametrize("count", [1, 13])
def test_costs(count, shared):
    rule = RouterSpec(8, 3, True)
    weights = block(rule, shared=shared, dtype=torch.bfloat16)
    x = tokens(count).bfloat16()
    with FlopCounterMode(display=False) as counter:
        result = moe_reference(x, weights)
    assert moe_flops(count, 24, 10, rule, shared or 0) == counter.get_total_flops()

    active = route(x @ weights.router.T, rule)[0].unique()
    moved = [x, result, weights.router, weights.gate_up[active], weights.down[active]]
    if weights.shared is not None:
        moved += [weights.shared.gate_up, weights.shared.down, weights.shared.gate]
    assert moe_bytes(count, len(active), 24, 10, rule, shared or 0) == sum(t.nbytes for t in moved)


def test_expected_active_experts_is_the_average_of_random_routing():
    rule = RouterSpec(16, 2, True)
    logits = torch.rand(4000, 6, 16, generator=torch.Generator().manual_seed(5))
    counts = [len(route(step, rule)[0].unique()) for step in logits]
    # The standard deviation of one count is about 1, so that of the mean about 0.016.
    assert sum(counts) / len(counts) == pytest.approx(expected_active_experts(6, rule), abs=0.06)
    assert expected_active_experts(1, rule) == pytest.approx(2)
    assert expected_active_experts(0, rule) == 0
