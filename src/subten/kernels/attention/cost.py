"""Operations and compulsory memory traffic of decode attention over a paged cache."""

from __future__ import annotations

from subten.formats.layout import PageLayout
from subten.formats.spec import PAGE_SIZE

_FLOAT16, _FLOAT32, _INT32 = 2, 4, 4


def attention_flops(batch: int, num_heads: int, head_dim: int, context: int) -> int:
    """The two matrix products: a multiply-add per query head, channel and token for the scores, and for the sum."""
    return 4 * batch * num_heads * head_dim * context


def attention_bytes(
    layout: PageLayout,
    batch: int,
    num_kv_heads: int,
    group: int,
    context: int,
    *,
    mean_key: bool = False,
    itemsize: int = 2,
) -> int:
    """One decode step of one layer: every cached token read once as it is held, queries in, results out.

    Padding between planes is not counted, nor are the cosines of a mean key, which a kernel may compute. With the
    layout of `bf16` it is the traffic of attention over a plain 16-bit cache, but for its block table.

    Args:
        layout: of the pages.
        batch: sequences.
        num_kv_heads: KV heads.
        group: query heads of one KV head.
        context: tokens that each query reads, its own included.
        mean_key: whether scores get the mean key's term.
        itemsize: bytes of an element of a query and of a result.
    """
    fmt, head_dim = layout.format, layout.head_dim
    coded = fmt.coded_tokens(context)
    record = sum(plane.nbytes for plane in layout.planes.values())
    token_wide = 2 * head_dim * layout.wide_dtype.itemsize
    tokens = coded * record // PAGE_SIZE + (context - coded) * token_wide
    in_coded_space = _FLOAT16 * head_dim if fmt.key.transform != "none" else 0
    query = 2 * head_dim * itemsize + in_coded_space + _FLOAT32 * 2 * fmt.key.kept_pairs
    mean = num_kv_heads * head_dim * _FLOAT32 if mean_key else 0
    block_table = layout.pages_for(context) * _INT32
    return batch * (num_kv_heads * (tokens + group * query) + block_table) + mean
