"""From prompts to text: tokeniser, sampling, scheduling, running, and `LLM` around them."""

from subten.engine.calibrate import Calibration, calibrate, load_calibration, save_calibration
from subten.engine.llm import LLM
from subten.engine.loading import LoadedModel, load_model
from subten.engine.request import Completion, Delta
from subten.engine.sampling import SamplingParams
from subten.engine.tokenizer import DecodeStream, Tokenizer
from subten.engine.usage import CacheUsage

__all__ = [
    "LLM",
    "CacheUsage",
    "Calibration",
    "Completion",
    "DecodeStream",
    "Delta",
    "LoadedModel",
    "SamplingParams",
    "Tokenizer",
    "calibrate",
    "load_calibration",
    "load_model",
    "save_calibration",
]
