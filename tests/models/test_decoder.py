from __future__ import annotations

import pytest
import torch
from tests.models.tiny_models import CASES, build, decoder_of, ragged_inputs, random_tokens

from subten.checkpoints import open_checkpoint
from subten.models import FAMILIES

LENGTHS = (1, 40, 7, 128)


@pytest.fixture
def stored(tmp_path):
    """Saves a model as a folder and opens it."""

    def store(model):
        model.save_pretrained(tmp_path)
        return open_checkpoint(tmp_path)

    return store


def logits_of(decoder, sequences):
    """Logits of complete sequences run as one ragged batch, one tensor per sequence."""
    hidden = decoder.forward(ragged_inputs(sequences), attention=None)
    return decoder.logits(hidden).split([len(sequence) for sequence in sequences])


def transformers_logits(model, sequence):
    with torch.no_grad():
        return model(sequence[None]).logits[0]


def test_every_family_is_tested():
    assert {case.split("-")[0] for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, stored):
    model = build(case)
    decoder = decoder_of(stored(model))
    assert decoder.spec.family == model.config.model_type
    sequences = [random_tokens(length, seed=length) for length in LENGTHS]
    for sequence, logits in zip(sequences, logits_of(decoder, sequences), strict=True):
        expected = transformers_logits(model, sequence)
        assert 0.3 < expected.std() < 5
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama", "qwen3", "qwen2_moe", "granitemoe"])
def test_a_sequence_has_the_same_logits_alone_and_in_a_batch(case, stored):
    decoder = decoder_of(stored(build(case)))
    sequences = [random_tokens(length, seed=length) for length in LENGTHS]
    for sequence, logits in zip(sequences, logits_of(decoder, sequences), strict=True):
        (alone,) = logits_of(decoder, [sequence])
        torch.testing.assert_close(logits, alone, atol=2e-5, rtol=0)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_at_most_as_far_off_as_transformers(case, stored):
    """Both run the same bfloat16 weights; what they should give is the float32 result with those weights."""
    model = build(case).bfloat16()
    decoder = decoder_of(stored(model), torch.bfloat16)
    sequence = random_tokens(100)
    (logits,) = logits_of(decoder, [sequence])
    theirs = transformers_logits(model, sequence).float()
    exact = transformers_logits(model.float(), sequence)
    assert (logits - exact).norm() <= 1.1 * (theirs - exact).norm()


def test_a_later_token_changes_nothing_before_it(stored):
    decoder = decoder_of(stored(build("mixtral")))
    sequence = random_tokens(30)
    changed = sequence.clone()
    changed[20] = (changed[20] + 1) % 131
    (before,), (after,) = logits_of(decoder, [sequence]), logits_of(decoder, [changed])
    torch.testing.assert_close(before[:20], after[:20], atol=1e-5, rtol=0)
    assert ((before[20:] - after[20:]).abs().amax(dim=-1) > 1e-3).all()


def test_observe_sees_what_attention_is_given(stored):
    decoder = decoder_of(stored(build("qwen3")))
    seen = []
    inputs = ragged_inputs([random_tokens(5), random_tokens(3)])
    observed = decoder.forward(inputs, None, lambda layer, q, k, v: seen.append((layer, q, k, v)))
    assert torch.equal(observed, decoder.forward(inputs, None))
    assert [layer for layer, *_ in seen] == [0, 1, 2]
    for _, q, k, v in seen:
        assert q.shape == (8, 6, 16)
        assert k.shape == v.shape == (8, 2, 16)
    # RoPE keeps norms, so keys normalised per head have the mean square of their norm's weights or close to it.
    _, _, k, _ = seen[0]
    weight = decoder.weights.layers[0].attention.k_norm
    assert (k.square().mean(-1) <= weight.square().max() + 1e-5).all()
    assert (k.square().mean(-1) >= weight.square().min() - 1e-5).all()
