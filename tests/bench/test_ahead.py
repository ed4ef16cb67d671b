from __future__ import annotations

import os
from concurrent.futures.process import BrokenProcessPool

import pytest

from subten.bench import ahead
from subten.bench.ahead import compile_ahead, nearest_cases
from subten.bench.attention import Wanted
from subten.bench.shapes import Case, Shape
from subten.formats import get_format

ONE, MANY = Shape(1, 8, 4), Shape(32, 8, 4)
WANTED = Wanted([get_format("kv2"), get_format("fp8")], ["triton", "gluon"], [False, True])


def test_the_shortest_context_and_the_longest_up_to_the_main_one() -> None:
    cases = [Case(shape, k * 1024) for k in (1, 2, 32, 128) for shape in (MANY, ONE)]
    assert nearest_cases(cases) == [Case(shape, k * 1024) for shape in (ONE, MANY) for k in (1, 32)]
    assert nearest_cases([Case(ONE, 32768)]) == [Case(ONE, 32768)]
    assert nearest_cases([Case(ONE, 131072)]) == [Case(ONE, 131072)]


def test_every_variant_is_launched_in_another_process(machine, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """The processes can't launch anything here, and say nothing of it: the measurement would."""
    monkeypatch.setattr(ahead, "_launch_decode", _noted)
    monkeypatch.setattr(ahead, "_launch_append", _noted)
    monkeypatch.setattr(ahead, "_MAX_PROCESSES", 1)
    monkeypatch.setenv("NOTES", str(tmp_path))
    assert (
        compile_ahead([(Case(ONE, 1024), WANTED)], [ONE], machine) == "compiled ahead for 6 launches in 1 processes"
    )
    notes = sorted(path.read_text() for path in tmp_path.iterdir())
    assert notes == sorted(
        [
            "1x8x4",
            *(f"kv2 {kernel} {term}" for kernel in ("triton", "gluon") for term in (False, True)),
            "fp8 triton False",
        ]
    )


def _noted(*task) -> None:
    from pathlib import Path
    from uuid import uuid4

    if len(task) == 1:
        note = str(task[0])
    else:
        wanted = task[1]
        note = f"{wanted.formats[0].name} {wanted.kernels[0]} {wanted.mean_keys[0]}"
    (Path(os.environ["NOTES"]) / uuid4().hex).write_text(note)


def test_a_process_that_ends_is_no_end(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self, *_, **__) -> None:
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            pass

        def submit(self, *_):
            raise BrokenProcessPool

    monkeypatch.setattr(ahead, "ProcessPoolExecutor", Pool)
    assert "is compiled as it comes" in compile_ahead([(Case(ONE, 1024), WANTED)], [], machine)
