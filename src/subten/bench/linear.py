"""Linear layers of a decode step in one launch: checked, then timed, beside torch's products of the same size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.bench.checks import ALLOWED_16_BIT, ALLOWED_FP8, attempt, require
from subten.bench.comparing import compared
from subten.bench.linear_cases import Layer, LinearCase, LinearInputs, build_inputs, empty_weights, random_weights
from subten.bench.linear_report import LinearRow
from subten.bench.machine import Machine
from subten.bench.processes import in_processes
from subten.bench.timing import REPLAYS, Call, Timer, Timing, time_calls
from subten.checkpoints.fp8 import quantise_channels
from subten.errors import KernelUnavailableError
from subten.kernels.linear.inputs import LinearWeights
from subten.kernels.linear.plan import LinearShape, LinearTuning, gluon_refusal
from subten.kernels.linear.triton_linear import DecodeKernel

ALLOWED = 4e-3
"""Relative error. Rounding a result to bf16 costs 1.7e-3, and so does rounding tokens behind the weight of a norm."""
TORCH_BF16, TORCH_FP8 = "torch linear bf16", "torch scaled_mm fp8 (tokens in FP8 beforehand)"


@dataclass(frozen=True)
class Exact:
    """What a layer gives in float64.

    Attributes:
        result: [tokens, outputs].
        normed: [tokens, inputs], the tokens after the norm.
        product: [tokens, outputs], without norm and residual: what peers compute.
    """

    result: Tensor
    normed: Tensor
    product: Tensor


@dataclass
class LinearBench:
    """Measures case after case; the copies of a layer are kept for the cases that follow.

    Attributes:
        machine: where it runs.
        device: likewise.
        replays: of a graph.
        timer: of calls that are right, given the number of replays.
    """

    machine: Machine
    device: torch.device
    replays: int = REPLAYS
    timer: Timer = time_calls
    _held: tuple[Layer, str] | None = None
    _copies: list[LinearWeights] = field(default_factory=list)

    @torch.inference_mode()
    def rows(self, case: LinearCase, kernels: Sequence[str]) -> Iterator[LinearRow]:
        """All rows of one case, as they come."""
        copies = build_inputs(case, self._weights(case), self.device)
        exact = reference(copies[0])
        times, reasons = self._measure_peers(copies, exact.product)
        for kernel in kernels:
            found, reason = attempt(partial(self._measure, case, kernel, copies, exact))
            timing, error = found or (None, None)
            notes = [*([reason] if reason else []), *reasons]
            yield make_row(
                case, kernel, copies[0].nbytes, timing, error, times, "; ".join(notes) or None, self.machine
            )

    def _weights(self, case: LinearCase) -> Sequence[LinearWeights]:
        if self._held != (case.layer, case.weights):
            self._copies.clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._copies += random_weights(case.layer, case.weights, self.machine.l2_bytes, self.device)
            self._held = case.layer, case.weights
        return self._copies

    def _measure(
        self, case: LinearCase, kernel: str, copies: Sequence[LinearInputs], exact: Exact
    ) -> tuple[Timing, float]:
        first, calls = copies[0], kernel_calls(case, kernel, copies, self.machine.num_sms)
        written = [(first.out, exact.result), *([] if first.normed is None else [(first.normed, exact.normed)])]
        for found, _ in written:
            found.fill_(torch.nan)
        calls[0]()
        error = require(written, ALLOWED)
        return self.timer(calls, self.replays), error

    def _measure_peers(self, copies: Sequence[LinearInputs], product: Tensor) -> tuple[dict[str, float], list[str]]:
        """Microseconds by name, and why others are not there."""
        candidates: dict[str, tuple[Callable[[LinearInputs], Call], float]] = {
            TORCH_BF16: (_torch_bf16, ALLOWED_16_BIT)
        }
        if copies[0].weights.scale is not None:
            candidates[TORCH_FP8] = _torch_fp8, ALLOWED_FP8
        times, reasons = {}, []
        for name, (peer, allowed) in candidates.items():

            def measure(
                peer: Callable[[LinearInputs], Call] = peer, allowed: float = allowed
            ) -> tuple[Timing, float]:
                calls = [peer(one) for one in copies]
                result = calls[0]()
                assert isinstance(result, Tensor)
                error = require([(result, product)], allowed)
                return self.timer(calls, self.replays), error

            found, reason = attempt(measure)
            if found is not None:
                times[name] = found[0].us
            else:
                reasons.append(f"{name}: {reason}")
        return times, reasons


def load_kernel(name: str) -> DecodeKernel:
    """By its name in the registry."""
    kernel: DecodeKernel = getattr(import_module(f"subten.kernels.linear.{name}_linear"), name.upper())
    return kernel


def kernel_calls(case: LinearCase, name: str, copies: Sequence[LinearInputs], num_sms: int) -> list[Call]:
    """What is timed of a kernel, with the tiles that it has for such a layer.

    Raises:
        KernelUnavailableError: it does not take the layer.
    """
    kernel, first = load_kernel(name), copies[0]
    reason = gluon_refusal(first.x, first.weights) if name == "gluon" else None
    if reason is not None:
        raise KernelUnavailableError(f"the gluon kernel does not serve this layer: {reason}")
    tuning = _tuning(case, kernel, num_sms)
    return [
        partial(
            kernel.decode,
            one.x,
            one.weights,
            one.out,
            tuning,
            norm=one.norm,
            normed=one.normed,
            residual=one.residual,
        )
        for one in copies
    ]


def _tuning(case: LinearCase, kernel: DecodeKernel, num_sms: int) -> LinearTuning:
    layer, itemsize = case.layer, 2 if case.weights == "bf16" else 1
    return kernel.tune(LinearShape(layer.inputs, layer.outputs, itemsize), case.tokens, num_sms)


def reference(inputs: LinearInputs) -> Exact:
    """In float64, of weights as they are stored."""
    x, weight = inputs.x.double(), inputs.weights.weight.double()
    if inputs.weights.scale is not None:
        weight *= inputs.weights.scale.double()[:, None]
    normed, product = x, x @ weight.T
    result = product
    if inputs.norm is not None:
        normed = x / (x.square().mean(1, keepdim=True) + inputs.norm.eps).sqrt() * inputs.norm.weight.double()
        result = normed @ weight.T
    if inputs.residual is not None:
        result = result + inputs.residual.double()
    return Exact(result, normed, product)


def make_row(
    case: LinearCase,
    kernel: str,
    nbytes: int,
    timing: Timing | None,
    error: float | None,
    peers: Mapping[str, float],
    note: str | None,
    machine: Machine,
) -> LinearRow:
    """A measurement with everything that follows from it."""
    return LinearRow(
        layer=case.layer.name,
        outputs=case.layer.outputs,
        inputs=case.layer.inputs,
        tokens=case.tokens,
        weights=case.weights,
        kernel=kernel,
        error=error,
        note=note,
        **compared(timing, nbytes, peers, machine),
    )


# --- torch ---------------------------------------------------------------------------------------------------------


def _torch_bf16(inputs: LinearInputs) -> Call:
    """The product alone; weights in FP8 are restored before, not in the call."""
    return partial(F.linear, inputs.x, inputs.weights.wide(inputs.x.dtype))


def _torch_fp8(inputs: LinearInputs) -> Call:
    """The product alone, of weights and tokens in FP8 with a scale for each row; tokens were rounded before."""
    weights = inputs.weights
    assert weights.scale is not None
    codes, scale = quantise_channels(inputs.x)
    return partial(
        torch._scaled_mm,
        codes,
        weights.weight.T,
        scale_a=scale,
        scale_b=weights.scale[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


# --- compiling ahead -----------------------------------------------------------------------------------------------


def compile_linear_ahead(cases: Sequence[LinearCase], kernels: Sequence[str], num_sms: int) -> str:
    """Launch what differs in more than its number of tokens once, in processes of their own; see `in_processes`."""
    distinct = {
        (case.layer, case.weights, name, _tuning(case, load_kernel(name), num_sms)): partial(
            _launch, case, name, num_sms
        )
        for case in cases
        for name in kernels
    }
    return in_processes(list(distinct.values()))


def _launch(case: LinearCase, kernel: str, num_sms: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies = build_inputs(case, [empty_weights(case.layer, case.weights, device)], device)
    for call in kernel_calls(case, kernel, copies, num_sms):
        call()
    torch.cuda.synchronize()
