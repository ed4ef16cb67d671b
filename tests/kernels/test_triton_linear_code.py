"""What the linear kernel is compiled to, seen without a GPU."""

from __future__ import annotations

import pytest

from support.compiled import compiled_by_name

QKV, OUTPUT, WIDE, *OTHERS = (
    "5120x8192/fp8/1/norm/90",
    "2048x8192/fp8/8/residual/90",
    "5120x8192/bf16/8/norm/90",
    "151936x8192/fp8/8/plain/90",
    "129x8192/bf16/8/norm+normed/90",
    "5120x8192/fp8/16/norm+bias/90",
    "5120x8192/fp8/64/norm/90",
    "5120x8208/fp16/8/norm/80",
    "5120x8192/bf16/32/norm/80",
    "5120x8192/fp8/8/norm/89",
    "2048x8192/fp8/8/residual/100",
    "151936x8192/bf16/8/plain/100",
)
"""OUTPUTSxINPUTS/WEIGHTS/TOKENS/EXTRAS/CAPABILITY, see support/compile_linear.py."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return compiled_by_name("compile_linear", tmp_path_factory.mktemp("compiled"), QKV, OUTPUT, WIDE, *OTHERS)


def test_it_compiles_for_all_generations_without_spills(compiled: dict[str, dict]) -> None:
    assert list(compiled) == [QKV, OUTPUT, WIDE, *OTHERS]
    assert all(result["spilled"] == 0 for result in compiled.values())


@pytest.mark.parametrize(("name", "instructions"), [(QKV, 200), (OUTPUT, 140), (WIDE, 150)])
def test_the_loop_over_weights(compiled: dict[str, dict], name: str, instructions: int) -> None:
    """Weights are copied ahead into shared memory, and a step of a lane (16 rows of 64 columns) takes as few
    instructions as leave memory the slower part: at 200, four warps of a multiprocessor take in 20 bytes of FP8 per
    cycle, and memory has as many for each of 132."""
    opcodes = compiled[name]["opcodes"]
    assert sum(opcodes.values()) <= instructions
    assert opcodes["HMMA"] == 4
    assert "LDGSTS" in opcodes
    assert opcodes.get("LDG", 0) <= 1
    assert not {"LDL", "STL"} & set(opcodes)
    assert compiled[name]["registers"] <= 96


def test_all_numbers_of_tokens_are_multiplied_by_the_same_instruction(compiled: dict[str, dict]) -> None:
    for name, result in compiled.items():
        assert {opcode for opcode in result["opcodes"] if "MMA" in opcode} == {"HMMA"}, name


def test_no_float_depends_on_how_threads_share_a_tensor(compiled: dict[str, dict]) -> None:
    """A sum of two has but one result; the one of sixteen is of one number and zeros."""
    assert {result["addends"] for result in compiled.values()} <= {2, 16}
