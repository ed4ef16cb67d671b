"""Settings that come from the environment. One variable: `SUBTEN_HOME`, the folder that holds pulled models and
calibrations."""

from __future__ import annotations

import os
from pathlib import Path

from subten.errors import StorageError

HOME_VARIABLE = "SUBTEN_HOME"


def home() -> Path:
    """The folder subten keeps its data in: `$SUBTEN_HOME`, or `~/.cache/subten` where that is unset or empty.

    Raises:
        StorageError: it begins with `~`, and whose home folder that would be is not known.
    """
    configured = os.environ.get(HOME_VARIABLE) or "~/.cache/subten"
    try:
        return Path(configured).expanduser()
    except RuntimeError:
        raise StorageError(
            f"subten keeps its data in {configured}, and there is no such home folder; "
            f"set {HOME_VARIABLE} to a folder"
        ) from None


def models_folder() -> Path:
    """The folder that `subten pull` writes models to, one sub-folder per alias. It need not exist yet."""
    return home() / "models"
