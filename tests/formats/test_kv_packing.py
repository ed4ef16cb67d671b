from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subten.formats import PAGE_SIZE, PageLayout, get_format
from subten.formats.hadamard import hadamard
from subten.formats.packing import in_token_order, pack, slot_of_token, unpack, words_per_token
from subten.formats.quantizers import quantize
from support.kv import HEAD_DIMS, encode, gaussian, plain_coding


@given(
    data=st.data(),
    bits=st.sampled_from([2, 4, 8]),
    head_dim=st.integers(1, 16).map(lambda n: n * 16),
    leading=st.lists(st.integers(1, 3), max_size=2),
)
def test_unpack_inverts_pack(data: st.DataObject, bits: int, head_dim: int, leading: list[int]) -> None:
    seed = data.draw(st.integers(0, 2**32))
    codes = torch.randint(
        0, 2**bits, (*leading, head_dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    words = pack(codes, bits)
    assert words.dtype == torch.int16
    assert words.shape == (*leading, words_per_token(head_dim, bits))
    assert torch.equal(unpack(words, bits), codes)


@given(bits=st.sampled_from([2, 4, 8]), words=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=2, max_size=40))
def test_every_word_is_some_codes(bits: int, words: list[int]) -> None:
    stored = torch.tensor(words, dtype=torch.int16)
    assert torch.equal(pack(unpack(stored, bits), bits), stored)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_each_bit_of_a_word_belongs_to_one_channel(bits: int, head_dim: int) -> None:
    """Bit b of word w is bit b % bits of channel (b // bits) * W + w, one bit at a time."""
    words = head_dim * bits // 16
    for channel in range(head_dim):
        for bit in range(bits):
            codes = torch.zeros(head_dim, dtype=torch.uint8)
            codes[channel] = 1 << bit
            plane, word = divmod(channel, words)
            expected = [0] * words
            expected[word] = 1 << (plane * bits + bit)
            assert [value & 0xFFFF for value in pack(codes, bits).tolist()] == expected


def test_slots_are_a_permutation_that_puts_every_eighth_token_side_by_side() -> None:
    slots = slot_of_token(torch.arange(PAGE_SIZE)).tolist()
    assert sorted(slots) == list(range(PAGE_SIZE))
    token_in = {slot: token for token, slot in enumerate(slots)}
    assert [token_in[slot] for slot in range(8)] == [0, 8, 16, 24, 32, 40, 48, 56]
    assert [token_in[slot] for slot in range(8, 16)] == [1, 9, 17, 25, 33, 41, 49, 57]
    assert token_in[63] == 63


def test_in_token_order_undoes_the_slots() -> None:
    tokens = torch.arange(PAGE_SIZE)
    slots = torch.empty_like(tokens)
    slots[slot_of_token(tokens)] = tokens
    assert torch.equal(in_token_order(slots, -1), tokens)
    planes = slots[:, None] * 100 + torch.arange(3)
    assert torch.equal(in_token_order(planes, -2), tokens[:, None] * 100 + torch.arange(3))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ["kv2", "kv4", "int4", "fp8"])
def test_codes_of_a_page_lie_where_the_layout_says(name: str, head_dim: int) -> None:
    """Codes are read from the raw bytes of a record, one code at a time, by the documented address."""
    fmt = get_format(name)
    layout = PageLayout(fmt, head_dim)
    keys, values = gaussian(PAGE_SIZE, 1, head_dim, seed=1), gaussian(PAGE_SIZE, 1, head_dim, seed=2)
    coding = plain_coding(layout, 1)
    record = bytes(encode(layout, keys, values, coding)[0, 0].numpy())
    for side, x, tensor in (("key", keys, fmt.key), ("value", values, fmt.value)):
        if tensor.kept_pairs:
            x = x.index_fill(-1, coding.kept_channels[0], 0.0)
        rotated = hadamard(x) if tensor.transform != "none" else x
        expected = torch.cat(
            [quantize(part, tensor).codes for part in rotated.split(tensor.group or head_dim, dim=-1)], dim=-1
        )
        start, bits = layout.planes[f"{side}_codes"].offset, tensor.bits
        words = head_dim * bits // 16
        for token in range(PAGE_SIZE):
            slot = (token % 8) * 8 + token // 8
            for channel in range(head_dim):
                plane, word = divmod(channel, words)
                index = slot * words + word if side == "key" else word * PAGE_SIZE + slot
                stored = int.from_bytes(record[start + 2 * index : start + 2 * index + 2], "little")
                code = stored >> (plane * bits) & ((1 << bits) - 1)
                assert code == expected[token, 0, channel].item()
