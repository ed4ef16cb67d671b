"""What a run of the benchmark of decode steps is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

from subten.bench import model_shapes
from subten.bench.latency import StepWishes
from subten.bench.latency_cases import BATCHES_TRIED, SHORTEST_CONTEXT, LatencyCase, MoE
from subten.bench.random_model import ExpertScales
from subten.bench.shapes import parse_context
from subten.bench.terminal import names
from subten.engine.sampling import SamplingParams
from subten.errors import ParameterError
from subten.formats import get_format


@dataclass(frozen=True)
class LatencyOptions:
    """What to measure.

    Attributes:
        cases: in the order in which they are measured; those that share a model, and then those that share a cache,
            are neighbours.
        wishes: what is measured of every case.
        scales: of the experts of random models.
        device: where.
        seconds: after which no more cases begin, or None.
        ahead: whether kernels are compiled ahead.
        resume: whether what the file holds is kept, and only the rest is measured.
    """

    cases: Sequence[LatencyCase]
    wishes: StepWishes
    scales: ExpertScales
    device: str
    seconds: float | None
    ahead: bool
    resume: bool

    @classmethod
    def parse(
        cls,
        models: str,
        *,
        batch: str,
        context: str,
        kv: str,
        moe: str,
        steps: int,
        largest: float | None,
        experts: str,
        temperature: float,
        top_p: float,
        mean_key: bool,
        profile: bool,
        device: str,
        seconds: float | None,
        ahead: bool,
        resume: bool,
    ) -> LatencyOptions:
        """From the command line, where lists are separated by commas.

        Raises:
            ParameterError: a list that names nothing, or something that does not exist.
            ModelNotFoundError: a name that is neither a shape nor a model.
            UnknownFormatError: a name that is no format.
        """
        shapes = model_shapes.chosen_models(models)
        kinds, scales, contexts = names(moe), experts.strip(), [parse_context(text) for text in names(context)]
        if not kinds or not set(kinds) <= set(get_args(MoE)):
            raise ParameterError(f"--moe is '{moe}'; it takes {' and '.join(get_args(MoE))}, separated by commas")
        if scales not in get_args(ExpertScales):
            raise ParameterError(f"--experts is '{experts}'; it is one of {', '.join(get_args(ExpertScales))}")
        bad = [text for text in names(batch) if text not in map(str, BATCHES_TRIED)]
        if bad:
            sizes = ", ".join(map(str, BATCHES_TRIED))
            raise ParameterError(f"--batch has '{bad[0]}'; it takes the sizes that graphs are made for: {sizes}")
        if any(tokens < SHORTEST_CONTEXT for tokens in contexts):
            raise ParameterError(f"--context has {min(contexts)} tokens; it takes {SHORTEST_CONTEXT} or more")
        batches, formats = sorted(map(int, names(batch))), [get_format(name) for name in names(kv)]
        cases = [
            LatencyCase(shape, cast("MoE", kind), fmt, tokens, size)
            for shape in shapes
            for kind in sorted(kinds, reverse=True)  # "unfused" first, see `with_moe`
            for tokens in contexts
            for fmt in formats
            for size in batches
        ]
        if not cases:
            raise ParameterError(
                "there is nothing to measure; name a shape, a batch, a context and a format at least"
            )
        wishes = StepWishes(steps, SamplingParams(temperature=temperature, top_p=top_p), mean_key, profile, largest)
        return cls(cases, wishes, cast("ExpertScales", scales), device, seconds, ahead, resume)
