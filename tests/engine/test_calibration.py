"""Calibrations: what is measured, how it is kept, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.tiny_model import save_tiny_model

from subten import LLM
from subten.config import HOME_VARIABLE
from subten.engine.calibrate import (
    CALIBRATION_VERSION,
    Calibration,
    calibrate,
    calibration_for,
    calibration_path,
    load_calibration,
    save_calibration,
)
from subten.engine.loading import LoadedModel, load_model
from subten.errors import CalibrationError, StorageError
from subten.formats import FORMATS

TENSORS = ("query_moment", "key_moment", "pair_energy", "mean_key", "shape_keys", "whiten_keys")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_positions=256)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def measured(model: LoadedModel) -> Calibration:
    return calibrate(model)


def same(a: Calibration, b: Calibration) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in TENSORS)


def test_a_calibration_is_repeatable_and_comes_back_from_its_file(
    model: LoadedModel, measured: Calibration, tmp_path: Path
) -> None:
    assert measured.tokens == 256
    assert same(calibrate(model), measured)
    save_calibration(measured, tmp_path / "file")
    again = load_calibration(tmp_path / "file", model)
    assert same(again, measured)
    assert (again.tokens, again.text_sha256) == (measured.tokens, measured.text_sha256)
    with pytest.raises(StorageError):
        save_calibration(measured, tmp_path / "missing" / "file")


def test_the_strongest_pair_is_kept_whole_or_without_its_mean(model: LoadedModel) -> None:
    """A projection row made thirty times stronger: the pair that it feeds is kept, whatever is done with the mean."""
    weight = model.decoder.weights.layers[1].attention.qkv.weight
    key = weight[model.spec.attention.num_heads * 64 :]
    original = key.clone()
    try:
        key[64 + 9] *= 30
        found = calibrate(model)
        kept = [found.coding(1, FORMATS[name], model).kept_channels for name in ("kv2", "kv2-plain")]
    finally:
        key.copy_(original)
    assert [channels[1].tolist() for channels in kept] == [[9, 41], [9, 41]]


def test_the_mean_is_removed_only_by_formats_that_can(measured: Calibration) -> None:
    with_mean = replace(measured, mean_key=torch.ones_like(measured.mean_key))
    assert with_mean.removed_mean(0, FORMATS["kv2"]) is not None
    assert with_mean.removed_mean(0, FORMATS["kv2-plain"]) is None
    without = replace(measured, mean_key=torch.zeros_like(measured.mean_key))
    assert without.removed_mean(0, FORMATS["kv2"]) is None


def test_a_text_too_short_is_refused(model: LoadedModel) -> None:
    with pytest.raises(CalibrationError, match="gives 5 tokens; at least 64 are needed"):
        calibrate(model, "hello")


def broken(change: Callable[[dict[str, torch.Tensor]], object], metadata: dict[str, str], path: Path) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("change", "metadata", "message"),
    [
        (lambda t: None, {"version": "1"}, 'has version "1" where 4 is needed'),
        (lambda t: None, {"fingerprint": "other"}, "was measured on another model"),
        (lambda t: t.update(mean_key=torch.zeros(2, 2, 63)), {}, r"has mean_key of shape \(2, 2, 63\)"),
        (lambda t: t["key_moment"].fill_(torch.nan), {}, "has key_moment that is not finite"),
        (lambda t: t.pop("pair_energy"), {}, "is no readable calibration"),
        (lambda t: None, {"tokens": "many"}, "is no readable calibration"),
    ],
)
def test_what_does_not_fit_is_refused_with_one_sentence(
    folder: Path,
    measured: Calibration,
    change: Callable[[dict[str, torch.Tensor]], object],
    metadata: dict[str, str],
    message: str,
) -> None:
    model = load_model(folder)
    path = calibration_path(model)
    good = {"version": str(CALIBRATION_VERSION), "fingerprint": model.fingerprint, "text_sha256": "", "tokens": "256"}
    try:
        save_calibration(measured, path)
        broken(change, good | metadata, path)
        with pytest.raises(CalibrationError, match=message):
            LLM(model, max_context=128)
        LLM(model, kv="bf16", max_context=128)
        path.write_bytes(b"not a calibration")
        with pytest.raises(CalibrationError, match="no readable calibration"):
            LLM(model, max_context=128)
    finally:
        path.unlink()


def test_the_first_start_measures_and_the_next_one_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    # Commands that ran in this process before have set the package's own level.
    caplog.set_level(logging.INFO, logger="subten")
    first = calibration_for(load_model(folder))
    assert "measuring it" in caplog.text
    (kept,) = (tmp_path / "calibrations").iterdir()
    caplog.clear()
    assert same(calibration_for(load_model(folder)), first)
    assert "measuring" not in caplog.text
    kept.write_bytes(b"damaged")
    assert same(calibration_for(load_model(folder)), first)
    assert any(record.levelno == logging.WARNING and "measuring" in record.message for record in caplog.records)
    assert same(load_calibration(kept, load_model(folder)), first)


def test_a_home_that_can_not_be_written_is_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    assert calibration_for(load_model(folder)).tokens == 256
    assert "can't be kept for the next start" in caplog.text
