"""The benchmark's own flow without a GPU: a kernel's stand-in in plain torch, and one that is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from subten.bench import attention
from subten.bench.append import LAYERS, measure_append
from subten.bench.attention import AttentionBench, Variant, Wanted, variants
from subten.bench.caches import Calibration, random_calibration
from subten.bench.kernels import DecodeKernel, is_for
from subten.bench.peers import Peers, PeerTime
from subten.bench.shapes import Case, Shape
from subten.bench.timing import Timing
from subten.errors import CacheMemoryError, KernelUnavailableError
from subten.formats import PageLayout, get_format
from subten.formats.codec import decode_keys, decode_values
from subten.kernels.attention.cost import attention_bytes
from subten.kernels.attention.triton_append import DecodeQuery, append_decode
from support.kv import CPU

SHAPE = Shape(2, 1, 2, 64)
CASE = Case(SHAPE, 300)
KV2, FP8 = get_format("kv2"), get_format("fp8")
PEERS = Peers(
    PeerTime("cudnn", Timing(16.0, 15.0, 17.0, 25)),
    PeerTime("fa3", None, "not given"),
    PeerTime("fa3 fp8", None, None),
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the interpreter divides 0 by 0


class Kernel:
    """`attend_decode` by the book: scores of what `append_decode` left, softmax, values back from coded space."""

    def __init__(self, calibration: Calibration, factor: float = 1.0) -> None:
        self.calibration, self.factor = calibration, factor
        self.calls = 0

    def prepare_decode(self, *_) -> tuple[None, None]:
        return None, None

    def attend_decode(self, query: DecodeQuery, layer, inputs, scale, plan, scratch) -> Tensor:
        self.calls += 1
        rows = [self._sequence(query, layer, inputs, row, scale) for row in range(len(query.q))]
        return torch.stack(rows).to(query.q.dtype) * self.factor

    def _sequence(self, query: DecodeQuery, layer, inputs, row: int, scale: float) -> Tensor:
        layout, tables = layer.layout, layer.tables
        fmt, length = layout.format, int(inputs.context_len[row]) + 1
        coded = fmt.coded_tokens(length)
        heads = layer.pages.shape[2]

        def by_head(x: Tensor) -> Tensor:
            return x[row].float().unflatten(0, (heads, -1))

        records = layer.pages[0, inputs.block_table[row].long()].transpose(0, 1)
        keys, values = decode_keys(records, layout), decode_values(records, layout)[:, :coded]
        q, through = by_head(query.q), by_head(query.q if query.coded is None else query.coded)
        scores = through @ keys.coded[:, :coded].transpose(1, 2)
        if keys.kept.shape[-1]:
            scores = scores + by_head(query.kept) @ keys.kept[:, :coded].transpose(1, 2)
        if tables.mean is not None:
            mean = self.calibration.mean_key.at(fmt.sinks + torch.arange(coded))
            scores = scores + q @ mean.permute(1, 2, 0)
        wide = [*range(min(length, fmt.sinks)), *range(fmt.sinks + coded, length)]
        slots = [p if p < fmt.sinks else fmt.sinks + (p - fmt.sinks) % fmt.ring_size for p in wide]
        window_k, window_v = layer.windows[0, row, :, :, slots].float()
        weights = (torch.cat([scores, q @ window_k.transpose(1, 2)], -1) * scale).softmax(-1)
        out = weights[..., :coded] @ values
        if self.calibration.coding.value is not None:
            out = out @ self.calibration.coding.value.from_coded
        return (out + weights[..., coded:] @ window_v).flatten(0, 1)


@pytest.fixture
def bench(machine, timer, monkeypatch: pytest.MonkeyPatch):
    """A benchmark whose kernels are these modules by name."""
    calibration = random_calibration(KV2, SHAPE, 1000, CPU)
    monkeypatch.setattr(attention, "random_calibration", lambda fmt, *_: calibration if fmt == KV2 else _plain(fmt))
    monkeypatch.setattr(attention, "measure_peers", lambda *_, **__: PEERS)
    monkeypatch.setattr(attention, "_RAGGED", (1, 193, 260))

    def made(**modules) -> AttentionBench:
        def load(name: str) -> DecodeKernel:
            if name not in modules:
                raise KernelUnavailableError(f"the {name} kernel can't be loaded here: not there")
            return DecodeKernel(name, modules[name])

        return AttentionBench(machine, CPU, with_fa3=False, append=append_decode, load=load, timer=timer)

    return SimpleNamespace(made=made, calibration=calibration, counts=timer.counts)


def _plain(fmt) -> Calibration:
    return random_calibration(fmt, SHAPE, 1000, CPU)


def test_a_right_kernel_is_timed_over_all_copies(bench) -> None:
    kernel = Kernel(bench.calibration)
    rows = list(bench.made(triton=kernel).rows(CASE, Wanted([KV2], ["triton"], [False, True])))
    assert [(row.format, row.kernel, row.mean_key) for row in rows] == [("kv2", "triton", m) for m in (False, True)]
    nbytes = attention_bytes(PageLayout(KV2, 64), 2, 1, 2, 300)
    row = rows[0]
    assert row.case == CASE
    assert (row.us, row.us_p10, row.us_p90) == (8.0, 7.0, 9.0)
    assert (row.baseline_us, row.baseline, row.ratio) == (16.0, "cudnn", 2.0)
    assert row.bytes == nbytes
    assert row.tb_per_s == pytest.approx(nbytes / 8e6)
    assert row.read_share == pytest.approx(nbytes / 8e6 / 2.0)
    assert row.error is not None
    assert 0 < row.error < 2e-3
    assert row.note == "fa3: not given"
    layer = 2 * (2 * 4608 // 2 + 192 * 2 * 64 * 2)
    assert bench.counts == [-(-2 * 2**18 // layer)] * 2


def test_a_wrong_kernel_has_no_time_and_is_not_tried_again(bench) -> None:
    kernel = Kernel(bench.calibration, factor=1.01)
    made = bench.made(triton=kernel)
    rows = [row for _ in range(2) for row in made.rows(CASE, Wanted([KV2], ["triton"], [True]))]
    assert [row.us for row in rows] == [None, None]
    assert [row.ratio for row in rows] == [None, None]
    assert "against the torch reference; 2e-03 is allowed" in rows[0].note
    assert "failed its check before" in rows[1].note
    assert bench.counts == []
    assert kernel.calls == 1


def test_a_kernel_that_is_not_there_or_breaks_leaves_the_others_alone(bench) -> None:
    class Broken:
        @staticmethod
        def prepare_decode(*_) -> tuple[None, None]:
            return None, None

        @staticmethod
        def attend_decode(*_) -> Tensor:
            raise IndexError("beyond\nand a trace")

    wanted = Wanted([KV2], ["gluon", "triton"], [False])
    missing, right = bench.made(triton=Kernel(bench.calibration)).rows(CASE, wanted)
    assert "the gluon kernel can't be loaded here" in missing.note
    assert right.us == 8.0
    broken, right = bench.made(triton=Kernel(bench.calibration), gluon=Broken()).rows(CASE, wanted)
    assert broken.us is None
    assert "IndexError: beyond;" in broken.note
    assert right.us == 8.0


def test_a_device_that_is_lost_ends_the_run(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Broken:
        @staticmethod
        def prepare_decode(*_) -> tuple[None, None]:
            return None, None

        @staticmethod
        def attend_decode(*_) -> Tensor:
            lost()

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(KernelUnavailableError, match="the device stopped working: CUDA error"):
        list(bench.made(triton=Broken()).rows(CASE, Wanted([KV2], ["triton"], [False])))


def test_what_a_kernel_prepares_is_made_once_and_given_to_every_call(bench) -> None:
    class Prepared(Kernel):
        prepared = 0

        def prepare_decode(self, query, layer, max_pages) -> tuple[str, str]:
            self.prepared += 1
            return "plan", "scratch"

        def attend_decode(self, query, layer, inputs, scale, plan, scratch) -> Tensor:
            assert (plan, scratch) == ("plan", "scratch")
            return super().attend_decode(query, layer, inputs, scale, plan, scratch)

    kernel = Prepared(bench.calibration)
    (row,) = bench.made(triton=kernel).rows(CASE, Wanted([KV2], ["triton"], [False]))
    assert row.us == 8.0
    assert kernel.prepared == 2  # for the short sequences, and for the case
    assert kernel.calls == 3


def test_a_format_without_window_and_mean_key(bench) -> None:
    kernel = Kernel(_plain(FP8))
    (row,) = bench.made(triton=kernel).rows(CASE, Wanted([FP8], ["triton", "gluon"], [False, True]))
    assert (row.format, row.mean_key, row.us) == ("fp8", False, 8.0)


def test_variants() -> None:
    both = Wanted([KV2, FP8], ["triton", "gluon"], [False, True])
    assert variants(KV2, both) == [Variant(KV2, k, m) for m in (False, True) for k in ("triton", "gluon")]
    assert variants(FP8, both) == [Variant(FP8, "triton", False)]
    assert variants(FP8, Wanted([FP8], ["triton"], [True])) == [Variant(FP8, "triton", False)]


def test_the_gluon_kernel_is_for_packed_codes_of_two_bits() -> None:
    names = ("kv2", "kv2-plain", "kv4", "k4v2", "fp8", "bf16")
    assert [name for name in names if is_for("gluon", get_format(name))] == ["kv2", "kv2-plain"]
    assert all(is_for("triton", get_format(name)) for name in names)


def test_kv_append_is_checked_and_timed_per_layer(machine, timer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subten.bench.append.LAYERS", 2)
    row = measure_append(KV2, Shape(1, 1, 2, 64), CPU, timer=timer)
    assert row.note is None
    assert (row.append_us, row.encode_us, row.us) == (8.0, 8.0, 12.0)
    assert timer.counts == [2, 1]
    assert 0 <= row.error < 0.1
    assert LAYERS == 32


def test_kv_append_that_codes_nothing_has_no_time(timer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subten.bench.append.LAYERS", 1)
    monkeypatch.setattr("subten.kernels.attention.triton_encode.encode_leaving", lambda *_: None)
    row = measure_append(KV2, Shape(1, 1, 2, 64), CPU, timer=timer)
    assert row.us is None
    assert "relative error" in row.note
    assert timer.counts == []


def test_a_cache_that_does_not_fit_has_no_figure(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_) -> None:
        raise CacheMemoryError("a cache of 200 GiB could not be allocated")

    monkeypatch.setattr(attention, "build_cache", full)
    rows = list(bench.made().rows(CASE, Wanted([KV2], ["triton", "gluon"], [True])))
    assert [row.us for row in rows] == [None, None]
    assert all("200 GiB" in row.note for row in rows)
    assert rows[0].baseline_us == 16.0
