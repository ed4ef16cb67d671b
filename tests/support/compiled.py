"""What kernels are compiled to, by a process of its own: in that of the tests Triton interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def compiled(module: str, folder: Path, *cases: str) -> Any:
    """What `support.MODULE` prints as JSON for these cases; it works in `folder`."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", f"support.{module}", str(folder), *cases]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def compiled_by_name(module: str, folder: Path, *cases: str) -> dict[str, dict[str, Any]]:
    """Likewise, of modules that print a result for each case, with its `name`."""
    return {result["name"]: result for result in compiled(module, folder, *cases)}
