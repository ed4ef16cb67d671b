"""What the Gluon kernel of a prefill's pages is compiled to; what it computes is tested on a GPU (tests/gpu)."""

from __future__ import annotations

from collections import Counter

import pytest

from support.compiled import compiled_by_name

MAIN, MEAN_KEY, SMALL = "kv2/128", "kv2+/128", "kv2-plain/64"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return compiled_by_name("compile_gluon_prefill", tmp_path_factory.mktemp("compiled"), MAIN, MEAN_KEY, SMALL)


def test_no_registers_are_spilled(compiled: dict[str, dict]) -> None:
    assert [result["spilled"] for result in compiled.values()] == [0, 0, 0]


def test_weights_are_made_while_the_tensor_core_is_at_the_values(compiled: dict[str, dict]) -> None:
    """Between the last product that a round asks for and the wait for it."""
    for result in compiled.values():
        opcodes = result["multiplying"]
        products = [place for place, opcode in enumerate(opcodes) if opcode.startswith("HGMMA")]
        last_wait = max(place for place, opcode in enumerate(opcodes) if opcode.startswith("WARPGROUP.DEPBAR"))
        weights = [place for place, opcode in enumerate(opcodes) if opcode == "MUFU.EX2"]
        assert len(weights) == 34, "32 weights of a thread, and the decays of its two rows"
        assert products[-1] < weights[0]
        assert weights[-1] < last_wait


def test_those_that_multiply_move_nothing(compiled: dict[str, dict]) -> None:
    """Operands are in registers or where the tensor core reads them."""
    for result in compiled.values():
        assert not {opcode.split(".")[0] for opcode in result["multiplying"]} & {"LDS", "STS", "LDG", "STG", "LDSM"}


def test_two_codes_take_four_instructions(compiled: dict[str, dict]) -> None:
    """One of each kind, but for a shift of the first plane; and for grids, of which a thread reads nine, a few."""
    opcodes = Counter(opcode.split(".")[0] for opcode in compiled[MAIN]["dequantising"])
    pairs = 2 * 64 * 128 // 2 // 128
    assert opcodes["HADD2"] == pairs
    assert opcodes["HFMA2"] <= pairs + 5
    assert opcodes["SHF"] <= pairs
    assert opcodes["LOP3"] <= pairs + 32
    assert opcodes["STS"] == pairs // 4 + 1, "16 bytes at a time, and the kept channels"
