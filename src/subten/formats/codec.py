"""The oracle: tokens into page records and back, in plain torch. Every kernel is tested against this file.

Keys and values go in as the attention sees them (keys after q/k norm and RoPE). What comes out of
`decode_keys` and `decode_values` is in the *coded space* of the format, i.e. still Hadamard-transformed, since
attention rotates the query (and un-rotates its result) once instead of every cached token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subten.formats.affine import to_f16
from subten.formats.coding import LayerCoding, TensorCoding
from subten.formats.layout import PageLayout
from subten.formats.packing import in_token_order, pack, slot_of_token, unpack
from subten.formats.quantizers import GAUSSIAN_STEP, dequantize, quantize, saturated
from subten.formats.shaping import shape, whole_tiles
from subten.formats.spec import PAGE_SIZE, KVFormat, TensorFormat


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
    coding: LayerCoding,
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
        coding: of the layer.
        layout: the page layout.
        pages: int64 [n], the sequence's block table.
    """
    index = torch.arange(first, first + keys.shape[0], device=keys.device)
    page, token = pages[index // PAGE_SIZE], index % PAGE_SIZE
    fmt = layout.format
    keys, values = keys.float(), values.float()
    if fmt.key.kept_pairs:
        gather = coding.kept_channels[None].expand(keys.shape[0], -1, -1)
        layout.view(records, "kept_pair")[page, :, token] = to_f16(keys.gather(-1, gather))
        keys = keys.scatter(-1, gather, 0.0)
    shaped = _shape_together(keys, values, coding, fmt)
    if shaped is not None:
        for name, (codes, grid) in zip(("key", "value"), shaped, strict=True):
            layout.view(records, f"{name}_scale")[page, :, token] = grid
            _store_codes(records, name, codes, layout, page, token)
        return
    _write(records, "key", keys, fmt.key, coding.key, layout, page, token)
    _write(records, "value", values, fmt.value, coding.value, layout, page, token)


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


def reconstruct_keys(decoded: DecodedKeys, coding: LayerCoding, layout: PageLayout) -> Tensor:
    """Decoded keys back in the space they came from, kept channels included (for tests and evaluation)."""
    keys = decoded.coded if coding.key is None else decoded.coded @ coding.key.from_coded
    if layout.format.key.kept_pairs:
        keys = keys.scatter(-1, coding.kept_channels[:, None].expand(-1, keys.shape[-2], -1), decoded.kept)
    return keys


def reconstruct_values(decoded: Tensor, coding: LayerCoding) -> Tensor:
    """Decoded values back in the space they came from (for tests and evaluation)."""
    return decoded if coding.value is None else decoded @ coding.value.from_coded


def through_records(keys: Tensor, values: Tensor, coding: LayerCoding, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """What keys and values [tokens, num_kv_heads, head_dim] become by being coded: written to pages and read back.

    Formats that code by the page need whole pages. The mean key is the caller's to take out and put back.
    """
    tokens, num_kv_heads, _ = keys.shape
    count = -(-tokens // PAGE_SIZE)
    records = torch.zeros(count, num_kv_heads, layout.record_bytes, dtype=torch.uint8, device=keys.device)
    write_tokens(records, keys, values, 0, coding, layout, torch.arange(count, device=keys.device))
    by_head = records.transpose(0, 1)
    read_keys = reconstruct_keys(decode_keys(by_head, layout), coding, layout)
    read_values = reconstruct_values(decode_values(by_head, layout), coding)
    return read_keys[:, :tokens].transpose(0, 1), read_values[:, :tokens].transpose(0, 1)


def _shape_together(
    keys: Tensor, values: Tensor, coding: LayerCoding, fmt: KVFormat
) -> list[tuple[Tensor, Tensor]] | None:
    """Codes and grids of keys and values, where both are shaped on the same kind of grid: one pass over both, since
    on a CPU a pass costs by its steps and not by its heads."""
    if coding.shaper is None or (fmt.key.bits, fmt.key.affine) != (fmt.value.bits, fmt.value.affine):
        return None
    assert coding.key is not None
    assert coding.value is not None
    x = torch.cat([_to_coded(keys, coding.key), _to_coded(values, coding.value)], dim=1)
    codes, grid = shape(saturated(x), fmt.key, coding.shaper, GAUSSIAN_STEP[fmt.key.bits])
    return list(zip(codes.chunk(2, dim=1), grid[:, :, None].chunk(2, dim=1), strict=True))


def _to_coded(x: Tensor, coding: TensorCoding) -> Tensor:
    padded = whole_tiles(x)
    return (padded.transpose(0, 1) @ coding.to_coded).transpose(0, 1)[: x.shape[0]]


def _write(
    records: Tensor,
    name: str,
    x: Tensor,
    fmt: TensorFormat,
    coding: TensorCoding | None,
    layout: PageLayout,
    page: Tensor,
    token: Tensor,
) -> None:
    if not fmt.coded:
        view = layout.view(records, f"{name}_codes")
        view[page, :, token] = x.to(view.dtype)
        return
    if fmt.kept_fraction:
        x = _take_out_largest(layout.view(records, f"{name}_kept"), x, fmt.kept_fraction, page)
    if coding is not None:
        x = _to_coded(x, coding)
    scale_view = layout.view(records, f"{name}_scale")
    if fmt.axis == "channel":
        by_channel = x.unflatten(0, (-1, PAGE_SIZE)).permute(0, 2, 3, 1)
        quantized = quantize(by_channel, fmt)
        scale_view[page[::PAGE_SIZE]] = quantized.grid
        codes = quantized.codes.permute(0, 3, 1, 2).flatten(0, 1)
    elif coding is not None and coding.shaper is not None:
        codes, grid = shape(saturated(x), fmt, coding.shaper, GAUSSIAN_STEP[fmt.bits])
        scale_view[page, :, token] = grid[:, :, None]
    else:
        groups = [quantize(part, fmt) for part in x.split(fmt.group or x.shape[-1], dim=-1)]
        scale_view[page, :, token] = torch.stack([g.grid for g in groups], dim=-2)
        codes = torch.cat([g.codes for g in groups], dim=-1)
    _store_codes(records, name, codes, layout, page, token)


def _store_codes(records: Tensor, name: str, codes: Tensor, layout: PageLayout, page: Tensor, token: Tensor) -> None:
    fmt = layout.format.key if name == "key" else layout.format.value
    words, view = pack(codes, fmt.bits), layout.view(records, f"{name}_codes")
    if name == "key":
        view[page, :, slot_of_token(token)] = words
    else:
        view[page, :, :, slot_of_token(token)] = words


def _read(records: Tensor, name: str, fmt: TensorFormat, layout: PageLayout) -> Tensor:
    stored = layout.view(records, f"{name}_codes")
    if not fmt.coded:
        return stored.float().flatten(-3, -2)
    words = in_token_order(stored, -2) if name == "key" else in_token_order(stored.transpose(-1, -2), -2)
    codes = unpack(words, fmt.bits)
    grid = layout.view(records, f"{name}_scale")
    if fmt.axis == "channel":
        values = dequantize(codes, grid[..., None, :, :], fmt)
    else:
        groups = codes.split(fmt.group or codes.shape[-1], dim=-1)
        values = torch.cat([dequantize(c, grid[..., g : g + 1, :], fmt) for g, c in enumerate(groups)], dim=-1)
    if fmt.kept_fraction:
        kept = layout.view(records, f"{name}_kept").float()
        values = torch.where(kept != 0, kept, values)
    return values.flatten(-3, -2)


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
