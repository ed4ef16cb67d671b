"""A quality canary: before a model serves with a coded cache, compare it with 16 bit on a text it was not fitted to.

A format that is good on most models can be bad on one: keys with a bias, a calibration text unlike what is served.
The canary is the end of the text that ships (calibration uses its beginning), about as long as the windows that stay
in 16 bit and 512 tokens more; the divergence is that of the tokens behind the windows.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from subten.engine.calibrate import shipped_text
from subten.engine.loading import LoadedModel
from subten.engine.mixed_cache import MixedCacheScorer
from subten.errors import QualityError
from subten.formats import KVFormat

log = logging.getLogger(__name__)

JUDGED_TOKENS = 512
NAMED_LAYERS = 3


@dataclass(frozen=True)
class CanaryResult:
    """KL(16 bit || format) in nats per token over `tokens` tokens, and the layers that lose most by themselves, each
    with its divergence; empty where the limit was kept."""

    kld: float
    tokens: int
    layers: tuple[tuple[int, float], ...]


def check_quality(model: LoadedModel, kv: KVFormat, max_context: int, limit: float) -> CanaryResult | None:
    """Compare a format with 16 bit.

    Args:
        model: the model.
        kv: the format.
        max_context: tokens that a sequence may have.
        limit: largest divergence that passes, in nats per token.

    Returns:
        What was found, or None where no token would be coded (the format codes nothing, or the context is no longer
        than the windows): nothing to compare.

    Raises:
        QualityError: the divergence is above the limit; the sentence names the layers.
    """
    windows = kv.coded_tokens(max_context)
    if kv.lossless or windows < 1:
        return None
    length = min(max_context, kv.sinks + kv.ring_size + JUDGED_TOKENS)
    token_ids = model.tokenizer.encode(shipped_text())[-length:]
    judged = [position for position in range(len(token_ids)) if kv.coded_tokens(position + 1) > 0]
    if not judged:
        return None
    expected = _log_probabilities(model, kv, (), token_ids)[judged[0] :]

    def divergence(layers: Collection[int]) -> float:
        found = _log_probabilities(model, kv, layers, token_ids)[judged[0] :]
        return F.kl_div(found, expected, log_target=True, reduction="batchmean").item()

    every = range(model.geometry.num_layers)
    kld = divergence(every)
    log.info("%s on %s: KLD %.4f over %d tokens, limit %g", kv.name, model.name, kld, len(judged), limit)
    if kld <= limit:
        return CanaryResult(kld, len(judged), ())
    alone = sorted(((divergence([index]), index) for index in every), reverse=True)[:NAMED_LAYERS]
    named = ", ".join(f"{index} ({loss:.3f})" for loss, index in alone)
    raise QualityError(
        f"{kv.name} diverges from 16 bit by {kld:.3f} nats per token on {model.name}, more than the {limit:g} that "
        f"were allowed; most of it comes from layers {named}; calibrate on a text like yours, or use k4v2 or kv4"
    )


def _log_probabilities(
    model: LoadedModel, kv: KVFormat, layers: Collection[int], token_ids: list[int]
) -> torch.Tensor:
    scorer = MixedCacheScorer(model, kv, layers, len(token_ids))
    return torch.cat(list(scorer.score(token_ids))).log_softmax(-1)
