from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from subten.kernels.attention.dense import dense_attention_reference
from subten.kernels.attention.online import OnlineSoftmax
from support.attention import history


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 1), (2, 3), (1, 8)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_ragged_batch_is_causal_attention_of_each_sequence(kv_heads: int, group: int, head_dim: int) -> None:
    lengths = [1, 2, 200, 600]
    histories = [history(n, kv_heads, group, head_dim, seed=n) for n in lengths]
    q, k, v = (torch.cat([getattr(past, name) for past in histories]) for name in ("q", "k", "v"))
    out = dense_attention_reference(q, k, v, starts_of(lengths), 0.11)
    for past, result in zip(histories, out.split(lengths), strict=True):
        heads = (x.transpose(0, 1)[None] for x in (past.q, past.k, past.v))
        torchs = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.11, enable_gqa=True)
        torch.testing.assert_close(result, torchs[0].transpose(0, 1), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_result_has_the_dtype_of_the_query_and_its_rounding_only(dtype: torch.dtype) -> None:
    past = history(300, 2, 2, 64, dtype=dtype)
    out = dense_attention_reference(past.q, past.k, past.v, starts_of([300]), 0.11)
    wide = past.to(torch.float64)
    exact = dense_attention_reference(wide.q, wide.k, wide.v, starts_of([300]), 0.11)
    assert out.dtype == dtype
    epsilon = max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)
    assert float((out - exact).abs().max()) <= epsilon * float(exact.abs().max())


def test_later_tokens_do_not_change_earlier_results() -> None:
    past = history(600, 2, 2, 64)
    out = dense_attention_reference(past.q, past.k, past.v, starts_of([600]), 0.11)
    past.k[400:] = past.v[400:] = 1e6
    again = dense_attention_reference(past.q, past.k, past.v, starts_of([600]), 0.11)
    assert torch.equal(out[:400], again[:400])
    assert not torch.equal(out[400:], again[400:])


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 1000), spread=st.floats(0, 200)
)
def test_softmax_in_blocks_is_softmax(sizes: list[int], seed: int, spread: float) -> None:
    """Any blocks, any masks that leave each row one key, scores far beyond what exp can hold."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    scores = torch.randn(2, 3, total, generator=generator, dtype=torch.float64) * spread
    values = torch.randn(2, total, 16, generator=generator, dtype=torch.float64)
    visible = torch.rand(3, total, generator=generator) < 0.5
    visible[:, int(torch.randint(total, (1,), generator=generator))] = True
    state = OnlineSoftmax(2, 3, 16, torch.device("cpu"), torch.float64)
    blocks = zip(scores.split(sizes, -1), values.split(sizes, 1), visible.split(sizes, -1), strict=True)
    for block_scores, block_values, block_visible in blocks:
        state.add(block_scores, block_values, None if bool(block_visible.all()) else block_visible)
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(state.result(), expected, rtol=1e-11, atol=1e-11)
