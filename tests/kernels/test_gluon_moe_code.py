"""What the Gluon mixture of experts is compiled to, seen without a GPU; tests/gpu has what it computes."""

from __future__ import annotations

import pytest

from support.compiled import compiled_by_name
from support.device_code import DeviceCode

ONE_TOKEN, SIXTEEN_COLUMNS, BY_CHANNEL, SHARED = NAMES = (
    "coarse/block/1",
    "coarse/block/64",
    "fine/channel/8",
    "shared/bf16+/8",
)
"""SHAPE/WEIGHTS/TOKENS, see support/compile_gluon_moe.py."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return compiled_by_name("compile_gluon_moe", tmp_path_factory.mktemp("compiled"), *NAMES)


@pytest.mark.parametrize(("name", "columns"), list(zip(NAMES, (8, 16, 8, 8), strict=True)))
def test_the_loops_over_weights(compiled: dict[str, dict], name: str, columns: int) -> None:
    """A warp of its own asks for weights, so that nothing of that is in the loops: they read matrices and multiply
    them by `mma.sync`. Loads from global memory are those of scales. Nothing is spilled, and nothing added to memory
    before all slices of a run are. Triton 3.6 and 3.7 put in three barriers, 3.9 two."""
    result = compiled[name]
    assert result["columns"] == columns
    assert result["registers"] <= result["allowed"]
    for loop, most_loads in (("gate_up", 4), ("down", 16)):
        opcodes = result[loop]
        assert opcodes["LDSM"] >= 8
        assert opcodes["HMMA"] >= 8
        assert opcodes["BAR"] <= 3
        assert opcodes.get("LDG", 0) <= most_loads, "weights or tokens are read one by one"
        unwanted = {"UTMALDG", "FENCE", "MEMBAR", "I2F", "I2FP", "LDGSTS", "ATOMG", "REDG", "LDL", "STL"}
        assert not unwanted & set(opcodes)
    assert result["additions"] > 0


def test_weights_of_one_token_are_asked_for_at_once(compiled: dict[str, dict]) -> None:
    """Every warp finds the first run without the others and tells the one that fetches. Tokens may be on their way,
    but are not waited for, and what they count for comes later."""
    opcodes = compiled[ONE_TOKEN]["first"]
    assert opcodes["BAR"] == 1
    assert opcodes["REDUX"] <= 4
    assert not {"SHFL", "LDS", "F2FP", "HMMA"} & set(opcodes)


def test_no_stage_is_given_back_that_a_warp_has_yet_to_read(compiled: dict[str, dict]) -> None:
    """The compiler puts the barrier there: the kernel does not ask for it."""
    assert not any(result["unguarded"] for result in compiled.values())


def test_a_way_around_a_barrier_is_found() -> None:
    loop = ["LDSM R0", "@P0 BRA 0x3", "BAR.SYNC 0x0", "UTMALDG [R1]", "@P1 BRA 0x0", "EXIT"]
    ways = [loop, [text.replace("0x3", "0x2") for text in loop], ["UTMALDG [R1]", "LDSM R0", "BRA 0x0"]]
    found = [DeviceCode(0, 0, tuple(enumerate(way)), "").reachable("LDSM", "UTMALDG", "BAR.SYNC") for way in ways]
    assert found == [["UTMALDG [R1]"], [], ["UTMALDG [R1]"]]
