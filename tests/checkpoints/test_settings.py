"""The folder models are kept in."""

from __future__ import annotations

from pathlib import Path

import pytest

from subten import config
from subten.errors import StorageError


def test_home_is_configurable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SUBTEN_HOME", raising=False)
    assert config.home() == tmp_path / ".cache" / "subten"
    monkeypatch.setenv("SUBTEN_HOME", "")
    assert config.home() == tmp_path / ".cache" / "subten"
    monkeypatch.setenv("SUBTEN_HOME", "~/elsewhere")
    assert config.models_folder() == tmp_path / "elsewhere" / "models"
    monkeypatch.setenv("SUBTEN_HOME", "~nobody-of-this-name/subten")
    with pytest.raises(StorageError, match="set SUBTEN_HOME to a folder"):
        config.home()
