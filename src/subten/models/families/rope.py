"""The rotary embedding of a configuration, in the transformers 4 and the transformers 5 spelling."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from subten.errors import CheckpointError, UnknownArchitectureError
from subten.kernels.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
    yarn_amplitude,
)
from subten.models.families.config import MOST_POSITIONS, ConfigReader


def rope_spec(config: ConfigReader, head_dim: int, default_theta: float) -> RopeSpec:
    """Read `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    Where both are given, `rope_scaling` wins, as in transformers 5. UnknownArchitectureError if the scaling, or a
    rotation of part of the channels only, is not supported.
    """
    entry = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
    parameters = config.section(entry)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnknownArchitectureError(f"{entry} differs between layers, which is not supported")
    for section in (parameters, config):
        if section.has("partial_rotary_factor") and section.raw("partial_rotary_factor") != 1:
            raise UnknownArchitectureError("partial_rotary_factor other than 1 is not supported")
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind not in SCALINGS:
        raise UnknownArchitectureError(f"RoPE scaling {kind!r} is not supported; supported are {', '.join(SCALINGS)}")
    theta = parameters.number("rope_theta", config.number("rope_theta", default_theta))
    return RopeSpec(head_dim=head_dim, theta=theta, scaling=SCALINGS[kind](config, parameters))


def max_positions(config: ConfigReader, rope: RopeSpec) -> int:
    """Longest context: `max_position_embeddings`, or what YaRN stretches the original context to, if longer.

    A configuration that a user extended by YaRN often keeps the old `max_position_embeddings`.
    """
    stated = _positions(config, "max_position_embeddings")
    if not isinstance(rope.scaling, YarnScaling):
        return stated
    stretched = max(stated, int(rope.scaling.factor * rope.scaling.original_positions))
    if stretched > MOST_POSITIONS:
        raise CheckpointError(f"YaRN stretches the context to {stretched} positions; it can be {MOST_POSITIONS}")
    return stretched


def _positions(config: ConfigReader, key: str, default: int | None = None) -> int:
    return config.integer(key, default, most=MOST_POSITIONS)


def _default(_config: ConfigReader, _parameters: ConfigReader) -> None:
    return None


def _linear(_config: ConfigReader, parameters: ConfigReader) -> RopeScaling:
    return LinearScaling(factor=parameters.number("factor"))


def _llama3(config: ConfigReader, parameters: ConfigReader) -> RopeScaling:
    return Llama3Scaling(
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_positions=_original_positions(config, parameters),
    )


def _yarn(config: ConfigReader, parameters: ConfigReader) -> RopeScaling:
    original = _original_positions(config, parameters)
    factor = parameters.number("factor", _positions(config, "max_position_embeddings") / original)
    amplitude = yarn_amplitude(factor)
    if parameters.has("mscale") and parameters.has("mscale_all_dim"):
        amplitude = yarn_amplitude(factor, parameters.number("mscale")) / yarn_amplitude(
            factor, parameters.number("mscale_all_dim")
        )
    return YarnScaling(
        factor=factor,
        original_positions=original,
        amplitude=parameters.number("attention_factor", amplitude),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
    )


def _original_positions(config: ConfigReader, parameters: ConfigReader) -> int:
    key = "original_max_position_embeddings"
    inside = _positions(parameters, key, _positions(config, "max_position_embeddings"))
    return _positions(config, key, inside)


SCALINGS: Mapping[str, Callable[[ConfigReader, ConfigReader], RopeScaling | None]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
