"""Model files on disk: safetensors folders and GGUF files behind one protocol, and pulling them by name."""

from subten.checkpoints.checkpoint import Checkpoint
from subten.checkpoints.opening import open_checkpoint
from subten.checkpoints.pulling import Origin, pull, read_origin, resolve_model
from subten.checkpoints.safetensors_folder import OWN_PREFIX
from subten.checkpoints.sources import MODELS, SHIPPED, ModelSource

__all__ = [
    "MODELS",
    "OWN_PREFIX",
    "SHIPPED",
    "Checkpoint",
    "ModelSource",
    "Origin",
    "open_checkpoint",
    "pull",
    "read_origin",
    "resolve_model",
]
