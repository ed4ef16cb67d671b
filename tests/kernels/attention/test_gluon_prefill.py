"""The Gluon kernel of a prefill's pages, emulated on a CPU: its arithmetic, its bounds, and its barriers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.kernels.attention.test_triton_prefill import appended, relative_error

from subten.formats import PageLayout, get_format
from subten.kernels.attention import PrefillRule, gluon_prefill, triton_prefill
from subten.kernels.attention.attend import attend_reference
from subten.kernels.attention.device_cache import PagedLayers
from support.attention import Paged, calibrated, history
from support.device_code import quicken_interpreter
from support.gluon_emulator import Emulator
from support.interpreter import correct_numbers
from support.kv import gaussian

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MODULES = ("subten.kernels.attention.gluon_dequantise", "subten.kernels.attention.gluon_prefill")


class Emulated:
    """`coded_kernel`. What it gets to write to holds NaN."""

    arg_names = gluon_prefill.coded_kernel.arg_names

    def __init__(self, seed: int) -> None:
        self._emulator, self.launches = Emulator(*MODULES, seed=seed), 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*, num_warps: int, **arguments: Any) -> None:
            assert num_warps == gluon_prefill.WARPS
            self.launches += 1
            for name in ("sums", "stats"):
                arguments[name].fill_(torch.nan)
            self._emulator.launch(MODULES[1], "coded_kernel", grid, arguments)

        return launch


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken_interpreter(monkeypatch)
    correct_numbers(monkeypatch)


def without_mean_key(*arguments: Any) -> Any:
    return replace(calibrated(*arguments), mean_key=None)


@pytest.mark.parametrize("rule", ["window", "chunk"])
@pytest.mark.parametrize("sliding_window", [None, 40, 150])
@pytest.mark.parametrize(("calibrate", "tolerance"), [(without_mean_key, 5e-4), (calibrated, 1.5e-3)])
@pytest.mark.parametrize(("name", "head_dim", "group"), [("kv2", 128, 4), ("kv2-plain", 64, 3)])
def test_both_kernels_find_the_same(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    head_dim: int,
    group: int,
    calibrate: Callable[..., Any],
    tolerance: float,
    sliding_window: int | None,
    rule: PrefillRule,
) -> None:
    """But for rounding: on a GPU to the bit without a mean key, whose angles are sums of two here."""
    layout, kv_heads = PageLayout(get_format(name, sinks=5, recent=12), head_dim), 2
    sizes, lengths = [70, 1, 50, 20], [330, 90, 60, 20]
    histories = [history(n, kv_heads, group, head_dim, seed=n, dtype=torch.float32) for n in lengths]
    paged = Paged(layout, kv_heads, lengths, rule, calibrate=calibrate)
    q, inputs, wide = appended(paged, histories, sizes)
    emulated = Emulated(seed=head_dim + (sliding_window or 0))
    monkeypatch.setattr(gluon_prefill, "coded_kernel", emulated)
    options = {"sliding_window": sliding_window, "sink_logits": 2 * gaussian(kv_heads * group, seed=8)}
    arguments = q, wide, PagedLayers.of([paged.cache]), inputs, head_dim**-0.5
    found = gluon_prefill.attend_prefill(*arguments, **options)
    assert emulated.launches == 1
    expected = triton_prefill.attend_prefill(*arguments, **options)
    for part in (slice(step.start, step.end) for step in inputs.sequences):
        assert relative_error(found[part], expected[part]) <= tolerance


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    steps=st.lists(st.tuples(st.integers(0, 260), st.integers(1, 90)), min_size=1, max_size=3),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 2),
    rule=st.sampled_from(["window", "chunk"]),
    sliding_window=st.none() | st.integers(1, 300),
    mean_key=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_chunks_behind_any_histories(
    steps: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    rule: PrefillRule,
    sliding_window: int | None,
    mean_key: bool,
    seed: int,
) -> None:
    """Blocks of rows that are full and that are not, first and last pages, rows that see nothing."""
    layout = PageLayout(get_format("kv2", sinks=5, recent=12), 64)
    lengths = [held + size for held, size in steps]
    histories = [history(n, kv_heads, group, 64, seed=seed + n, dtype=torch.float32) for n in lengths]
    calibrate = calibrated if mean_key else without_mean_key
    paged = Paged(layout, kv_heads, lengths, rule, calibrate=calibrate)
    q, inputs, wide = appended(paged, histories, [size for _, size in steps])
    arguments = q, wide, PagedLayers.of([paged.cache]), inputs, 0.125
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gluon_prefill, "coded_kernel", Emulated(seed))
        found = gluon_prefill.attend_prefill(*arguments, sliding_window=sliding_window)
    expected = triton_prefill.attend_prefill(*arguments, sliding_window=sliding_window)
    assert bool(found.isfinite().all())
    assert relative_error(found, expected) <= 1.5e-3


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_turns_changes_a_bit(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of eight pages, in two places of shared memory."""
    layout = PageLayout(get_format("kv2-plain", sinks=5, recent=12), 64)
    past = history(550, 1, 2, 64, dtype=torch.float32)
    paged = Paged(layout, 1, [550], "chunk", calibrate=without_mean_key)
    q, inputs, wide = appended(paged, [past], [20])
    results = []
    for own in (seed, 100 + seed):
        monkeypatch.setattr(gluon_prefill, "coded_kernel", Emulated(own))
        results.append(gluon_prefill.attend_prefill(q, wide, PagedLayers.of([paged.cache]), inputs, 0.125))
    assert torch.equal(*results)
    expected = attend_reference(q, wide.by_sequence, paged.cache, inputs, 0.125)
    assert relative_error(results[0], expected) <= 2e-3


