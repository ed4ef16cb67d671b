"""Sub-10 ms tokens, sub-byte KV: an inference engine for Mixture-of-Experts language models."""

__version__ = "0.1.0"
