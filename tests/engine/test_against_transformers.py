"""Prefill and decode through the cache give the logits of transformers, for every family."""

from __future__ import annotations

import pytest
import torch
from tests.engine.serving import FAMILIES, Driver, reference_and_model
from tests.models.tiny_models import random_tokens

LENGTHS = (1, 70, 9, 131)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_prefill_and_decode_equal_transformers(family: str) -> None:
    reference, model = reference_and_model(family)
    driver = Driver(model, "fp32")
    texts = {driver.books.open().sequence: random_tokens(length + 3, seed=length).tolist() for length in LENGTHS}
    got = driver.step({s: tokens[:-3] for s, tokens in texts.items()})
    for end in (-2, -1, None):
        for sequence, logits in driver.step({s: t[:end][-1:] for s, t in texts.items()}).items():
            got[sequence] = torch.cat([got[sequence], logits])
    for sequence, tokens in texts.items():
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        assert expected.std() > 0.05, "logits without signal prove nothing"
        torch.testing.assert_close(got[sequence], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_uncoded_cache_changes_nothing(family: str) -> None:
    """Bit for bit what the decoder gives without any cache, K and V being in the cache's element type."""
    _, model = reference_and_model(family)
    tokens = random_tokens(150).tolist()
    for kv, element in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        driver = Driver(model, kv)
        sequence = driver.books.open().sequence
        with_cache = driver.step({sequence: tokens})[sequence]
        assert torch.equal(with_cache, _without_cache(model, tokens, element))


def _without_cache(model, tokens: list[int], element: torch.dtype) -> torch.Tensor:
    from dataclasses import replace

    from tests.models.tiny_models import ragged_inputs

    from subten.models import Decoder

    dense = model.kernels.dense_attention

    def rounded(q, k, v, query_start, scale):
        return dense(q, k.to(element), v.to(element), query_start, scale)

    decoder = Decoder(model.spec, model.decoder.weights, replace(model.kernels, dense_attention=rounded))
    return decoder.logits(decoder.forward(ragged_inputs([torch.tensor(tokens)]), None))
