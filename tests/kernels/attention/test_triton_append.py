from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from subten.errors import KernelUnavailableError
from subten.formats import PAGE_SIZE, PageLayout, get_format
from subten.formats.codec import decode_keys, decode_values, write_tokens
from subten.formats.coding import TensorCoding
from subten.kernels.attention import AttentionInputs, LayerCache, MeanKey, triton_append
from subten.kernels.attention.attend import attend_reference
from subten.kernels.attention.device_cache import PagedLayers, refusal, tokens_in_pages
from subten.kernels.attention.inputs import QKNorm
from subten.kernels.attention.triton_append import DecodeQuery, append_chunk, append_decode
from subten.kernels.attention.triton_encode import Tile, encode_leaving, encode_tokens
from subten.kernels.norm import rms_norm_reference
from subten.kernels.rope import RopeSpec, rope_reference, rope_table
from support.attention import Calibration, History, Paged, calibrated, history, plain
from support.compiled import compiled
from support.device_code import quicken_interpreter
from support.kv import CPU, HEAD_DIMS, POISON, encode, gaussian, keys_with_bias

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the interpreter divides 0 by 0
ROPE = {head_dim: rope_table(RopeSpec(head_dim, theta=10_000.0), 512, CPU) for head_dim in HEAD_DIMS}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time per program, not per token."""
    quicken_interpreter(monkeypatch)
    monkeypatch.setattr(Tile, "of", lambda count, padded: Tile(64, 1))


# --- coding ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """Tokens of one sequence behind its sinks, and how they are coded."""

    keys: Tensor
    values: Tensor
    layout: PageLayout
    calibration: Calibration

    @classmethod
    def of(cls, name: str, head_dim: int, count: int, heads: int, calibrate=calibrated) -> Tokens:
        layout = PageLayout(get_format(name, sinks=3, recent=10), head_dim)
        keys, values = keys_with_bias(count, heads, head_dim), gaussian(count, heads, head_dim, seed=1)
        return cls(keys.bfloat16(), values.bfloat16(), layout, calibrate(layout, heads))

    @property
    def positions(self) -> Tensor:
        return self.layout.format.sinks + torch.arange(len(self.keys))

    def without_mean(self) -> Tensor:
        mean_key = self.calibration.mean_key
        return self.keys.float() - (0 if mean_key is None else mean_key.at(self.positions))

    def empty_pages(self) -> Tensor:
        shape = (self.layout.pages_for(1000), self.keys.shape[1], self.layout.record_bytes)
        return torch.full(shape, POISON, dtype=torch.uint8)

    def by_the_codec(self) -> Tensor:
        pages = self.empty_pages()
        write_tokens(pages, self.without_mean(), self.values, 0, self.calibration.coding, self.layout, self.table[0])
        return pages

    def by_the_kernel(self, tile: Tile | None = None) -> Tensor:
        pages = self.empty_pages()
        windows = torch.empty(1, 2, self.keys.shape[1], self.layout.format.window_size, self.layout.head_dim)
        windows = windows.to(self.layout.wide_dtype)
        cache = LayerCache(pages, windows, self.calibration.coding, self.calibration.mean_key, self.layout)
        tokens, owner = torch.stack([self.keys, self.values]), torch.zeros(len(self.keys), dtype=torch.int32)
        encode_tokens(PagedLayers.of([cache]), tokens, self.positions, self.inputs, owner, tile)
        return pages

    @property
    def table(self) -> Tensor:
        return torch.tensor([[5, 2, 7]])

    @property
    def inputs(self) -> AttentionInputs:
        start, none = torch.tensor([0, len(self.keys)], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        return AttentionInputs(start, none, self.table.int(), none)


def metric_errors(pages: Tensor, tokens: Tokens) -> Tensor:
    """What each token's codes cost in the metric of its rounding: [2 (K, V), heads, tokens]."""
    records = pages[tokens.table[0]].transpose(0, 1)
    coding, layout = tokens.calibration.coding, tokens.layout
    keys = tokens.without_mean()
    keys = keys.scatter(-1, coding.kept_channels.expand(len(keys), -1, -1), 0.0)
    read = decode_keys(records, layout).coded, decode_values(records, layout)
    sides = zip(read, (keys, tokens.values.float()), (coding.key, coding.value), strict=True)
    return torch.stack([_metric_errors(r[:, : len(x)], x.transpose(0, 1), side) for r, x, side in sides])


