"""Log-probabilities of sampled tokens: the model's own, before bias, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one token of an answer.

    Attributes:
        logprob: natural logarithm of the probability that the model gave the token.
        top: (token id, logprob) of the most probable tokens at this place, as many as were asked for, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """What the model thought of one token per row.

    Args:
        logits: float [rows, vocab].
        token_ids: the token of each row.
        counts: how many of the most probable tokens each row reports; None: the row reports nothing.
    """
    asked = [row for row, count in enumerate(counts) if count is not None]
    reports: list[TokenLogprobs | None] = [None] * len(counts)
    if not asked:
        return reports
    scores = logits[asked].float().log_softmax(-1)
    own = scores.gather(1, torch.tensor([token_ids[row] for row in asked], device=scores.device)[:, None])
    values, indices = scores.topk(min(max(counts[row] or 0 for row in asked), scores.shape[1]), dim=-1)
    ranked = zip(asked, own[:, 0].tolist(), indices.tolist(), values.tolist(), strict=True)
    for row, logprob, ids, best in ranked:
        reports[row] = TokenLogprobs(logprob, tuple(zip(ids, best, strict=True))[: counts[row]])
    return reports
