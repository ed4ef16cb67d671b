"""What the one-launch mixture of experts is compiled to, seen without a GPU."""

from __future__ import annotations

import pytest

from support.compiled import compiled_by_name

FINE, COARSE, *OTHERS = (
    "fine/channel/16bit/1/90",
    "coarse/block/fp8x2/8/90",
    "sigmoid/bf16/16bit/8/80",
    "shared/bf16+/16bit/64/80",
    "fine/channel/16bit/8/100",
)
"""SHAPE/WEIGHTS/ACTIVATIONS/TOKENS/CAPABILITY, see support/compile_moe.py."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return compiled_by_name("compile_moe", tmp_path_factory.mktemp("compiled"), FINE, COARSE, *OTHERS)


def test_it_compiles_for_all_generations(compiled: dict[str, dict]) -> None:
    """What is spilled is what the routing leaves, outside of the loops over weights."""
    assert list(compiled) == [FINE, COARSE, *OTHERS]
    assert all(result["spilled"] <= 320 for result in compiled.values())


@pytest.mark.parametrize(("name", "product", "registers"), [(FINE, "HMMA", 168), (COARSE, "QGMMA", 128)])
def test_the_loops_over_weights(compiled: dict[str, dict], name: str, product: str, registers: int) -> None:
    """Weights are copied ahead into shared memory, 16 bytes at a time. With tokens in 16 bit, all warps but no warp
    groups multiply, whatever the number of columns, and read fragments that are matrices in shared memory; with FP8,
    the tensor cores read shared memory themselves. Additions to the sums wait for nothing. Three programs of four
    warps, six of two or two of eight run on a multiprocessor. Triton 3.7 reads back one number that a loop leaves as
    it is, 3.6 and 3.9 none."""
    result = compiled[name]
    assert result["registers"] <= registers
    assert len(result["opcodes"]) == 2
    for opcodes in result["opcodes"]:
        assert {opcode for opcode in opcodes if opcode.endswith("MMA")} == {product}
        assert "LDGSTS" in opcodes
        assert ("LDSM" in opcodes) == (product == "HMMA")
        assert opcodes.get("LDG", 0) <= 2, "weights are read one by one"
        assert not {"ATOMG", "STL"} & set(opcodes)
        assert opcodes.get("LDL", 0) <= 1
    assert sum("REDG" in opcodes for opcodes in result["opcodes"]) == 1


def test_no_thread_clears_sums_that_another_has_yet_to_read(compiled: dict[str, dict]) -> None:
    """Loads and stores of the same addresses are not shared out to threads in the same way: a barrier is between."""
    assert all(result["sums"] == [["read"], ["clear"]] for result in compiled.values())


def test_no_float_depends_on_how_threads_share_a_tensor(compiled: dict[str, dict]) -> None:
    """Layouts differ with the number of tokens, and with them the order in which a reduction adds: a sum of two has
    but one result."""
    assert all(result["addends"] == 2 for result in compiled.values())
