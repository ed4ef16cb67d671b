"""`subten agent doctor` and `subten agent build-image`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest

from subten.agent.sandbox import process
from subten.agent.sandbox.process import unavailable
from subten.cli import main


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine that lacks some programs."""

    def hide(*programs: str) -> None:
        found = shutil.which
        monkeypatch.setattr(shutil, "which", lambda name: None if name in programs else found(name))
        monkeypatch.setattr(process, "unavailable", unavailable.__wrapped__)

    return hide


def test_a_machine_without_anything(without: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    without("bwrap", "qemu-system-x86_64", "mkfs.erofs", "lz4")
    assert main(["agent", "doctor", "--json"]) == 2
    findings = {finding["subject"]: finding for finding in map(json.loads, capsys.readouterr().out.splitlines())}
    assert not any(finding["works"] for finding in findings.values())
    assert "install the package bubblewrap" in findings["process sandboxes (not a VM)"]["detail"]
    assert "apt-get install --no-install-recommends qemu-system-x86" in findings["QEMU"]["detail"]
    assert findings["microVM sandboxes"]["detail"] == findings["QEMU"]["detail"]


def test_what_building_an_image_needs(without: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    without("lz4", "mkfs.erofs")
    assert main(["agent", "build-image"]) == 2
    assert capsys.readouterr().err == "error: building a guest image needs: apt-get install erofs-utils lz4\n"
    without("apt-get")
    assert main(["agent", "build-image"]) == 2
    assert "Debian or Ubuntu" in capsys.readouterr().err


def test_the_process_tier_is_measured(without: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    without("qemu-system-x86_64")
    assert main(["agent", "doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ok  process sandboxes (not a VM): ")
    assert "8 clones at once" in printed
    assert "--  QEMU: " in printed
