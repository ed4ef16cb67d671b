from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from subten.formats import PageLayout, get_format
from subten.formats.codec import decode_keys, decode_values, reconstruct_keys, reconstruct_values
from subten.kernels.attention import AttentionInputs
from subten.kernels.attention.attend import attend_reference
from subten.kernels.attention.device_cache import PagedLayers
from subten.kernels.attention.plan import DecodePlan, DecodeShape, plan_decode, tune_decode
from subten.kernels.attention.triton_append import DecodeQuery, QKNorm, append_decode
from subten.kernels.attention.triton_decode import DecodeScratch, attend_decode
from subten.kernels.norm import rms_norm_reference
from support.attention import Calibrate, Paged, calibrated, history, plain
from support.device_code import quicken_interpreter
from support.kv import HEAD_DIMS, gaussian

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the interpreter divides 0 by 0
FORMATS = ("bf16", "fp8", "kv4", "kv2", "k4v2", "kv2-plain")


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter():
    with pytest.MonkeyPatch.context() as patch:
        quicken_interpreter(patch)
        yield


@dataclass(frozen=True)
class Step:
    """A batch in the middle of a decode step: the new tokens are appended, the queries wait."""

    paged: Paged
    q: Tensor
    inputs: AttentionInputs
    expected: Tensor

    @classmethod
    def of(
        cls,
        name: str,
        head_dim: int,
        group: int,
        lengths: Sequence[int],
        *,
        kv_heads: int = 1,
        sinks: int = 3,
        recent: int = 10,
        calibrate: Calibrate = calibrated,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        damage: bool = False,
    ) -> Step:
        """Of sequences of these lengths, the new token included; in the last one a token may be NaN."""
        layout = PageLayout(get_format(name, sinks, recent), head_dim)
        histories = [history(n, kv_heads, group, head_dim, seed + 10 * row, dtype) for row, n in enumerate(lengths)]
        if damage:
            histories[-1].k[30] = histories[-1].v[30] = torch.nan
        paged = Paged(layout, kv_heads, lengths, seed=seed, calibrate=calibrate)
        longer = {row: past.part(0, past.length - 1) for row, past in enumerate(histories) if past.length > 1}
        if longer:
            paged.append(longer)
        last = {row: past.part(past.length - 1, past.length) for row, past in enumerate(histories)}
        inputs, wide = paged.append(last)
        q = torch.cat([token.q for token in last.values()])
        return cls(paged, q, inputs, attend_reference(q.float(), wide, paged.cache, inputs, head_dim**-0.5))

    @property
    def query(self) -> DecodeQuery:
        """As `append_decode` leaves it."""
        coding, num_kv_heads = self.paged.cache.coding, self.paged.kv_heads
        by_head = self.q.float().unflatten(1, (num_kv_heads, -1))
        index = coding.kept_channels[None, :, None].expand(*by_head.shape[:3], -1)
        kept = by_head.gather(-1, index).flatten(1, 2)
        if coding.key is None:
            return DecodeQuery(self.q, None, kept)
        coded = by_head.scatter(-1, index, 0.0) @ coding.key.from_coded.transpose(1, 2)
        return DecodeQuery(self.q, coded.flatten(1, 2).half(), kept)

    @property
    def layer(self) -> PagedLayers:
        return PagedLayers.of([self.paged.cache])

    def plan(self, splits: int = 2, pages: int = 1, warps: int = 2) -> DecodePlan:
        shape = DecodeShape.of(self.paged.layout, self.q.shape[1] // self.paged.kv_heads)
        return DecodePlan(splits, pages, tune_decode(shape, self.paged.cache.mean_key is not None, warps))

    def attend(self, plan: DecodePlan | None = None, scratch: DecodeScratch | None = None, **options) -> Tensor:
        plan = plan or self.plan()
        scratch = scratch or self.poisoned_scratch(plan)
        scale = self.paged.layout.head_dim**-0.5
        return attend_decode(self.query, self.layer, self.inputs, scale, plan, scratch, **options)

    def poisoned_scratch(self, plan: DecodePlan) -> DecodeScratch:
        scratch = DecodeScratch.allocate(self.query, self.layer, plan)
        scratch.stats.fill_(torch.nan)
        scratch.sums.fill_(torch.nan)
        return scratch

    def by_definition(self, sliding_window: int | None = None, sink_logits: Tensor | None = None) -> Tensor:
        """float64, from the keys and values as they read."""
        return torch.stack([self._sequence(row, sliding_window, sink_logits) for row in range(len(self.q))])

    def _sequence(self, row: int, sliding_window: int | None, sink_logits: Tensor | None) -> Tensor:
        layout, coding = self.paged.layout, self.paged.calibration.exact
        fmt, length = layout.format, self.paged.held[row]
        coded = fmt.coded_tokens(length)
        window = self.paged.window_of(row).double()
        slots = [p if p < fmt.sinks else fmt.sinks + (p - fmt.sinks) % max(1, fmt.ring_size) for p in range(length)]
        in_pages = torch.tensor([fmt.sinks <= p < fmt.sinks + coded for p in range(length)])
        slots = torch.tensor(slots).where(~in_pages, 0)
        keys, values = (
            (window[side][:, slots] for side in range(2))
            if fmt.window_size
            else torch.zeros(2, self.paged.kv_heads, length, layout.head_dim).double()
        )
        if coded:
            records = self.paged.pages_of(row).transpose(0, 1)
            decoded = decode_keys(records, layout)
            decoded = decoded._replace(coded=decoded.coded.double(), kept=decoded.kept.double())
            read = reconstruct_keys(decoded, coding, layout)[:, :coded]
            if self.paged.cache.mean_key is not None:
                positions = torch.arange(fmt.sinks, fmt.sinks + coded)
                read = read + self.paged.cache.mean_key.at(positions).transpose(0, 1)
            keys[:, in_pages] = read
            values[:, in_pages] = reconstruct_values(decode_values(records, layout).double(), coding)[:, :coded]
        q = self.q[row].double().unflatten(0, (self.paged.kv_heads, -1))
        scores = q @ keys.transpose(1, 2) * layout.head_dim**-0.5
        if sliding_window is not None:
            scores[..., : max(0, length - sliding_window)] = -torch.inf
        if sink_logits is not None:
            scores = torch.cat([scores, sink_logits.double().unflatten(0, (self.paged.kv_heads, -1))[..., None]], -1)
        weights = scores.softmax(-1)[..., :length]
        return (weights @ values).flatten(0, 1)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, of the worst sequence."""
    found, expected = found.double().flatten(1), expected.double().flatten(1)
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def assert_as_expected(step: Step, plan: DecodePlan | None = None) -> None:
    found = step.attend(plan)
    assert found.dtype == step.q.dtype
    assert found.shape == step.q.shape
    assert error(found, step.expected) <= 2e-3


# --- against the reference ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        *(("kv2", head_dim) for head_dim in HEAD_DIMS),
        *zip(("bf16", "fp8", "kv4", "k4v2", "kv2-plain"), HEAD_DIMS, strict=True),
        *zip(("bf16", "fp8", "kv4", "k4v2", "kv2-plain"), (*HEAD_DIMS[3:], *HEAD_DIMS[:3]), strict=True),
    ],
)
def test_a_ragged_batch_is_as_by_the_reference(name: str, head_dim: int) -> None:
    """A first token alone, one coded token, and pages of which the last is not full."""
    group = {64: 7, 80: 1, 96: 3, 128: 4, 256: 2}[head_dim]
    assert_as_expected(Step.of(name, head_dim, group, (1, 14, 150)))


@pytest.mark.parametrize("name", ["kv2", "kv4"])
def test_without_calibration(name: str) -> None:
    """No mean key."""
    assert_as_expected(Step.of(name, 64, 4, (100,), calibrate=plain))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 8, 9, 12, 15, 16])
def test_every_group(group: int) -> None:
    assert_as_expected(Step.of("kv2-plain", 64, group, (60,), seed=group))


@pytest.mark.parametrize("name", ["kv2-plain", "fp8"])
def test_lengths_around_the_edges_of_windows_and_pages(name: str) -> None:
    lengths = (12, 13, 76, 77, 78, 140, 141, 142)
    assert_as_expected(Step.of(name, 64, 2, lengths))


# Without shrinking: an example takes a second.
@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*FORMATS, "fp8:kv2", "kv2:kv4"]), "format")
    sinks = data.draw(st.sampled_from([0, 1, 4, 64]), "sinks")
    recent = data.draw(st.sampled_from([0, 1, 31, 64, 128]), "recent")
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=2), "lengths")
    splits, pages = data.draw(st.integers(1, 4), "splits"), data.draw(st.integers(1, 3), "pages per split")
    step = Step.of(
        name,
        data.draw(st.sampled_from([64, 80, 96]), "head_dim"),
        data.draw(st.integers(1, 5), "group"),
        lengths,
        kv_heads=data.draw(st.integers(1, 2), "kv_heads"),
        sinks=sinks,
        recent=recent,
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    assert_as_expected(step, step.plan(splits, pages, data.draw(st.sampled_from([1, 2, 4]), "warps")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_result_has_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    step = Step.of("kv2-plain", 64, 2, (90,), dtype=dtype)
    found = step.attend()
    assert found.dtype == dtype
    assert error(found, step.expected) <= 2e-3 + torch.finfo(dtype).eps / 2


def test_behind_append_decode() -> None:
    """The two launches of a decode step, q and k before the norm of the heads."""
    layout = PageLayout(get_format("kv2-plain", 3, 10), 64)
    past, weights = history(96, 2, 3, 64, dtype=torch.float32), 1 + 0.2 * gaussian(2, 64)
    normed = replace(
        past, q=rms_norm_reference(past.q, weights[0], 1e-6), k=rms_norm_reference(past.k, weights[1], 1e-6)
    )
    reference, device = (Paged(layout, 2, [97], calibrate=calibrated) for _ in range(2))
    for paged in (reference, device):
        paged.append({0: normed.part(0, 95)})
    expected = reference.step({0: normed.part(95, 96)}, 0.125)[0]
    layer, inputs, last = PagedLayers.of([device.cache]), device.inputs({0: 1}), past.part(95, 96)
    query = append_decode(last.q, last.k, last.v, layer, inputs, norm=QKNorm(weights[0], weights[1], 1e-6))
    assert error(attend_decode(query, layer, inputs, 0.125), expected) <= 2e-3


# --- sliding window, learned sinks -------------------------------------------------------------------------------


def test_the_definition_is_the_reference() -> None:
    for name in ("kv2", "fp8"):
        step = Step.of(name, 64, 2, (1, 30, 150), kv_heads=2)
        assert error(step.by_definition(), step.expected) <= 1e-5


@pytest.mark.parametrize("sliding_window", [1, 5, 10, 12, 70, 74, 75, 149, 1000])
def test_sliding_windows(sliding_window: int) -> None:
    step = Step.of("kv2-plain", 64, 2, (1, 12, 150))
    found = step.attend(sliding_window=sliding_window)
    assert error(found, step.by_definition(sliding_window)) <= 2e-3


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_sliding_windows_without_windows_in_16_bit(name: str) -> None:
    step = Step.of(name, 64, 2, (200,), sinks=0, recent=0)
    for sliding_window in (1, 63, 72, 73, 137):
        assert error(step.attend(sliding_window=sliding_window), step.by_definition(sliding_window)) <= 2e-3


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_learned_sinks_take_their_share(sliding_window: int | None) -> None:
    step = Step.of("kv2-plain", 64, 3, (1, 90), kv_heads=2)
    sink_logits = 3 * gaussian(6, seed=5)
    sink_logits[0] = 60.0
    found = step.attend(sliding_window=sliding_window, sink_logits=sink_logits)
    assert error(found, step.by_definition(sliding_window, sink_logits)) <= 2e-3


# --- what must not change a result -------------------------------------------------------------------------------


def test_scratch_that_was_used_is_as_good_as_new() -> None:
    """And nothing of a longer batch is left in it."""
    longer, step = (Step.of("kv2-plain", 64, 2, lengths, seed=1) for lengths in ((290, 200), (100, 1)))
    plan = step.plan(splits=3)
    fresh = step.attend(plan)
    scratch = step.poisoned_scratch(plan)
    longer.attend(plan, scratch)
    assert not scratch.arrived.any()
    assert torch.equal(step.attend(plan, scratch), fresh)
    assert not scratch.arrived.any()


def test_whoever_is_last_adds_up_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step.of("kv2-plain", 64, 2, (290, 120), sinks=64, recent=100)
    plan, order = step.plan(splits=3), []
    forwards = step.attend(plan)
    builder, splits = interpreter.interpreter_builder, 2 + 3
    original = type(builder).set_grid_idx

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        order.append(x)
        original(self, (7 * x + 2) % splits if z else splits - 1 - x, y, z)

    monkeypatch.setattr(type(builder), "set_grid_idx", set_grid_idx)
    assert torch.equal(step.attend(plan), forwards)
    assert len(order) == 2 * splits


@pytest.mark.parametrize("name", ["kv2-plain", "fp8"])
def test_rows_that_fill_up_a_batch_read_nothing_and_become_zero(name: str) -> None:
    step = Step.of(name, 64, 2, (90, 100), recent=0 if name == "fp8" else 10)
    alone = step.attend()
    none = torch.tensor([-1], dtype=torch.int32)
    huge = torch.full_like(step.inputs.block_table[:1], 2**30)
    filled = AttentionInputs(
        torch.arange(4, dtype=torch.int32),
        torch.cat([step.inputs.context_len[:1], -(2**30) * none, step.inputs.context_len[1:]]),
        torch.cat([step.inputs.block_table[:1], huge, step.inputs.block_table[1:]]),
        torch.cat([step.inputs.window_slot[:1], none, step.inputs.window_slot[1:]]),
    )
    q = torch.cat([step.q[:1], torch.full_like(step.q[:1], torch.nan), step.q[1:]])
    found = replace(step, q=q, inputs=filled).attend()
    assert torch.equal(found[[0, 2]], alone)
    assert not found[1].any()


@pytest.mark.parametrize("name", ["kv2", "bf16"])
def test_a_sequence_with_nan_shows_it_and_leaves_the_others_alone(name: str) -> None:
    lengths = (100, 100)
    sound = Step.of(name, 64, 2, lengths)
    broken = Step.of(name, 64, 2, lengths, damage=True)
    found = broken.attend()
    assert torch.equal(found[0], sound.attend()[0])
    assert bool(found[1].isnan().all())


@pytest.mark.parametrize("factor", [0.0, 1e-12, 1e4, 1e8])
def test_queries_of_any_size(factor: float) -> None:
    """Equal scores, and scores far beyond the range of exp."""
    step = Step.of("fp8", 64, 2, (150,))
    loud = replace(step, q=step.q * factor)
    assert error(loud.attend(), loud.by_definition()) <= 2e-3


def test_offsets_beyond_32_bits() -> None:
    """Pages and window slots of a GiB each; all but the last is never touched, so it is not there."""
    step = Step.of("kv2-plain", 64, 2, (70,))
    cache = step.paged.cache
    pages, windows = (_far_away(getattr(cache, name)) for name in ("pages", "windows"))
    pages[5].copy_(cache.pages[step.paged.tables[0, 0]])
    windows[5].copy_(cache.windows[step.paged.slots[0]])
    five = torch.tensor([[5]], dtype=torch.int32)
    inputs = replace(step.inputs, block_table=five, window_slot=five[0])
    layer = PagedLayers.of([replace(cache, pages=pages, windows=windows)])
    assert torch.equal(attend_decode(step.query, layer, inputs, 0.125, step.plan()), step.attend())


def _far_away(x: Tensor) -> Tensor:
    distance = (1 << 30) // x.itemsize
    return torch.empty(6 * distance, dtype=x.dtype).as_strided((6, *x.shape[1:]), (distance, *x.stride()[1:]))


def test_each_layer_of_a_cache_is_read_with_its_own_tables() -> None:
    steps = [Step.of("kv2", 64, 2, (90,), seed=seed, calibrate=partial(calibrated, seed=seed)) for seed in range(2)]
    caches = [step.paged.cache for step in steps]
    pages, windows = (torch.stack([getattr(cache, x) for cache in caches], 1) for x in ("pages", "windows"))
    layers = PagedLayers.of([replace(c, pages=pages[:, i], windows=windows[:, i]) for i, c in enumerate(caches)])
    for index, step in enumerate(steps):
        found = attend_decode(step.query, layers.layer(index), step.inputs, 0.125, step.plan())
        assert torch.equal(found, step.attend())


# --- plans -------------------------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(FORMATS),
    head_dim=st.sampled_from(HEAD_DIMS),
    group=st.integers(1, 16),
    batch=st.integers(1, 256),
    kv_heads=st.sampled_from([1, 2, 4, 8, 16]),
    max_pages=st.integers(0, 16384),
)
def test_plans(name: str, head_dim: int, group: int, batch: int, kv_heads: int, max_pages: int) -> None:
    """Programs fit the registers; no split is without a page; at most a wave of them while pairs are few."""
    shape = DecodeShape.of(PageLayout(get_format(name), head_dim), group)
    plan = plan_decode(shape, False, batch, kv_heads, max_pages, 132)
    tuning = plan.tuning
    assert tuning.programs_per_sm >= 1
    assert tuning.max_registers * 32 * tuning.warps * tuning.programs_per_sm <= 65536
    assert 1 <= plan.page_splits <= max(1, -(-max_pages // plan.pages_per_split))
    if 4 * batch * kv_heads <= 132:
        assert plan.page_splits * batch * kv_heads <= 132 * tuning.programs_per_sm


@pytest.mark.parametrize(
    ("batch", "kv_heads", "warps", "splits"), [(1, 8, 4, 49), (1, 4, 8, 32), (1, 1, 8, 32), (32, 8, 4, 6)]
)
def test_the_plan_of_kv2_at_32k(batch: int, kv_heads: int, warps: int, splits: int) -> None:
    shape = DecodeShape.of(PageLayout(get_format("kv2"), 128), 4)
    plan = plan_decode(shape, False, batch, kv_heads, 512, 132)
    assert (plan.tuning.warps, plan.page_splits) == (warps, splits)


@pytest.mark.parametrize(("name", "pages"), [("kv2", 16), ("kv4", 16), ("fp8", 8), ("bf16", 4)])
def test_two_tiles_a_warp_are_a_split(name: str, pages: int) -> None:
    """Whatever a tile is: a short context is shared by as many programs as it has work for."""
    shape = DecodeShape.of(PageLayout(get_format(name), 128), 8)
    plan = plan_decode(shape, False, 1, 4, 64, 132)
    assert plan.tuning.warps == 8
    assert (plan.pages_per_split, plan.page_splits) == (pages, 64 // pages)
