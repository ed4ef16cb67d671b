"""What the decode kernel is compiled to, seen without a GPU."""

from __future__ import annotations

import pytest

from support.compiled import compiled_by_name

KV2, BF16, *OTHERS = ("kv2-plain/128/4/4/90", "bf16/128/8/8/90", "kv2/128/4/4/80", "fp8/80/1/4/100")
"""FORMAT/HEAD_DIM/GROUP/WARPS/CAPABILITY. With calibration `kv2` has a mean key; without, it is as `kv2-plain`."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return compiled_by_name("compile_decode", tmp_path_factory.mktemp("compiled"), KV2, BF16, *OTHERS)


def test_it_compiles_for_all_generations(compiled: dict[str, dict]) -> None:
    """On 8.0 the mean key takes more registers than there are: 3% of its loop moves what is spilled, where a tile of
    half the tokens, which does with them, takes half as many instructions again."""
    assert list(compiled) == [KV2, BF16, *OTHERS]
    assert all(result["spilled"] <= 160 for result in compiled.values())


def test_no_loop_waits_for_spilled_registers(compiled: dict[str, dict]) -> None:
    """Outside of loops, a number or two that only the programs of the windows need may be spilled (Triton 3.9)."""
    assert compiled[KV2]["spilled_in_loops"] == 0
    assert compiled[KV2]["spilled"] <= 8


def test_at_most_two_instructions_per_cached_element_of_kv2(compiled: dict[str, dict]) -> None:
    """Codes become operands without a conversion, and all loads are in flight while another page is worked on."""
    result = compiled[KV2]
    assert result["per_element"] <= 2.0
    assert not {"I2F", "I2FP", "LDG"} & set(result["opcodes"])
    assert result["registers"] <= 168, "three programs of four warps per multiprocessor"


def test_pages_in_16_bit_are_on_their_way_while_others_are_worked_on(compiled: dict[str, dict]) -> None:
    result = compiled[BF16]
    assert result["opcodes"]["LDGSTS"] >= 8
    assert result["spilled"] == 0
    assert result["registers"] <= 255, "two programs of four warps per multiprocessor, or one of eight"
