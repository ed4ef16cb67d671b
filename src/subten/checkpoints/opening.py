"""From a path to an open checkpoint."""

from __future__ import annotations

from pathlib import Path

from subten.checkpoints.checkpoint import Checkpoint
from subten.checkpoints.gguf_file import open_gguf_file
from subten.checkpoints.safetensors_folder import open_safetensors_folder, weight_files
from subten.errors import CheckpointError, ModelNotFoundError


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model: a `.gguf` file, or a folder of config.json and safetensors, or a folder with one `.gguf` file.

    Raises ModelNotFoundError where the path leads to no weights, CheckpointError where they are damaged or
    ambiguous, UnknownArchitectureError where they can't be read by this version.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is no .gguf file; give such a file or a model folder")
        return open_gguf_file(path)
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} does not exist; give a .gguf file or a model folder")
    if weight_files(path) or any(path.glob("*.safetensors.index.json")):
        return open_safetensors_folder(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return open_gguf_file(files[0])
    if files:
        raise CheckpointError(f"{path} holds {len(files)} GGUF files; name one of them, such as {files[0].name}")
    raise ModelNotFoundError(f"{path} holds neither safetensors nor a GGUF file")
