"""What the Gluon decode kernel is compiled to, seen without a GPU; what it computes is tested on one (tests/gpu)."""

from __future__ import annotations

import pytest

from support.compiled import compiled_by_name

MAIN, MEAN_KEY, EIGHT_HEADS, SMALL = ("kv2/128/4", "kv2+/128/4", "kv2/128/8", "kv2/64/4")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return compiled_by_name("compile_gluon", tmp_path_factory.mktemp("compiled"), MAIN, MEAN_KEY, EIGHT_HEADS, SMALL)


def test_at_most_two_instructions_per_cached_element(compiled: dict[str, dict]) -> None:
    """A loop of 660 for a page at head_dim 128, of which a tenth is left out unless a maximum has risen."""
    assert compiled[MAIN]["per_element"] <= 1.35
    assert compiled[EIGHT_HEADS]["per_element"] <= 1.66
    assert compiled[MEAN_KEY]["per_element"] <= 1.4
    assert compiled[SMALL]["per_element"] <= 2.0


def test_codes_become_operands_without_a_conversion(compiled: dict[str, dict]) -> None:
    for result in compiled.values():
        assert not {"I2F", "I2FP"} & set(result["opcodes"])
        assert result["opcodes"]["IMMA"] > 0


def test_no_registers_are_spilled(compiled: dict[str, dict]) -> None:
    """Of eight heads a few before and behind the loop, which is the price of a third program on a multiprocessor."""
    assert not any(result["spilled_in_loops"] for result in compiled.values())
    assert not any(result["spilled"] for name, result in compiled.items() if name != EIGHT_HEADS)


def test_the_operands_of_a_page_are_loaded_as_they_are_used(compiled: dict[str, dict]) -> None:
    """8 loads of key words, 16 of value words, 4 of grids and kept pairs, and one of the table; none to or from
    shared memory."""
    opcodes = compiled[MAIN]["opcodes"]
    assert opcodes["LDG"] == 29
    assert not {"LDS", "STS", "BAR"} & set(opcodes)
