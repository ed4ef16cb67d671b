"""Mixtures of experts: checked, then timed, beside the unfused pipeline and whatever else is given."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from subten.bench.checks import ALLOWED_16_BIT, ALLOWED_FP8, attempt, require
from subten.bench.comparing import compared
from subten.bench.machine import Machine, first_line
from subten.bench.moe_cases import (
    DEMO,
    MoECase,
    MoEProblem,
    build_problem,
    demo_problem,
    empty_block,
    geometry_of,
    random_layers,
)
from subten.bench.moe_kernels import (
    Kernel,
    Plan,
    Variant,
    compile_launch,
    cut_copy,
    gluon_serves,
    make_plan,
    module_of,
    read_plan,
)
from subten.bench.moe_report import MoERow
from subten.bench.processes import in_processes
from subten.bench.timing import REPLAYS, Call, Timer, Timing, time_calls
from subten.bench.unfused_fp8 import moe_unfused_fp8
from subten.errors import StorageError
from subten.kernels.launches import in_launches
from subten.kernels.moe import Experts, MoEWeights
from subten.kernels.moe.packing import EVERY, wide_down, wide_gate_up
from subten.kernels.moe.plan import Activations, MoEShape
from subten.kernels.moe.router import route
from subten.kernels.moe.unfused import moe_unfused

EXACT = 2e-3
ALLOWED: Mapping[Activations, float] = {"16bit": EXACT, "fp8x2": EXACT, "fp8": 6e-2}
"""Relative error, the result in float32."""
UNFUSED = "unfused bf16"

Peer = Callable[[MoEWeights, Tensor, Tensor], Call]
"""(weights, tokens, logits) to a call that returns the output [tokens, hidden]."""


@dataclass(frozen=True)
class Tuned:
    """What tools/tune_moe.py found fastest, by shape, kind of weights and variant, for some numbers of tokens."""

    found: Mapping[tuple[str, str, Variant], Mapping[int, Plan]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Tuned:
        """From a file that the tool wrote.

        Raises:
            StorageError: it is none.
        """
        found: dict[tuple[str, str, Variant], dict[int, Plan]] = {}
        try:
            rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["moe"] if row["us"] is not None]
            for row in sorted(rows, key=lambda row: -float(row["us"])):
                case, variant = MoECase(**row["case"]), Variant(**row["variant"])
                of_shape = found.setdefault((case.shape, case.weights, variant), {})
                of_shape[case.tokens] = read_plan(variant.kernel, row["plan"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path} is no file of tools/tune_moe.py: {first_line(error)}") from error
        return cls(found)

    def plan(self, case: MoECase, variant: Variant, shape: MoEShape, num_sms: int) -> Plan:
        """Of a launch: what was found, what follows from the tiles for nearly as many tokens, or the default."""
        of_shape, count = self.found.get((case.shape, case.weights, variant), {}), case.launch_tokens
        if count in of_shape:
            return of_shape[count]
        nearest = min(of_shape, key=lambda tokens: abs(math.log2(tokens / count)), default=None)
        tuning = None if nearest is None else of_shape[nearest].tuning
        return make_plan(variant, shape, count, num_sms, tuning)


def load_peer(path: Path) -> tuple[str, Peer]:
    """Another implementation, from a Python file with `NAME` and `peer(weights, tokens, logits)`, see `Peer`.

    Raises:
        StorageError: the file can't be run, or lacks one of them.
    """
    try:
        names = runpy.run_path(str(path))
        return names["NAME"], names["peer"]
    except Exception as error:  # whatever the file raises: it is not ours
        raise StorageError(f"{path} is no peer: {type(error).__name__}: {first_line(error)}") from error


@dataclass
class MoEBench:
    """Measures case after case; the layers of a shape, and their copies with down projections cut, are kept for the
    cases that follow.

    Attributes:
        machine: where it runs.
        device: likewise.
        peers: to be measured beside the unfused pipeline, by name.
        replays: of a graph.
        tuned: plans that are not the default ones.
        timer: of calls that are right, given the number of replays.
    """

    machine: Machine
    device: torch.device
    peers: Mapping[str, Peer] = field(default_factory=dict)
    replays: int = REPLAYS
    tuned: Tuned = field(default_factory=Tuned)
    timer: Timer = time_calls
    _held: tuple[str, str] | None = None
    _layers: list[MoEWeights] = field(default_factory=list)
    _cut: list[MoEWeights] = field(default_factory=list)

    @torch.inference_mode()
    def rows(self, case: MoECase, wanted: Sequence[Variant]) -> Iterator[MoERow]:
        """All rows of one case, as they come."""
        problem = self._problem(case)
        exact = reference(problem.layers[0], problem.x[0], problem.logits[0])
        times, reasons = self._measure_peers(case, problem, exact)
        for variant in wanted:
            found, reason = attempt(partial(self._measure, case, variant, problem, exact))
            timing, error = found or (None, None)
            notes = [*([reason] if reason else []), *reasons]
            yield make_row(case, variant, problem, timing, error, times, "; ".join(notes) or None, self.machine)

    def _problem(self, case: MoECase) -> MoEProblem:
        if case.shape == DEMO:
            return demo_problem(case.tokens, self.machine.l2_bytes, self.device)
        if self._held != (case.shape, case.weights):
            self._layers.clear()
            self._cut.clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._layers += random_layers(case.shape, case.weights, self.machine.l2_bytes, self.device)
            self._held = case.shape, case.weights
        return build_problem(case, self._layers, self.device)

    def _layers_for(self, case: MoECase, kernel: Kernel, problem: MoEProblem) -> Sequence[MoEWeights]:
        """Where the Gluon kernel serves few tokens, prompts find experts as it takes them."""
        if kernel == "triton" or (kernel == "unfused" and not gluon_serves(case.shape)):
            return problem.layers
        if not self._cut:
            self._cut += map(cut_copy, problem.layers)
        return self._cut

    def _measure(self, case: MoECase, variant: Variant, problem: MoEProblem, exact: Tensor) -> tuple[Timing, float]:
        layers = self._layers_for(case, variant.kernel, problem)
        inputs = list(zip(problem.x, layers, problem.logits, strict=True))
        calls: list[Call]
        if variant.kernel == "unfused":
            calls = [partial(moe_unfused, x, weights, logits=logits) for x, weights, logits in inputs]
            result, allowed = moe_unfused(problem.x[0], layers[0], logits=problem.logits[0]), ALLOWED_16_BIT
        else:
            decode = self._decode(case, variant, MoEShape.of(layers[0]))
            calls = [partial(decode, *one) for one in inputs]
            result = torch.full(exact.shape, torch.nan, dtype=torch.float32, device=self.device)
            decode(*inputs[0], result)
            allowed = ALLOWED[variant.activations]
        error = require([(result, exact)], allowed)
        return self.timer(calls, self.replays), error

    def _decode(self, case: MoECase, variant: Variant, shape: MoEShape) -> Callable[..., Tensor]:
        """One launch, or of a prompt one for 64 tokens: (tokens, weights, logits, where to leave the result)."""
        from subten.kernels.moe.triton_decode import MoEScratch

        moe_decode = module_of(variant.kernel).moe_decode
        plan = self.tuned.plan(case, variant, shape, self.machine.num_sms)
        if self.device.type == "cpu":
            plan = replace(plan, finishers=1)  # The interpreter runs programs one after the other.
        scratch = MoEScratch.allocate(plan, shape.hidden, self.device)

        def decode(x: Tensor, weights: MoEWeights, logits: Tensor, out: Tensor | None = None) -> Tensor:
            def launch(some: slice) -> Tensor:
                onto = None if out is None else out[some]
                result: Tensor = moe_decode(x[some], weights, plan, scratch, logits=logits[some], out=onto)
                return result

            return in_launches(launch, len(x))

        return decode

    def _measure_peers(self, case: MoECase, problem: MoEProblem, exact: Tensor) -> tuple[dict[str, float], list[str]]:
        """Microseconds by name, and why others are not there."""
        candidates: dict[str, Peer] = {UNFUSED: _unfused, **self.peers}
        if case.weights == "channel":
            candidates["unfused fp8"] = _unfused_fp8
        times, reasons = {}, []
        for name, peer in candidates.items():

            def measure(peer: Peer = peer) -> tuple[Timing, float]:
                calls = [peer(*one) for one in zip(problem.layers, problem.x, problem.logits, strict=True)]
                result = calls[0]()
                assert isinstance(result, Tensor)
                return self.timer(calls, self.replays), require([(result, exact)], ALLOWED_FP8)

            found, reason = attempt(measure)
            if found is not None:
                times[name] = found[0].us
            else:
                reasons.append(f"{name}: {reason}")
        return times, reasons


def reference(weights: MoEWeights, x: Tensor, logits: Tensor) -> Tensor:
    """The block's output in float64, of its weights as they are stored."""
    rule, x = weights.rule, x.double()
    chosen, shares = route(logits[:, : rule.num_experts].double(), rule, weights.correction)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        out.index_add_(0, tokens, shares[tokens, places, None] * _one_expert(x[tokens], weights.experts, expert))
    if weights.shared is not None:
        share = torch.ones_like(out[:, :1])
        if weights.shared.gate is not None:
            share = torch.sigmoid(logits[:, rule.num_experts :].double())
        out += share * _one_expert(x, weights.shared.expert, 0)
    return out


