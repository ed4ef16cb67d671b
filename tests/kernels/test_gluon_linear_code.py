"""What the Gluon linear kernel is compiled to, seen without a GPU; tests/gpu has what it computes."""

from __future__ import annotations

import pytest

from support.compiled import compiled_by_name

ONE_TOKEN, OUTPUT, ROUTER, OF_EIGHT, WIDEST, ONE_STEP, SIXTEEN, VOCABULARY = NAMES = (
    "5120x2048/fp8/1/norm",
    "2048x4096/fp8/8/residual",
    "129x2048/bf16/8/norm+normed+bias",
    "8x4096/bf16/1/norm+normed",
    "640x8192/bf16/1/norm+normed+bias+residual",
    "1024x512/fp8/8/norm+normed",
    "6144x4096/fp8/16/norm",
    "151936x2048/fp8/8/norm",
)
"""OUTPUTSxINPUTS/WEIGHTS/TOKENS/EXTRAS, see support/compile_gluon_linear.py."""
REGISTERS = {
    ONE_TOKEN: 168,
    OUTPUT: 96,
    ROUTER: 128,
    OF_EIGHT: 128,
    WIDEST: 128,
    ONE_STEP: 96,
    SIXTEEN: 255,
    VOCABULARY: 168,
}
"""With 168 registers three programs of four warps share a multiprocessor, with 255 two; one of 16 warps has 128."""
SHARED = 227 << 10
"""Bytes of a multiprocessor that programs can have; each takes another KiB."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return compiled_by_name("compile_gluon_linear", tmp_path_factory.mktemp("compiled"), *NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_spilled_and_all_is_multiplied_by_one_instruction(compiled: dict[str, dict], name: str) -> None:
    """Weights are read as matrices from where the copy engine has left them."""
    result = compiled[name]
    opcodes = result["opcodes"]
    assert result["spilled"] == 0
    assert result["registers"] <= REGISTERS[name]
    assert {opcode for opcode in opcodes if "MMA" in opcode} == {"HMMA"}
    assert opcodes["LDSM"] >= opcodes["HMMA"] // 4
    assert not {"LDGSTS", "ATOMG", "REDG", "LDL", "STL", "I2F", "I2FP"} & set(opcodes)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_asked_for_while_the_kernel_before_may_run(compiled: dict[str, dict], name: str) -> None:
    """As many steps as there is room for; tokens, which it may still be writing, are not among them."""
    result = compiled[name]
    assert result["asked_before"] == result["stages"]
    assert result["opcodes"]["UTMALDG"] == result["steps"] * (2 if result["copied"] else 1)


def test_what_others_write_is_loaded_after_the_wait(compiled: dict[str, dict]) -> None:
    """Before it come scales and the norm's weight: of a layer without a norm, one scale for each row of a thread."""
    assert compiled[OUTPUT]["loaded_before"] == 4
    assert compiled[OUTPUT]["opcodes"]["LDG"] > 4
    of_token = compiled[ONE_TOKEN]
    assert of_token["opcodes"]["LDG"] - of_token["loaded_before"] >= 32


@pytest.mark.parametrize("name", NAMES)
def test_nothing_has_to_be_waited_for_when_all_is_multiplied(compiled: dict[str, dict], name: str) -> None:
    """Neither the residual nor the tokens that are left for others."""
    assert compiled[name]["loaded_last"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_no_tile_is_overwritten_that_a_warp_has_yet_to_read(compiled: dict[str, dict], name: str) -> None:
    """The compiler puts the barrier there: the kernel does not ask for it."""
    assert compiled[name]["unguarded"] == []


def test_programs_that_share_a_multiprocessor_have_room(compiled: dict[str, dict]) -> None:
    """Tiles and what sums are exchanged through: two programs where a layer has more of them than there are
    multiprocessors."""
    for name in NAMES:
        programs = 2 if name in (ONE_TOKEN, VOCABULARY) else 1
        assert programs * (compiled[name]["shared"] + 1024) <= SHARED + 1024, name
