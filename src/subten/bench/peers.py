"""What attention costs without codes: torch's own kernels in 16 bit, and FlashAttention-3 in 16 bit and FP8.

FlashAttention-3 comes as a library of operators for torch, `_vllm_fa3_C`, inside the wheels of vLLM
(docs/benchmarks/README.md says how to get it out of one). It is called as vLLM calls it for a decode step, over a
contiguous cache, with its own choice of splits and the schedule made once beforehand.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from subten.bench.checks import ALLOWED_16_BIT, ALLOWED_FP8, require
from subten.bench.machine import first_line, require_sound_device
from subten.bench.shapes import Case
from subten.bench.timing import REPLAYS, Timing, copies_past, time_calls
from subten.errors import KernelUnavailableError, NumericalError, StorageError

_WIDE = torch.bfloat16
_FP8 = torch.float8_e4m3fn
_RANDOM_ELEMENTS = 1 << 26
_TRIAL_REPLAYS = 5
_INT32_ELEMENTS = 1 << 31
"""The memory-efficient kernel counts elements in 32 bits: of larger tensors it would read beyond the end."""

Attend = Callable[[int], Tensor]
"""Number of a copy to its result, [batch, num_heads, head_dim]."""


@dataclass(frozen=True)
class PeerTime:
    """A kernel and its time, or why there is none."""

    name: str
    timing: Timing | None
    reason: str | None = None

    @property
    def us(self) -> float | None:
        """Median, or None."""
        return None if self.timing is None else self.timing.us


@dataclass(frozen=True)
class PlainCache:
    """Keys and values as they are, of several copies of one layer.

    Attributes:
        case: shape and context.
        q: [copies, batch, num_heads, head_dim].
        k: [copies, batch, context, kv_heads, head_dim].
        v: likewise.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, case: Case, dtype: torch.dtype, device: torch.device) -> PlainCache:
        """Gaussian, repeated every 2^26 elements; copies enough to get past the L2."""
        shape = case.shape
        elements = shape.batch * case.context * shape.kv_heads * shape.head_dim
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
        copies = copies_past(l2_bytes, 2 * elements * dtype.itemsize)
        q = torch.randn(copies, shape.batch, shape.num_heads, shape.head_dim, device=device).to(dtype)
        block = torch.randn(min(_RANDOM_ELEMENTS, 2 * copies * elements), device=device, dtype=_WIDE).to(dtype)
        both = torch.empty(2 * copies * elements, device=device, dtype=dtype)
        for part in both.split(len(block)):
            part.copy_(block[: len(part)])
        k, v = both.view(2, copies, shape.batch, case.context, shape.kv_heads, shape.head_dim)
        return cls(case, q, k, v)

    def expected(self, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attention of the first copy's last sequence in float32, [num_heads, head_dim].

        Args:
            keys: [context, kv_heads, head_dim] of that sequence.
            values: likewise.
            scale: factor of q . k.
        """
        shape = self.case.shape
        q = self.q[0, -1].float().view(shape.kv_heads, shape.group, shape.head_dim)
        scores = torch.einsum("hgd,thd->hgt", q, keys.float()) * scale
        return torch.einsum("hgt,thd->hgd", scores.softmax(-1), values.float()).flatten(0, 1)


# --- torch -----------------------------------------------------------------------------------------------------


def best_16_bit(cache: PlainCache, replays: int = REPLAYS) -> PeerTime:
    """The fastest of torch's scaled dot-product attentions that gives the right result."""
    scale = 1 / math.sqrt(cache.case.shape.head_dim)
    trials: list[tuple[float, str, Attend]] = []
    reasons: list[str] = []
    for name, attend, (keys, values) in _torch_candidates(cache, scale):
        try:
            require([(attend(0)[-1], cache.expected(keys, values, scale))], ALLOWED_16_BIT)
            trials.append((_time(attend, len(cache.k), _TRIAL_REPLAYS).us, name, attend))
        except (RuntimeError, NumericalError) as error:
            require_sound_device(error)
            reasons.append(f"{name}: {first_line(error)}")
    if not trials:
        return PeerTime("torch", None, "; ".join(reasons))
    _, name, attend = min(trials, key=lambda trial: trial[0])
    return PeerTime(name, _time(attend, len(cache.k), replays))


def _torch_candidates(cache: PlainCache, scale: float) -> Iterator[tuple[str, Attend, tuple[Tensor, Tensor]]]:
    """Name, kernel, and the keys and values that it reads for the last sequence of the first copy.

    The random elements serve twice: as [context, kv_heads, head_dim] and as [kv_heads, context, head_dim]. Query
    heads of a group are heads of their own (`gqa`) or queries of one head (`rows`): without a mask, those see the
    same tokens.
    """
    shape, context = cache.case.shape, cache.case.context
    batch, heads, group, head_dim = shape.batch, shape.kv_heads, shape.group, shape.head_dim
    token_major = cache.k.transpose(2, 3), cache.v.transpose(2, 3)
    head_major = tuple(x.view(-1, batch, heads, context, head_dim) for x in (cache.k, cache.v))
    forms = (
        (SDPBackend.CUDNN_ATTENTION, "cudnn", "rows", "token"),
        (SDPBackend.CUDNN_ATTENTION, "cudnn", "rows", "head"),
        (SDPBackend.CUDNN_ATTENTION, "cudnn", "gqa", "token"),
        (SDPBackend.FLASH_ATTENTION, "flash", "rows", "token"),
        (SDPBackend.FLASH_ATTENTION, "flash", "gqa", "token"),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient", "rows", "head"),
    )
    for backend, name, form, order in forms:
        keys, values = token_major if order == "token" else head_major
        if name == "efficient" and keys[0].numel() >= _INT32_ELEMENTS:
            continue

        def attend(
            i: int, backend: SDPBackend = backend, form: str = form, keys: Tensor = keys, values: Tensor = values
        ) -> Tensor:
            rows = (batch, heads, group, head_dim) if form == "rows" else (batch, heads * group, 1, head_dim)
            with sdpa_kernel(backend), warnings.catch_warnings():
                # A backend that does not serve a shape warns, and then raises.
                warnings.simplefilter("ignore")
                out = F.scaled_dot_product_attention(
                    cache.q[i].view(rows), keys[i], values[i], scale=scale, enable_gqa=form == "gqa"
                )
            return out.reshape(batch, heads * group, head_dim)

        yield f"{name} {form} {order}-major", attend, (keys[0, -1].transpose(0, 1), values[0, -1].transpose(0, 1))


# --- FlashAttention-3 ------------------------------------------------------------------------------------------


def load_flash_attention_3(folder: Path) -> None:
    """Make the operators of `_vllm_fa3_C*.so` in a folder known to torch.

    Raises:
        StorageError: there is none.
        KernelUnavailableError: it does not load into this torch.
    """
    libraries = sorted(folder.rglob("_vllm_fa3_C*.so"))
    if not libraries:
        raise StorageError(f"{folder} has no _vllm_fa3_C*.so; --fa3 takes a folder with that library of vLLM's wheel")
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        raise KernelUnavailableError(
            f"{libraries[0]} does not load into torch {torch.__version__}: {first_line(error)}; vLLM's wheels are "
            "each built for one release of torch"
        ) from error


def flash_attention_3(cache: PlainCache, replays: int = REPLAYS) -> PeerTime:
    """Time of FlashAttention-3, its library loaded, on a cache in 16 bit or FP8."""
    name = "fa3 fp8" if cache.k.dtype == _FP8 else "fa3"
    scale = 1 / math.sqrt(cache.case.shape.head_dim)
    allowed = ALLOWED_FP8 if cache.k.dtype == _FP8 else ALLOWED_16_BIT
    try:
        attend = fa3_decode(cache, scale)
        require([(attend(0)[-1], cache.expected(cache.k[0, -1], cache.v[0, -1], scale))], allowed)
        return PeerTime(name, _time(attend, len(cache.k), replays))
    except (RuntimeError, NumericalError) as error:
        require_sound_device(error)
        return PeerTime(name, None, first_line(error))


def fa3_decode(cache: PlainCache, scale: float) -> Attend:
    """The operator with all its arguments, by the names that they have in its schema."""
    ops = torch.ops._vllm_fa3_C
    shape, context, device = cache.case.shape, cache.case.context, cache.q.device
    lengths = torch.full((shape.batch,), context, dtype=torch.int32, device=device)
    query_start = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    descale = torch.ones(shape.batch, shape.kv_heads, device=device) if cache.k.dtype == _FP8 else None
    out = torch.empty(shape.batch, shape.num_heads, shape.head_dim, dtype=_WIDE, device=device)
    everything, own_choice = -1, 0
    schedule = ops.get_scheduler_metadata(
        batch_size=shape.batch,
        max_seqlen_q=1,
        max_seqlen_k=context,
        num_heads=shape.num_heads,
        num_heads_k=shape.kv_heads,
        headdim=shape.head_dim,
        headdim_v=shape.head_dim,
        qkv_dtype=cache.k.dtype,
        seqused_k=lengths,
        cu_seqlens_q=query_start,
        cu_seqlens_k=None,
        cu_seqlens_k_new=None,
        seqused_q=None,
        leftpad_k=None,
        page_size=None,
        max_seqlen_k_new=0,
        is_causal=False,
        window_size_left=everything,
        window_size_right=everything,
        has_softcap=False,
        num_splits=own_choice,
        pack_gqa=None,
        sm_margin=0,
    )

    def attend(i: int) -> Tensor:
        ops.fwd(
            q=cache.q[i],
            k=cache.k[i],
            v=cache.v[i],
            k_new=None,
            v_new=None,
            q_v=None,
            out=out,
            cu_seqlens_q=query_start,
            cu_seqlens_k=None,
            cu_seqlens_k_new=None,
            seqused_q=None,
            seqused_k=lengths,
            max_seqlen_q=1,
            max_seqlen_k=context,
            page_table=None,
            kv_batch_idx=None,
            leftpad_k=None,
            rotary_cos=None,
            rotary_sin=None,
            seqlens_rotary=None,
            q_descale=descale,
            k_descale=descale,
            v_descale=descale,
            softmax_scale=scale,
            is_causal=False,
            window_size_left=everything,
            window_size_right=everything,
            softcap=0.0,
            is_rotary_interleaved=True,
            scheduler_metadata=schedule,
            num_splits=own_choice,
            pack_gqa=None,
            sm_margin=0,
            s_aux=None,
            cp_world_size=1,
            cp_rank=0,
            cp_tot_seqused_k=None,
        )
        return out

    return attend


# --- all of them -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peers:
    """What a row is compared with."""

    torch_16_bit: PeerTime
    fa3: PeerTime
    fa3_fp8: PeerTime


def measure_peers(case: Case, device: torch.device, *, with_fa3: bool, replays: int = REPLAYS) -> Peers:
    """All peers at one shape and context; the ones that are not there say so."""
    absent = "not given with --fa3"
    try:
        cache = PlainCache.random(case, _WIDE, device)
        torch_16_bit = best_16_bit(cache, replays)
        fa3 = flash_attention_3(cache, replays) if with_fa3 else PeerTime("fa3", None, absent)
        del cache
        fa3_fp8 = PeerTime("fa3 fp8", None, absent)
        if with_fa3:
            fa3_fp8 = flash_attention_3(PlainCache.random(case, _FP8, device), replays)
    except torch.OutOfMemoryError:
        reason = "does not fit into the device's memory"
        return Peers(*(PeerTime(name, None, reason) for name in ("torch", "fa3", "fa3 fp8")))
    return Peers(torch_16_bit, fa3, fa3_fp8)


def _time(attend: Attend, copies: int, replays: int) -> Timing:
    return time_calls([lambda i=i: attend(i) for i in range(copies)], replays)  # type: ignore[misc]
