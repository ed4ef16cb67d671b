"""The scripts under ``tools`` are imported as the namespace package they are run as."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
