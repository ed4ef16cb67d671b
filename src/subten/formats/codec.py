"""The oracle: tokens into page records and back, in plain torch. Every kernel is tested against this file.

Keys and values go in as the attention sees them (keys after q/k norm and RoPE). What comes out of
`decode_keys` and `decode_values` is in the *coded space* of the format, i.e. still Hadamard-transformed, since
attention rotates the query (and un-rotates its result) once instead of every cached token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subten.formats.hadamard import hadamard
from subten.formats.layout import PageLayout
from subten.formats.packing import in_token_order, pack, slot_of_token, unpack
from subten.formats.quantizers import Quantized, dequantize, quantize, to_f16
from subten.formats.spec import PAGE_SIZE, TensorFormat


class DecodedKeys(NamedTuple):
    """Keys of whole pages: `coded` float32 [..., tokens, head_dim] in coded space, and the kept channels.

    `kept` is float32 [..., tokens, num_kept], unrotated; `coded` carries only quantisation noise there, so a
    query must be zeroed at these channels before it is rotated and dotted with `coded`.
    """

    coded: Tensor
    kept: Tensor


def write_tokens(
    records: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    kept_channels: Tensor,
    layout: PageLayout,
    pages: Tensor,
) -> None:
    """Code tokens and store them in their pages, in place.

    Args:
        records: uint8 [num_pages, num_kv_heads, record_bytes], the pages of one layer.
        keys: [tokens, num_kv_heads, head_dim].
        values: the same shape.
        first: index of the first token among the sequence's coded tokens (position minus sinks). Formats that
            code by the page need it, and the number of tokens, to be multiples of 64.
        kept_channels: int64 [num_kv_heads, num_kept]; columns c and c + head_dim / 2 of each kept pair.
        layout: the page layout.
        pages: int64 [n], the sequence's block table.
    """
    index = torch.arange(first, first + keys.shape[0], device=keys.device)
    page, token = pages[index // PAGE_SIZE], index % PAGE_SIZE
    fmt = layout.format
    keys, values = keys.float(), values.float()
    if fmt.key.kept_pairs:
        gather = kept_channels[None].expand(keys.shape[0], -1, -1)
        layout.view(records, "kept_pair")[page, :, token] = to_f16(keys.gather(-1, gather))
        keys = keys.scatter(-1, gather, 0.0)
    for name, x, tensor_format in (("key", keys, fmt.key), ("value", values, fmt.value)):
        _write(records, name, x, tensor_format, layout, page, token)


def decode_keys(records: Tensor, layout: PageLayout) -> DecodedKeys:
    """Keys of whole pages.

    Args:
        records: uint8 [num_kv_heads, pages, record_bytes].
        layout: the page layout.

    Returns:
        `DecodedKeys` with tokens = pages * 64, in token order.
    """
    coded = _read(records, "key", layout.format.key, layout)
    if layout.format.key.kept_pairs:
        kept = layout.view(records, "kept_pair").float().flatten(-3, -2)
    else:
        kept = coded.new_zeros(*coded.shape[:-1], 0)
    return DecodedKeys(coded, kept)


def decode_values(records: Tensor, layout: PageLayout) -> Tensor:
    """Values of whole pages, float32 [num_kv_heads, pages * 64, head_dim] in coded space."""
    return _read(records, "value", layout.format.value, layout)


def to_coded_space(x: Tensor, fmt: TensorFormat) -> Tensor:
    """Apply a format's transform to the last axis. It is its own inverse."""
    return hadamard(x) if fmt.transform == "hadamard" else x


def reconstruct_keys(decoded: DecodedKeys, kept_channels: Tensor, layout: PageLayout) -> Tensor:
    """Decoded keys back in the space they came from, kept channels included (for tests and evaluation)."""
    keys = to_coded_space(decoded.coded, layout.format.key)
    if layout.format.key.kept_pairs:
        keys = keys.scatter(-1, kept_channels[:, None].expand(-1, keys.shape[-2], -1), decoded.kept)
    return keys