def _metric_errors(read: Tensor, x: Tensor, coding: TensorCoding | None) -> Tensor:
    assert coding is not None
    error = read.double() - x.double() @ coding.to_coded.double()
    if coding.shaper is None:
        return error.square().sum(-1)
    error = error.take_along_dim(coding.shaper.order[:, None], -1)
    return (error @ coding.shaper.metric.double() * error).sum(-1)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_formats_without_passes_are_coded_bit_for_bit(name: str, head_dim: int) -> None:
    tokens = Tokens.of(name, head_dim, 150, heads=2)
    assert torch.equal(tokens.by_the_kernel(), tokens.by_the_codec())


@pytest.mark.parametrize(
    ("name", "head_dim", "heads", "calibrate"),
    [
        *(("kv2-plain", head_dim, 2, calibrated) for head_dim in HEAD_DIMS),
        ("kv4", 64, 2, plain),
        ("kv2", 64, 3, calibrated),
        ("kv4", 80, 1, calibrated),
        ("k4v2", 96, 1, calibrated),
        ("kv2", 128, 1, calibrated),
        ("kv4", 256, 1, calibrated),
        ("kv2-plain:kv4", 64, 1, calibrated),
    ],
)
def test_tokens_are_coded_as_by_the_codec(name: str, head_dim: int, heads: int, calibrate) -> None:
    """Bit for bit, but for rows in which a decision hangs by the order of a float32 sum: then another decision, and
    another way on from there, costs about the same. Unwritten memory stays as it was."""
    tokens = Tokens.of(name, head_dim, 64, heads, calibrate)
    mine, codec = tokens.by_the_kernel(), tokens.by_the_codec()
    expected, found = metric_errors(codec, tokens), metric_errors(mine, tokens)
    same = expected == found
    assert same.double().mean() >= 0.98
    assert bool((found[~same] <= 1.15 * expected[~same]).all())
    if same.all():
        assert torch.equal(mine, codec)
    assert torch.equal(mine[[0, 1, 3, 4, 6]], codec[[0, 1, 3, 4, 6]])


@pytest.mark.parametrize("name", ["kv2", "kv4", "fp8", "bf16"])
def test_a_token_with_nan_or_infinities_spoils_no_other(name: str) -> None:
    tokens = Tokens.of(name, 64, 12, heads=1)
    sound = tokens.by_the_kernel()
    tokens.keys[4] = tokens.values[4] = torch.nan
    tokens.keys[7, :, 30] = tokens.values[7, :, 30] = torch.inf
    tokens.keys[9, :, 31], tokens.values[9, :, 31] = torch.nan, -torch.inf
    broken, codec = tokens.by_the_kernel(), tokens.by_the_codec()
    others = [token for token in range(12) if token not in (4, 7, 9)]
    for read in (
        lambda pages: decode_keys(pages, tokens.layout).coded,
        lambda pages: decode_values(pages, tokens.layout),
    ):
        before, after, expected = (read(pages[tokens.table[0]].transpose(0, 1)) for pages in (sound, broken, codec))
        assert torch.equal(before[:, others], after[:, others])
        assert torch.equal(after[:, :12].isnan(), expected[:, :12].isnan())
        assert bool(after[:, 4].isnan().all())


def test_what_a_token_becomes_does_not_depend_on_the_tile() -> None:
    tokens = Tokens.of("kv2-plain", 64, 20, heads=1)
    whole = tokens.by_the_kernel(Tile(32, 1))
    assert all(torch.equal(tokens.by_the_kernel(Tile(size, 1)), whole) for size in (2, 16))


