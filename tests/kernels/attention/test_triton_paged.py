"""Attention over all layers of a cache: which sequences take which way, and what is left to the end of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from subten.formats import CacheGeometry, PageLayout, get_format
from subten.kernels.attention import AttentionInputs, Heads, LayerCache, PagedAttention, QKNorm
from subten.kernels.attention.decode_kernel import DecodeKernel
from subten.kernels.attention.device_cache import CODED_AHEAD
from subten.kernels.attention.paged import TorchPagedAttention
from subten.kernels.attention.triton_append import DecodeQuery
from subten.kernels.attention.triton_encode import Tile
from subten.kernels.attention.triton_paged import TritonPagedAttention
from subten.kernels.rope import RopeSpec, rope_table
from subten.kvcache import CacheStorage
from support.attention import calibrated
from support.device_code import quicken_interpreter
from support.kv import CPU, POISON, gaussian

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the interpreter divides 0 by 0
LAYERS, HEADS, GROUP, HEAD_DIM = 2, 1, 2, 64
ROPE = rope_table(RopeSpec(HEAD_DIM, theta=10_000.0), 256, CPU)
NORM = QKNorm(*(1 + 0.2 * gaussian(2, HEAD_DIM)), 1e-6)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time per program, not per token."""
    quicken_interpreter(monkeypatch)
    monkeypatch.setattr(Tile, "of", lambda count, padded: Tile(64, 1))


@dataclass
class Memory:
    """A cache of several sequences, each with room for 120 tokens."""

    storage: CacheStorage
    caches: list[LayerCache]
    tables: Tensor
    held: list[int]

    @classmethod
    def of(cls, name: str, sequences: int, recent: int | None = 5) -> Memory:
        layout = PageLayout(get_format(name, 2, recent), HEAD_DIM, CODED_AHEAD)
        pages = layout.pages_for(120)
        storage = CacheStorage(layout, CacheGeometry(LAYERS, HEADS, HEAD_DIM), sequences * pages, sequences, CPU)
        storage.pages.fill_(POISON)
        storage.windows.view(torch.uint8).fill_(POISON)
        caches = []
        for index in range(LAYERS):
            calibration = calibrated(layout, HEADS, index)
            caches.append(LayerCache(*storage.layer(index), calibration.coding, None, layout))
        return cls(storage, caches, torch.arange(sequences * pages).int().view(sequences, pages), [0] * sequences)

    def step(self, attention: PagedAttention, sizes: dict[int, int], *, finish: bool = True) -> dict[int, Tensor]:
        """Random tokens for these sequences through all layers: of each [tokens, layers, heads, head_dim]."""
        inputs, positions, tokens = self.inputs(sizes)
        outputs = []
        for layer in range(LAYERS):
            q, k, v = tokens[:, layer].split([HEADS * GROUP, HEADS, HEADS], dim=1)
            outputs.append(attention.attend(layer, Heads(q, k, v, positions, NORM, ROPE), inputs, scale=0.3))
        if finish:
            attention.finish(inputs)
        for row, size in sizes.items():
            self.held[row] += size
        return dict(zip(sizes, torch.stack(outputs, 1).split(list(sizes.values())), strict=True))

    def inputs(self, sizes: dict[int, int]) -> tuple[AttentionInputs, Tensor, Tensor]:
        """A step, positions and qkv of its tokens, which depend on sequence and position alone."""
        rows = list(sizes)
        spans = [range(self.held[row], self.held[row] + size) for row, size in sizes.items()]
        inputs = AttentionInputs(
            torch.tensor([0, *sizes.values()]).cumsum(0).int(),
            torch.tensor([self.held[row] for row in rows], dtype=torch.int32),
            self.tables[rows],
            torch.tensor(rows, dtype=torch.int32),
        )
        every = [gaussian(120, LAYERS, HEADS * (GROUP + 2), HEAD_DIM, seed=row) for row in rows]
        qkv = torch.cat([x[list(span)] for x, span in zip(every, spans, strict=True)])
        return inputs, torch.tensor([p for span in spans for p in span]), qkv

    def bytes(self) -> tuple[Tensor, Tensor]:
        return self.storage.pages.clone(), self.storage.windows.view(torch.uint8).clone()


STEPS = ({0: 70, 1: 7, 2: 1}, {0: 1, 1: 30}, {0: 1, 2: 1}, {1: 1, 2: 9})


