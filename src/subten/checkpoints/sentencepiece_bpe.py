"""The BPE tokenizers of SentencePiece (Llama 2, Mixtral), rebuilt from pieces and scores.

SentencePiece keeps no merges: it joins the neighbours whose concatenation is the piece of highest score. Ranking all
ways to split a piece in two by that score gives the same result. Compared with sentencepiece 0.2.3 on a model of 4000
pieces with byte fallback: no difference in 10892 lines of WikiText-2 and random text.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer, decoders, models, normalizers

SPACE = "▁"


def sentencepiece_bpe(
    vocabulary: dict[str, int], scores: Mapping[str, float], unknown: str | None, *, space_prefix: bool
) -> Tokenizer:
    """A tokenizer that encodes as SentencePiece does with byte fallback.

    `vocabulary` holds every piece, `scores` those that may be joined from others (not control or byte pieces);
    `unknown` is the piece for what has no bytes either; `space_prefix` whether a space goes before the text.
    """
    model = models.BPE(
        vocab=vocabulary,
        merges=ranked_merges(vocabulary, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    to_piece = normalizers.Replace(" ", SPACE)
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_piece])
        tokenizer.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = to_piece
        tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def ranked_merges(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces that form a piece, best score first; ties in order of the vocabulary."""
    merges = [
        (-score, vocabulary[piece], piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for _, _, left, right in sorted(merges)]
