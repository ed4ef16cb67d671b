"""From prompts to text: tokeniser, sampling, scheduling, running, and `LLM` and `AsyncEngine` around them."""

from subten.engine.async_engine import AsyncEngine, Generation
from subten.engine.calibrate import Calibration, calibrate, load_calibration, save_calibration
from subten.engine.llm import LLM
from subten.engine.loading import LoadedModel, load_model
from subten.engine.logprobs import TokenLogprobs
from subten.engine.request import Completion, Delta
from subten.engine.sampling import SamplingParams
from subten.engine.tokenizer import DecodeStream, Tokenizer
from subten.engine.usage import CacheUsage, EngineStats

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheUsage",
    "Calibration",
    "Completion",
    "DecodeStream",
    "Delta",
    "EngineStats",
    "Generation",
    "LoadedModel",
    "SamplingParams",
    "TokenLogprobs",
    "Tokenizer",
    "calibrate",
    "load_calibration",
    "load_model",
    "save_calibration",
]