def reconstruct_values(decoded: Tensor, layout: PageLayout) -> Tensor:
    """Decoded values back in the space they came from (for tests and evaluation)."""
    return to_coded_space(decoded, layout.format.value)


def _write(
    records: Tensor,
    name: str,
    x: Tensor,
    fmt: TensorFormat,
    layout: PageLayout,
    page: Tensor,
    token: Tensor,
) -> None:
    codes_view = layout.view(records, f"{name}_codes")
    if not fmt.coded:
        codes_view[page, :, token] = x.to(codes_view.dtype)
        return
    if fmt.kept_fraction:
        x = _take_out_largest(layout.view(records, f"{name}_kept"), x, fmt.kept_fraction, page)
    x = to_coded_space(x, fmt)
    scale_view = layout.view(records, f"{name}_scale")
    if fmt.axis == "channel":
        by_channel = x.unflatten(0, (-1, PAGE_SIZE)).permute(0, 2, 3, 1)
        quantized = quantize(by_channel, fmt)
        scale_view[page[::PAGE_SIZE]] = _scale_parts(quantized)
        codes = quantized.codes.permute(0, 3, 1, 2).flatten(0, 1)
    else:
        groups = [quantize(part, fmt) for part in x.split(fmt.group or x.shape[-1], dim=-1)]
        scale_view[page, :, token] = torch.stack([_scale_parts(g) for g in groups], dim=-2)
        codes = torch.cat([g.codes for g in groups], dim=-1)
    words = pack(codes, fmt.bits)
    if name == "key":
        codes_view[page, :, slot_of_token(token)] = words
    else:
        codes_view[page, :, :, slot_of_token(token)] = words


def _read(records: Tensor, name: str, fmt: TensorFormat, layout: PageLayout) -> Tensor:
    stored = layout.view(records, f"{name}_codes")
    if not fmt.coded:
        return stored.float().flatten(-3, -2)
    words = in_token_order(stored, -2) if name == "key" else in_token_order(stored.transpose(-1, -2), -2)
    codes = unpack(words, fmt.bits)
    parts = layout.view(records, f"{name}_scale")
    if fmt.axis == "channel":
        scale, offset = parts[..., None, :, 0], parts[..., None, :, 1] if fmt.offset else None
        values = dequantize(codes, scale, offset, fmt)
    else:
        values = torch.cat(
            [
                dequantize(c, parts[..., g, :1], parts[..., g, 1:] if fmt.offset else None, fmt)
                for g, c in enumerate(codes.split(fmt.group or codes.shape[-1], dim=-1))
            ],
            dim=-1,
        )
    if fmt.kept_fraction:
        kept = layout.view(records, f"{name}_kept").float()
        values = torch.where(kept != 0, kept, values)
    return values.flatten(-3, -2)


def _scale_parts(quantized: Quantized) -> Tensor:
    parts = (quantized.scale,) if quantized.offset is None else (quantized.scale, quantized.offset)
    return torch.stack(parts, dim=-1)


def _take_out_largest(kept_view: Tensor, x: Tensor, fraction: float, page: Tensor) -> Tensor:
    """Move the largest magnitudes of each page and head into the dense 16-bit plane, zero elsewhere."""
    by_page = x.unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2)
    flat = by_page.flatten(-2)
    count = max(1, round(flat.shape[-1] * fraction))
    largest = flat.abs().topk(count, dim=-1).indices
    mask = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, largest, True)
    kept = torch.where(mask, flat, torch.zeros_like(flat)).unflatten(-1, by_page.shape[-2:])
    kept_view[page[::PAGE_SIZE]] = to_f16(kept)
    return x.masked_fill(mask.unflatten(-1, by_page.shape[-2:]).transpose(1, 2).flatten(0, 1), 0.0)
