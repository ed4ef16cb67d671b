"""Models: an architecture as data, its weights as plain tensors, and one decoder that runs all of them."""

from subten.models.decoder import Decoder, StepInputs
from subten.models.families import FAMILIES, spec_from_config
from subten.models.spec import AttentionSpec, DecoderSpec, DenseSpec, MoESpec
from subten.models.weight_tree import ModelWeights
from subten.models.weights import ParameterCount, count_parameters, load_weights

__all__ = [
    "FAMILIES",
    "AttentionSpec",
    "Decoder",
    "DecoderSpec",
    "DenseSpec",
    "MoESpec",
    "ModelWeights",
    "ParameterCount",
    "StepInputs",
    "count_parameters",
    "load_weights",
    "spec_from_config",
]
