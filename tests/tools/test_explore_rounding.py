"""The exploring tool: nothing coded changes nothing, and every row of its table runs on a small model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.support.tiny_model import save_tiny_model
from torch import Tensor

from subten.engine.calibrate import shipped_text
from tools import explore_rounding as tool

WINDOWS = [list(shipped_text().encode()[:256])]


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> tool.Explorer:
    return tool.Explorer(str(save_tiny_model(tmp_path_factory.mktemp("explore"))), "cpu", shipped_text()[:256])


def test_sides_in_16_bit_change_nothing(explorer: tool.Explorer) -> None:
    base: list[Tensor] = []
    explorer.row = None
    exact = tool.measure(explorer.logits, WINDOWS, base)
    wide = tool.Coding(bits=16)
    explorer.row = tool.Row("wide", wide, wide)
    found = tool.measure(explorer.logits, WINDOWS, base)
    assert found.kld < 1e-6
    assert found.nll == pytest.approx(exact.nll, abs=1e-5)


def test_every_row_runs_and_4_bits_lose_less_than_2(explorer: tool.Explorer) -> None:
    base: list[Tensor] = []
    explorer.row = None
    tool.measure(explorer.logits, WINDOWS, base)
    kld: dict[str, float] = {}
    for row in tool.rows():
        explorer.row = row
        kld[row.name] = tool.measure(explorer.logits, WINDOWS, base).kld
    assert all(math.isfinite(value) and value > 0 for value in kld.values())
    assert kld["kv4"] < kld["k4v2"] < kld["kv2"]


def test_rows_are_written_with_what_they_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text, out = save_tiny_model(tmp_path / "model"), tmp_path / "text.txt", tmp_path / "rows.json"
    text.write_text(shipped_text()[:2000])
    arguments = ["tool", str(model), str(text), str(out), "--device", "cpu", "--tokens", "128", "--context", "128"]
    monkeypatch.setattr("sys.argv", [*arguments, "--rows", "nearest;kv2"])
    tool.main()
    rows = json.loads(out.read_text())
    assert [row["name"] for row in rows] == ["nearest", "kv2"]
    assert rows[1]["key"]["whitening"] == tool.KV2.whitening
    assert all(row["kld"] > 0 and row["tokens"] == 128 for row in rows)
