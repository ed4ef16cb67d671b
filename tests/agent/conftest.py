from __future__ import annotations

from collections.abc import Iterator

import pytest

from subten.agent.sandbox import interface


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """A guest of a busy machine is no guest that hangs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "GRACE_SECONDS", 60.0)
        yield