def test_all_layers_at_once_are_the_layers_one_by_one() -> None:
    """Of a cache, whose layers are interleaved in memory: the tokens that leave next go to their pages."""
    layout, batch = PageLayout(get_format("kv2", sinks=2, recent=4), 64), 3
    pages = torch.full((5, 2 * layout.record_bytes), POISON, dtype=torch.uint8)
    windows = gaussian(4, 2, 2, 1, layout.format.window_size, 64).bfloat16()
    by_layer = pages.view(5, 2, 1, -1)
    codings = [calibrated(layout, 1, seed).coding for seed in range(2)]
    mean_keys = None, MeanKey(gaussian(1, 64), ROPE[64])
    caches = [LayerCache(by_layer[:, i], windows[:, i], codings[i], mean_keys[i], layout) for i in range(2)]
    number = torch.arange(batch + 1, dtype=torch.int32)
    context = torch.tensor([9, 4, 70], dtype=torch.int32)
    inputs = AttentionInputs(number, context, torch.tensor([[4, 0], [3, 0], [1, 2]]).int(), number[:3])
    layers = PagedLayers.of(caches)
    encode_leaving(layers, inputs)
    together = pages.clone()
    pages.fill_(POISON)
    for index, cache in enumerate(caches):
        encode_leaving(PagedLayers.of([cache]), inputs)
        assert torch.equal(layers.layer(index).pages[0], cache.pages)
    assert torch.equal(pages, together)
    # Position 70 + 1 - 4 is the 65th behind the sinks, so the first of the second page; 4 + 1 - 4 is a sink.
    assert [bool((page != POISON).any()) for page in pages] == [False, False, True, False, True]


# --- chunks and steps --------------------------------------------------------------------------------------------


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


