"""Settings that come from the environment. One variable: `SUBTEN_HOME`, the folder that holds pulled models and
calibrations."""

from __future__ import annotations

import os
from pathlib import Path

HOME_VARIABLE = "SUBTEN_HOME"


def home() -> Path:
    """The folder subten keeps its data in: `$SUBTEN_HOME`, or `~/.cache/subten` where that is unset or empty."""
    configured = os.environ.get(HOME_VARIABLE)
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "subten"


def models_folder() -> Path:
    """The folder that `subten pull` writes models to, one sub-folder per alias. It need not exist yet."""
    return home() / "models"
