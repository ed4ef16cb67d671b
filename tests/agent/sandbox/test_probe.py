"""KVM is used only where a guest was seen to boot with it."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from subten.agent.sandbox.microvm import Accelerator, Image, counter, probe
from subten.agent.sandbox.microvm.counter import counter_khz


@pytest.fixture
def own_image(image: Image, tmp_path: Path) -> Image:
    """The same guest in a folder of the test's, where the answer is kept."""
    for path in image.folder.iterdir():
        if path.name != "kvm.json":
            (tmp_path / path.name).symlink_to(path)
    return Image(tmp_path, image.packages)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "device"
    path.touch()
    path.chmod(0o666)
    monkeypatch.setattr(probe, "_DEVICE", path)
    return path


def test_a_device_that_opens_and_runs_no_guest(
    own_image: Image, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A guest without KVM takes longer than one with it ever does.
    monkeypatch.setattr(probe, "_kvm", lambda: Accelerator("KVM", "tcg", "qemu64"))
    monkeypatch.setattr(probe, "KVM_BOOT_SECONDS", 0.05)
    found = probe.probe_kvm(own_image)
    assert not found.usable
    assert "opens, but no guest booted with KVM" in found.reason
    assert json.loads((own_image.folder / "kvm.json").read_text())["usable"] is False
    assert probe.accelerator(own_image).name == "TCG"


def test_the_answer_is_kept_until_the_machine_starts_again(
    own_image: Image, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def attempt(_: Image) -> probe.KVMProbe:
        tried.append(1)
        return probe.KVMProbe(True, "it booted")

    monkeypatch.setattr(probe, "_try_kvm", attempt)
    assert probe.probe_kvm(own_image) == probe.probe_kvm(own_image) == probe.KVMProbe(True, "it booted")
    assert len(tried) == 1
    monkeypatch.setattr(probe, "_boot_id", lambda: "another")
    probe.probe_kvm(own_image)
    assert len(tried) == 2


def test_a_device_that_is_not_there(own_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_DEVICE", tmp_path / "missing")
    assert probe.probe_kvm(own_image) == probe.KVMProbe(False, f"{tmp_path}/missing: No such file or directory")


def test_a_device_for_root_alone(own_image: Image, device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device.chmod(0o600)
    monkeypatch.setattr(probe, "new_user", lambda: 1)
    assert "is for root alone" in probe.probe_kvm(own_image).reason


def test_the_counter_is_measured_repeatably(monkeypatch: pytest.MonkeyPatch) -> None:
    if probe.why_no_machine() is not None:
        pytest.skip(str(probe.why_no_machine()))
    looks = itertools.count()

    def late() -> int:
        if next(looks) % 5 == 1:  # Put aside on the way to a look at the clock.
            time.sleep(0.01)
        return time.perf_counter_ns()

    first = counter_khz.__wrapped__()
    monkeypatch.setattr(counter, "time", SimpleNamespace(sleep=time.sleep, perf_counter_ns=late))
    assert counter_khz.__wrapped__() == pytest.approx(first, rel=0.01)
    assert 100_000 < first < 10_000_000
