"""Device kernels run in Triton's interpreter: what they compute can be checked without a GPU."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