@pytest.mark.parametrize(("name", "head_dim", "length", "size"), [("kv2", 64, 40, 40), ("kv2-plain", 256, 90, 10)])
def test_it_is_not_launched_where_there_are_no_codes_and_for_other_heads(
    monkeypatch: pytest.MonkeyPatch, name: str, head_dim: int, length: int, size: int
) -> None:
    monkeypatch.setattr(gluon_prefill, "coded_kernel", None)
    layout, scale = PageLayout(get_format(name, sinks=5, recent=12), head_dim), head_dim**-0.5
    paged = Paged(layout, 1, [90], "chunk", calibrate=calibrated)
    q, inputs, wide = appended(paged, [history(length, 1, 2, head_dim, dtype=torch.float32)], [size])
    found = gluon_prefill.attend_prefill(q, wide, PagedLayers.of([paged.cache]), inputs, scale)
    assert relative_error(found, attend_reference(q, wide.by_sequence, paged.cache, inputs, scale)) <= 2e-3


class Wrong(Emulated):
    """Finds nothing in the pages."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*, num_warps: int, **arguments: Any) -> None:
            self.launches += 1
            arguments["sums"].zero_()
            arguments["stats"][0], arguments["stats"][1] = -1e30, 0.0

        return launch


@pytest.mark.parametrize("kernel", [Emulated, Wrong])
def test_the_first_chunk_that_reads_codes_is_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: type[Emulated]
) -> None:
    emulated, launched = kernel(0), []
    alone = triton_prefill.attend_prefill
    monkeypatch.setattr(gluon_prefill, "coded_kernel", emulated)
    monkeypatch.setattr(triton_prefill, "attend_prefill", lambda *x: launched.append(x) or alone(*x))
    attend = gluon_prefill.CheckedPrefill()
    layout = PageLayout(get_format("kv2-plain", sinks=5, recent=12), 64)
    past = history(150, 1, 2, 64, dtype=torch.float32)
    for held, size, launches, checks in ((0, 20, 0, 0), (130, 20, 1, 1), (100, 50, 2, 1)):
        paged = Paged(layout, 1, [150], "chunk", calibrate=calibrated)
        q, inputs, wide = appended(paged, [past.part(0, held + size)], [size])
        found = attend(q, wide, PagedLayers.of([paged.cache]), inputs, 0.125)
        assert relative_error(found, attend_reference(q, wide.by_sequence, paged.cache, inputs, 0.125)) <= 2e-3
        if kernel is Emulated:
            assert (emulated.launches, len(launched)) == (launches, checks)
    assert emulated.launches == (2 if kernel is Emulated else 1)
    assert ["differs by" in record.message for record in caplog.records] == [True] * (kernel is Wrong)


def test_numbers_that_are_not_finite_say_nothing_of_a_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gluon_prefill, "coded_kernel", Emulated(0))
    layout = PageLayout(get_format("kv2-plain", sinks=5, recent=12), 64)
    paged = Paged(layout, 1, [150], "chunk", calibrate=calibrated)
    q, inputs, wide = appended(paged, [history(150, 1, 2, 64, dtype=torch.float32)], [20])
    attend = gluon_prefill.CheckedPrefill()
    q[0, 0, 0] = torch.nan
    assert not bool(attend(q, wide, PagedLayers.of([paged.cache]), inputs, 0.125).isfinite().all())
    assert attend._trusted is None
    assert not caplog.records