def _one_expert(x: Tensor, experts: Experts, expert: int) -> Tensor:
    which = slice(expert, expert + 1)
    gate, up = (x @ wide_gate_up(experts, which, torch.float64)[0].T).chunk(2, 1)
    return (F.silu(gate) * up) @ wide_down(experts, which, torch.float64)[0].T


def make_row(
    case: MoECase,
    variant: Variant,
    problem: MoEProblem,
    timing: Timing | None,
    error: float | None,
    peers: Mapping[str, float],
    note: str | None,
    machine: Machine,
) -> MoERow:
    """A measurement with everything that follows from it."""
    return MoERow(
        shape=case.shape,
        tokens=case.tokens,
        weights=case.weights,
        kernel=variant.kernel,
        activations=variant.activations,
        sums=variant.sums,
        distinct_experts=problem.distinct_experts,
        error=error,
        note=note,
        **compared(timing, problem.nbytes, peers, machine),
    )


# --- the unfused pipeline ----------------------------------------------------------------------------------------


def _unfused(weights: MoEWeights, x: Tensor, logits: Tensor) -> Call:
    """In 16 bit; weights in FP8 are restored before, not in the call."""
    shared = weights.shared and replace(
        weights.shared,
        gate_up=wide_gate_up(weights.shared.expert, EVERY, x.dtype)[0],
        down=wide_down(weights.shared.expert, EVERY, x.dtype)[0],
        gate_up_scale=None,
        down_scale=None,
    )
    wide = replace(
        weights,
        gate_up=wide_gate_up(weights.experts, EVERY, x.dtype),
        down=wide_down(weights.experts, EVERY, x.dtype),
        gate_up_scale=None,
        down_scale=None,
        shared=shared,
    )
    return partial(moe_unfused, x, wide, logits=logits[:, : weights.rule.num_experts])


def _unfused_fp8(weights: MoEWeights, x: Tensor, logits: Tensor) -> Call:
    """In FP8 throughout."""
    return partial(moe_unfused_fp8, x, weights, logits=logits)


# --- compiling ahead ---------------------------------------------------------------------------------------------


def compile_moe_ahead(
    tasks: Sequence[tuple[MoECase, Plan]],
    outputs: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    seconds: float | None = None,
) -> str:
    """Compile every plan for outputs of these types in processes of their own, as many as are done in so many
    seconds; what came of it, as a line for people. Failures are not told here: the measurement meets them again."""
    return in_processes([partial(_compile, case, plan, outputs) for case, plan in tasks], seconds)


def _compile(case: MoECase, plan: Plan, outputs: Sequence[torch.dtype]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    compile_launch(_like(case, device), case.tokens, plan, outputs)


def shape_of(case: MoECase) -> MoEShape:
    """Of a case's weights."""
    return MoEShape.of(_like(case, torch.device("meta")))


def _like(case: MoECase, device: torch.device) -> MoEWeights:
    """Weights as a case has them, but left as memory is."""
    return empty_block(geometry_of(case.shape), case.weights, device)