class OnDevice(Paged):
    """The runner of the tests with the device kernels: its pages have room for what is coded ahead."""

    def __init__(self, layout: PageLayout, kv_heads: int, lengths: Sequence[int], calibrate=calibrated) -> None:
        super().__init__(layout, kv_heads, [length + 1 for length in lengths], calibrate=calibrate)
        self.layer = PagedLayers.of([self.cache])

    def chunk(self, chunks: dict[int, History]) -> tuple[AttentionInputs, tuple]:
        inputs = self.inputs({row: part.length for row, part in chunks.items()})
        wide = append_chunk(
            *(torch.cat([getattr(part, x) for part in chunks.values()]) for x in "kv"), self.layer, inputs
        )
        for row, part in chunks.items():
            self.held[row] += part.length
        return inputs, wide

    def decode(self, tokens: dict[int, History], **how) -> DecodeQuery:
        inputs = self.inputs(dict.fromkeys(tokens, 1))
        q, k, v = (torch.cat([getattr(token, x) for token in tokens.values()]) for x in "qkv")
        query = append_decode(q, k, v, self.layer, inputs, **how)
        if self.layout.format.recent:
            encode_leaving(self.layer, inputs)
        for row in tokens:
            self.held[row] += 1
        return query

    def check(self, histories: Sequence[History]) -> None:
        """Pages hold what the codec makes of the tokens that left or leave next, windows the others."""
        fmt = self.layout.format
        for row, past in enumerate(histories):
            length, window = self.held[row], self.window_of(row)
            coded = tokens_in_pages(length, fmt)
            part = past.part(fmt.sinks, fmt.sinks + coded)
            mean_key = self.calibration.mean_key
            mean = 0 if mean_key is None else mean_key.at(torch.arange(fmt.sinks, fmt.sinks + coded))
            if coded:
                expected = encode(self.layout, part.k.float() - mean, part.v.float(), self.calibration.coding)
                pages = self.cache.pages[self.tables[row, : -(-coded // PAGE_SIZE)].long()]
                assert torch.equal(pages, expected)
            for p in [*range(min(fmt.sinks, length)), *range(fmt.sinks + fmt.coded_tokens(length), length)]:
                slot = p if p < fmt.sinks else fmt.sinks + (p - fmt.sinks) % fmt.ring_size
                assert torch.equal(window[0, :, slot], past.k[p].to(window.dtype))
                assert torch.equal(window[1, :, slot], past.v[p].to(window.dtype))


@pytest.mark.parametrize(
    ("name", "sinks", "recent"),
    [("kv2-plain", 3, 8), ("kv2-plain", 0, 1), ("kv2-plain", 2, 0), ("fp8", 0, 0), ("fp8", 4, 5), ("bf16", 0, 0)],
)
def test_chunks_and_then_single_tokens_of_a_ragged_batch(name: str, sinks: int, recent: int) -> None:
    layout = PageLayout(get_format(name, sinks, recent), 64)
    chunks, steps = (1, 5, 63, 74), 4
    lengths = [size + steps for size in chunks]
    histories = [history(n, 1, 2, 64, seed=n, dtype=torch.bfloat16) for n in lengths]
    paged = OnDevice(layout, 1, lengths)
    unused = [page for page in range(len(paged.cache.pages)) if page not in paged.tables]
    free_slot = next(slot for slot in range(len(lengths) + 1) if slot not in paged.slots)
    paged.chunk({row: past.part(0, size) for row, (past, size) in enumerate(zip(histories, chunks, strict=True))})
    paged.check(histories)
    for step in range(steps):
        paged.decode(
            {
                row: past.part(size + step, size + step + 1)
                for row, (past, size) in enumerate(zip(histories, chunks, strict=True))
            }
        )
        paged.check(histories)
    assert bool((paged.cache.pages[unused] == POISON).all())
    assert bool((as_bytes(paged.cache.windows[free_slot]) == POISON).all())


def test_chunk_by_chunk_attention_reads_what_the_reference_reads() -> None:
    """The same windows and codes, so bit for bit the same attention."""
    layout = PageLayout(get_format("kv2-plain", sinks=2, recent=6), 64)
    past = history(90, 2, 2, 64, dtype=torch.float32)
    reference, device = (Paged(layout, 2, [91], calibrate=calibrated) for _ in range(2))
    for chunk in past.cut([50, 1, 39]):
        expected = reference.step({0: chunk}, 0.1)[0]
        inputs = device.inputs({0: chunk.length})
        wide = append_chunk(chunk.k, chunk.v, PagedLayers.of([device.cache]), inputs).by_sequence
        device.held[0] += chunk.length
        assert torch.equal(attend_reference(chunk.q, wide, device.cache, inputs, 0.1), expected)


class Counted(TorchDispatchMode):
    """How many operations torch carries out."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


FROM_HOST = {"tensor", "as_tensor", "arange", "to", "cpu", "cuda", "tolist", "item", "nonzero", "__bool__", "__int__"}
"""What has the host wait for a device, or is made of what the host knows."""


@pytest.mark.parametrize("name", ["kv2-plain", "fp8", "bf16"])
def test_what_a_chunk_moves_is_worked_out_once_for_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_append, "encode_tokens", lambda *_: None)
    layout, pasts = PageLayout(get_format(name), 64), [history(n, 2, 2, 64) for n in (300, 70)]
    device = OnDevice(layout, 2, [past.length for past in pasts])
    inputs = device.inputs({row: past.length for row, past in enumerate(pasts)})
    k, v = (torch.cat([getattr(past, side) for past in pasts]).float() for side in "kv")
    called: list[set[str]] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called[-1].add(func.__name__)
            return func(*args, **(kwargs or {}))

    with Watch():
        for _ in range(2):
            called.append(set())
            append_chunk(k, v, device.layer, inputs)
    assert "tolist" in called[0]
    assert called[1], "it is watched"
    assert called[1] & FROM_HOST == set()


@pytest.mark.parametrize("name", ["kv2-plain", "fp8", "bf16"])
def test_many_sequences_take_as_many_operations_as_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all layers but the first: on a GPU each is a launch."""
    monkeypatch.setattr(triton_append, "encode_tokens", lambda *_: None)
    counts = []
    for lengths in ((300, 70), (10, 300, 70, 1, 260, 30)):
        device = OnDevice(PageLayout(get_format(name), 64), 2, list(lengths))
        inputs = device.inputs(dict(enumerate(lengths)))
        k = gaussian(sum(lengths), 2, 64)
        append_chunk(k, k, device.layer, inputs)
        with Counted() as counted:
            append_chunk(k, k, device.layer, inputs)
        counts.append(counted.operations)
    assert counts[0] == counts[1] <= 20


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [
        (64, 7, torch.bfloat16),
        (64, 16, torch.float16),
        (80, 3, torch.float16),
        (96, 1, torch.float32),
        (128, 4, torch.bfloat16),
        (256, 2, torch.float32),
    ],
)
def test_queries_come_out_rotated_and_in_coded_space(head_dim: int, group: int, dtype: torch.dtype) -> None:
    """q and k as they come from one projection, before norm and RoPE."""
    layout = PageLayout(get_format("kv2", sinks=2, recent=3), head_dim)
    paged, heads = OnDevice(layout, 2, [6] * 3), 2 * group
    paged.held[:] = [1, 4, 5]
    qkv = gaussian(3, heads + 4, head_dim).to(dtype)
    q, k, v = qkv.split([heads, 2, 2], dim=1)
    weights = (1 + 0.2 * gaussian(2, head_dim, seed=1)).to(dtype)
    inputs = paged.inputs(dict.fromkeys(range(3), 1))
    norm = QKNorm(weights[0], weights[1], 1e-6)
    query = append_decode(q, k, v, paged.layer, inputs, norm=norm, rope=ROPE[head_dim])
    cos_sin = ROPE[head_dim].at(inputs.context_len.long())
    normed = (rms_norm_reference(x, weight, 1e-6) for x, weight in ((q, weights[0]), (k, weights[1])))
    expected_q, expected_k = rope_reference(*normed, *cos_sin)
    assert_rounded_alike(query.q, expected_q)
    for row, slot in enumerate((1, 2 + (4 - 2) % 3, 2 + (5 - 2) % 3)):
        window = paged.window_of(row)
        assert_rounded_alike(window[0, :, slot], expected_k[row].bfloat16())
        assert torch.equal(window[1, :, slot], v[row].bfloat16())
    coding = paged.calibration.coding
    by_head = query.q.float().unflatten(1, (2, group)).permute(1, 0, 2, 3)
    index = coding.kept_channels[:, None, None].expand(-1, *by_head.shape[1:3], -1)
    assert torch.equal(query.kept.unflatten(1, (2, group)).permute(1, 0, 2, 3), by_head.gather(-1, index))
    coded = by_head.scatter(-1, index, 0.0) @ coding.key.from_coded.transpose(1, 2)[:, None]
    found = query.coded.float().unflatten(1, (2, group)).permute(1, 0, 2, 3)
    assert float((found - coded).norm() / coded.norm()) < 4e-4


@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (64, 8), (128, 4), (128, 12), (256, 1)])
def test_queries_as_integers_are_the_coded_queries(head_dim: int, group: int) -> None:
    """Upper and lower halves of 15 bits, in the order of the codes of a key record."""
    layout = PageLayout(get_format("kv2", sinks=2, recent=3), head_dim)
    paged = OnDevice(layout, 2, [6] * 2)
    q, k, v = (gaussian(2, heads, head_dim, seed=heads) * 3 for heads in (2 * group, 2, 2))
    inputs = paged.inputs(dict.fromkeys(range(2), 1))
    plain = append_decode(q, k, v, paged.layer, inputs)
    query = append_decode(q, k, v, paged.layer, inputs, integer=True)
    assert query.coded is None
    assert query.steps is not None
    assert query.numbers is not None
    byte = torch.arange(query.steps.shape[-1])
    operand = torch.arange(query.steps.shape[-3])[:, None]
    plane = byte // (head_dim // 4) + operand * (4 // len(operand))
    byte = byte % (head_dim // 4)
    channel = (plane + 4 * (byte % 2)) * (head_dim // 8) + byte // 2
    # batch, KV head, block, tile, operand, head, half, byte -> batch, KV head, (block, tile, head), (operand, byte)
    upper, lower = query.steps.float().unflatten(-2, (4, 2)).unbind(-2)
    steps = (upper * 128 + lower).transpose(-2, -3).flatten(-2).flatten(2, 4)[:, :, :group]
    unit, eighth, *kept = query.numbers[:, :, :group].unbind(-1)
    found = torch.zeros(2, 2, group, head_dim)
    found[..., channel.flatten()] = steps * unit[..., None] * torch.where(plane % 2 == 1, 4.0, 1.0).flatten()
    expected = plain.coded.float().unflatten(1, (2, group))
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    assert torch.allclose(eighth, expected.sum(-1) / 8, atol=2e-3 * float(expected.norm(dim=-1).max()))
    assert torch.equal(torch.stack(kept, -1), plain.kept.unflatten(1, (2, group)))


def assert_rounded_alike(found: Tensor, expected: Tensor) -> None:
    """Equal, but for elements that lie in the middle between two of their dtype, and float32 errors."""
    assert found.dtype == expected.dtype
    close = (found.float() - expected.float()).abs() <= torch.finfo(found.dtype).eps * expected.float().abs() + 1e-6
    assert bool(close.all())
    if found.dtype != torch.float32:
        assert float((found != expected).double().mean()) < 0.01


def test_queries_that_are_rotated_already_are_left_as_they_are() -> None:
    paged = OnDevice(PageLayout(get_format("fp8", sinks=2, recent=3), 64), 2, [1])
    token = history(1, 2, 3, 64, dtype=torch.float32)
    query = paged.decode({0: token})
    assert query.q is not None
    assert torch.equal(query.q, token.q)
    assert query.coded is None
    assert query.kept.shape == (1, 6, 0)


@pytest.mark.parametrize(("name", "recent"), [("kv2-plain", 3), ("fp8", 0)])
def test_rows_that_fill_up_a_batch_append_nothing(name: str, recent: int) -> None:
    """Not to the memory before the first slot either."""
    layout = PageLayout(get_format(name, sinks=1, recent=recent), 64)
    paged = OnDevice(layout, 2, [20, 20])
    paged.held[:] = [10, 0]
    inputs = paged.inputs({0: 1, 1: 1})
    inputs.window_slot[:] = torch.tensor([0, -1])
    windows = torch.full((3, 2, 2, layout.format.window_size, 64, 2), POISON, dtype=torch.uint8)
    typed = windows.view(layout.wide_dtype)[..., 0]
    layer = PagedLayers.of([replace(paged.cache, windows=typed[1:])])
    q, k, v = (gaussian(2, heads, 64).bfloat16() for heads in (4, 2, 2))
    append_decode(q, k, v, layer, inputs)
    if recent:
        encode_leaving(layer, inputs)
    written = (paged.cache.pages != POISON).flatten(1).any(1).nonzero().flatten()
    assert written.tolist() == [int(paged.tables[0, 0])]
    assert [bool((slot != POISON).any()) for slot in windows] == [False, recent > 0, False]


# --- on a GPU ------------------------------------------------------------------------------------------------------


def test_kernels_compile_and_nothing_is_spilled(tmp_path: Path) -> None:
    """For compute capabilities 8.0, 9.0 and 10.0."""
    results = compiled("compile_append", tmp_path)
    assert len(results) == 7
    assert [result for result in results if result[3]] == []
    overlapping = {(capability, name) for capability, name, *_, overlaps in results if overlaps}
    assert overlapping == {(90, "append 3"), (90, "append 64"), (100, "append 3")}


# --- what is served ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "kivi2", "article2", "fp32", "kv2:kivi2"])
def test_other_formats_are_refused(name: str) -> None:
    layout = PageLayout(get_format(name), 64)
    cache = LayerCache(torch.zeros(0), torch.zeros(0), plain(layout, 1).coding, None, layout)
    with pytest.raises(KernelUnavailableError, match=f"'{name}'"):
        PagedLayers.of([cache, cache])


def test_heads_beyond_256_are_refused() -> None:
    reason = refusal(PageLayout(get_format("kv2"), 272))
    assert reason is not None
    assert "272" in reason


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (3, 0), (0, 1), (64, 128)])
def test_one_token_is_coded_ahead(sinks: int, recent: int) -> None:
    """In each step at most one token is coded, and what the next step reads through the codes is there before it."""
    fmt = get_format("kv2", sinks, recent)
    for length in range(400):
        assert tokens_in_pages(length + 1, fmt) - tokens_in_pages(length, fmt) in (0, 1)
        assert fmt.coded_tokens(length) <= tokens_in_pages(length, fmt) <= max(0, length - sinks)
        if recent:
            assert tokens_in_pages(length, fmt) == fmt.coded_tokens(length + 1)
