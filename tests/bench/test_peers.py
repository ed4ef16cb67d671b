"""Peers without a GPU: torch's CPU attention, and operators with the schema of vLLM 0.20.2's library."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subten.bench.peers import (
    PlainCache,
    best_16_bit,
    fa3_decode,
    flash_attention_3,
    load_flash_attention_3,
    measure_peers,
)
from subten.bench.shapes import Case, Shape
from subten.errors import KernelUnavailableError, StorageError
from support.kv import CPU

CASE = Case(Shape(2, 2, 3, 64), 70)
FP8 = torch.float8_e4m3fn

# Read off the library with `strings`.
FWD = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,
Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,
Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux,
int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
SCHEDULE = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads,
int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q,
Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size,
int max_seqlen_k_new, bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits,
bool? pack_gqa, int sm_margin) -> Tensor"""


@pytest.fixture
def fa3() -> Iterator[None]:
    """The library's operators, computed by torch. They take what the schema says and nothing else."""

    def schedule(batch_size, *_) -> Tensor:
        return torch.arange(batch_size)

    def fwd(q, k, v, _k, _v, _qv, out, cu_q, *rest) -> list[Tensor]:
        seqused_k, scale, metadata = rest[3], rest[15], rest[21]
        assert torch.equal(cu_q, torch.arange(len(q) + 1))
        assert seqused_k.tolist() == [k.shape[1]] * len(q)
        assert torch.equal(metadata, torch.arange(len(q)))
        keys, values = k.float().transpose(1, 2), v.float().transpose(1, 2)
        result = F.scaled_dot_product_attention(q.float()[:, :, None], keys, values, scale=scale, enable_gqa=True)
        out.copy_(result[:, :, 0])
        return [torch.empty(0)]

    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(" ".join(FWD.split()))
    library.define(" ".join(SCHEDULE.split()))
    library.impl("fwd", fwd, "CPU")
    library.impl("get_scheduler_metadata", schedule, "CPU")
    yield
    library._destroy()


def test_the_fastest_16_bit_attention_that_is_right_is_the_baseline(timer) -> None:
    peer = best_16_bit(PlainCache.random(CASE, torch.bfloat16, CPU))
    # Of the backends asked for a CPU has one.
    assert re.fullmatch(r"flash (rows|gqa) token-major", peer.name)
    assert peer.us == 8.0


def test_a_wrong_16_bit_attention_is_no_baseline(timer, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **named: attention(*args, **named) * 1.1)
    peer = best_16_bit(PlainCache.random(CASE, torch.bfloat16, CPU))
    assert peer.us is None
    assert "flash rows token-major: relative error 1.0e-01" in peer.reason
    assert timer.counts == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_flash_attention_3_is_called_as_its_schema_says(dtype: torch.dtype, fa3, timer) -> None:
    cache = PlainCache.random(CASE, dtype, CPU)
    scale = 1 / math.sqrt(64)
    result = fa3_decode(cache, scale)(1)
    q, k, v = (x[1].float().transpose(1, 2) for x in (cache.q[:, :, None], cache.k, cache.v))
    expected = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)[:, :, 0]
    torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=1e-2)
    peer = flash_attention_3(cache)
    assert (peer.name, peer.us) == ("fa3" if dtype == torch.bfloat16 else "fa3 fp8", 8.0)


def test_absent_peers_are_said_to_be_absent(timer) -> None:
    peers = measure_peers(CASE, CPU, with_fa3=False)
    assert peers.torch_16_bit.us == 8.0
    for peer in (peers.fa3, peers.fa3_fp8):
        assert peer.us is None
        assert peer.reason == "not given with --fa3"


def test_all_peers(fa3, timer) -> None:
    peers = measure_peers(CASE, CPU, with_fa3=True)
    assert [peer.us for peer in (peers.torch_16_bit, peers.fa3, peers.fa3_fp8)] == [8.0, 8.0, 8.0]


def test_a_peer_that_refuses_a_shape_says_why(fa3, timer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_) -> None:
        raise RuntimeError("This build only serves head_dim 128\nException raised from ...")

    monkeypatch.setattr("subten.bench.peers.fa3_decode", refused)
    peer = flash_attention_3(PlainCache.random(CASE, torch.bfloat16, CPU))
    assert peer.us is None
    assert peer.reason == "This build only serves head_dim 128"


def test_what_does_not_fit_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_) -> PlainCache:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(PlainCache, "random", full)
    assert measure_peers(CASE, CPU, with_fa3=True).torch_16_bit.reason == "does not fit into the device's memory"


def test_a_folder_without_the_library(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"has no _vllm_fa3_C\*\.so"):
        load_flash_attention_3(tmp_path)


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "_vllm_fa3_C.abi3.so").write_bytes(b"no library")
    with pytest.raises(KernelUnavailableError, match="does not load into torch"):
        load_flash_attention_3(tmp_path)