@pytest.mark.parametrize(("name", "recent"), [("kv2-plain", 5), ("kv2-plain", 0), ("kv2", 1), ("bf16", None)])
def test_steps_of_any_kind_are_those_of_the_reference(name: str, recent: int | None) -> None:
    """Up to the last bit of a norm, which may turn a 16-bit key or a code into its neighbour."""
    reference, device = Memory.of(name, 3, recent), Memory.of(name, 3, recent)
    by_torch, by_kernels = TorchPagedAttention(reference.caches), TritonPagedAttention(device.caches)
    for sizes in STEPS:
        expected, found = reference.step(by_torch, sizes), device.step(by_kernels, sizes)
        for row in sizes:
            torch.testing.assert_close(found[row], expected[row], atol=0.02, rtol=0.02)


def test_a_sequence_gets_the_same_whatever_its_companions() -> None:
    """Bit for bit, and the cache is left with the same bytes."""
    together, alone = Memory.of("fp8", 3), Memory.of("fp8", 3)
    of_batch, of_one = TritonPagedAttention(together.caches), TritonPagedAttention(alone.caches)
    for sizes in STEPS:
        found = together.step(of_batch, sizes)
        for row, size in sizes.items():
            assert torch.equal(alone.step(of_one, {row: size})[row], found[row])
    assert all(torch.equal(a, b) for a, b in zip(together.bytes(), alone.bytes(), strict=True))


def only_the_query(query: DecodeQuery, *_: object) -> Tensor:
    return query.q


ONLY_THE_QUERY = DecodeKernel(only_the_query, lambda query, layer, max_pages: (None, None))


def no_prefill(*args: object) -> Tensor:
    raise AssertionError("a step of single tokens is no prefill")


def test_nothing_of_a_decode_step_is_read_on_the_host() -> None:
    """Nor is anything that depends on it computed there: a CUDA graph can capture the step."""
    memory = Memory.of("kv2-plain", 2)
    memory.held = [40, 3]
    attention = TritonPagedAttention(memory.caches, ONLY_THE_QUERY, no_prefill)
    inputs, positions, tokens = memory.inputs({0: 1, 1: 1})
    for layer in range(LAYERS):
        q, k, v = tokens[:, layer].split([HEADS * GROUP, HEADS, HEADS], dim=1)
        attention.attend(layer, Heads(q, k, v, positions, NORM, ROPE), inputs, scale=0.3)
    attention.finish(inputs)
    assert not {"sequences", "parts"} & inputs.__dict__.keys()


def test_what_leaves_next_is_coded_when_the_step_ends() -> None:
    """In all layers, for sequences that decoded; chunks have coded theirs before."""
    memory = Memory.of("kv2-plain", 2)
    attention = TritonPagedAttention(memory.caches, ONLY_THE_QUERY, lambda q, *rest: q)
    memory.step(attention, {0: 30, 1: 30})
    before = memory.bytes()[0]
    memory.step(attention, {0: 1, 1: 9}, finish=False)
    own, other = memory.tables[:, 0].tolist()
    assert torch.equal(memory.storage.pages[own], before[own])
    assert not torch.equal(memory.storage.pages[other], before[other])
    between = memory.bytes()[0]
    inputs, _, _ = memory.inputs({0: 1, 1: 9})
    attention.finish(inputs)
    by_layer = (memory.storage.pages[own] != between[own]).view(LAYERS, -1)
    assert bool(by_layer.any(1).all())
    assert torch.equal(memory.storage.pages[other], between[other])


def test_layers_of_one_cache_are_coded_together_and_others_apart() -> None:
    one, two = Memory.of("kv2-plain", 1), Memory.of("kv2-plain", 1)
    layout = replace(one.caches[0].layout, format=get_format("bf16"))
    empty = torch.zeros(1, HEADS, layout.record_bytes, dtype=torch.uint8), torch.zeros(1, 2, HEADS, 0, HEAD_DIM)
    wide = LayerCache(*empty, replace(one.caches[0].coding, key=None, value=None), None, layout)
    mixed = [one.caches[0], two.caches[0], wide, one.caches[1], two.caches[1]]
    attention = TritonPagedAttention(mixed, ONLY_THE_QUERY, no_prefill)
    assert [len(layers.pages) for layers in attention._groups] == [2, 2, 1]
    for cache, layer in zip(mixed, attention._layers, strict=True):
        assert layer.pages.data_ptr() == cache.pages.data_ptr()
        assert layer.layout == cache.layout
