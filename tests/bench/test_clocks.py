from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from subten.bench.clocks import Clocks, clocks_during

GPU = torch.device("cuda", 0)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that says what it is told to, as soon as work is done."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="abc-1"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def prepare(says: str, code: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        wait = f"while [ ! -e {tmp_path}/twice ]; do sleep 0.01; done"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{wait}\necho "{says}"\nexit {code}\n')
        program.chmod(0o755)

    return prepare


def working(folder: Path):
    done: list[int] = []

    def work() -> None:
        done.append(1)
        if len(done) == 2:
            (folder / "twice").touch()

    return work, done


def test_clocks_while_it_works(nvidia_smi, tmp_path: Path) -> None:
    nvidia_smi("1755, 698.42")
    work, done = working(tmp_path)
    assert clocks_during(work, GPU) == Clocks(1755, 698.42)
    assert len(done) >= 2
    assert (tmp_path / "arguments").read_text().split()[:2] == ["--id=GPU-abc-1", "--query-gpu=clocks.sm,power.draw"]


@pytest.mark.parametrize("says", ["[N/A], 100", "No devices were found", ""])
def test_clocks_that_are_not_known(nvidia_smi, tmp_path: Path, says: str) -> None:
    nvidia_smi(says, code=6)
    work, _ = working(tmp_path)
    assert clocks_during(work, GPU) is None


def test_without_a_gpu_or_its_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert clocks_during(pytest.fail, torch.device("cpu")) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert clocks_during(pytest.fail, GPU) is None
