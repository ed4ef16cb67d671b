"""How the Gluon linear kernel shares its work, and what it leaves to the Triton kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subten.kernels.launches import MOST_TOKENS_OF_A_LAUNCH
from subten.kernels.linear import gluon_linear, triton_linear
from subten.kernels.linear.inputs import LinearWeights
from subten.kernels.linear.plan import LinearShape, LinearTuning, gluon_refusal, tune_gluon_linear
from support.linear import layer, rows

SMS = 132
OF_A_PROGRAM, OF_A_MULTIPROCESSOR, TAKEN = 227 << 10, 228 << 10, 1 << 10
"""Bytes of shared memory of sm_90; a program takes `TAKEN` besides what it asks for."""
FEW = 640
"""Outputs of a layer whose programs have a multiprocessor to themselves, and more warps."""

ITEMSIZES = st.sampled_from([1, 2])
OUTPUTS = st.integers(1, FEW) | st.integers(1, 200_000)
TOKENS = st.integers(1, MOST_TOKENS_OF_A_LAUNCH)
MULTIPROCESSORS = st.sampled_from([78, 114, SMS])


def held(tuning: LinearTuning, itemsize: int) -> int:
    """Bytes of a program's tiles of weights, and of tokens where they are copied."""
    of_tokens = 2 * tuning.columns if tuning.copied else 0
    return tuning.stages * tuning.lanes * tuning.step * (tuning.rows * itemsize + of_tokens)


@given(ITEMSIZES, st.integers(1, 32), OUTPUTS, TOKENS, MULTIPROCESSORS)
def test_every_layer_fits(itemsize: int, steps: int, outputs: int, tokens: int, num_sms: int) -> None:
    inputs = steps * 4 * 128 // itemsize
    tuning = tune_gluon_linear(LinearShape(inputs, outputs, itemsize), tokens, num_sms)
    steps_of_program, rest = divmod(inputs, tuning.lanes * tuning.step)
    assert (rest, steps_of_program * tuning.lanes) == (0, 4 * steps)
    assert tuning.rows in (16, 32, 64)
    assert tuning.columns in (8, 16)
    programs = -(-outputs // tuning.rows) * -(-tokens // tuning.columns)
    sharing = 2 if programs > num_sms and outputs > FEW else 1
    assert held(tuning, itemsize) + 16 * tuning.stages <= OF_A_PROGRAM
    assert sharing * (held(tuning, itemsize) + TAKEN) <= OF_A_MULTIPROCESSOR
    assert min(2, steps_of_program) <= tuning.stages <= steps_of_program
    assert tuning.copied == (tokens > 2)
    assert tuning.ahead >= min(steps_of_program, 3 if tuning.lanes == 16 else 4)


@given(ITEMSIZES, st.integers(1, 32), OUTPUTS)
def test_the_order_of_a_sum_depends_on_no_number_of_tokens(itemsize: int, steps: int, outputs: int) -> None:
    """Nor on how many multiprocessors there are: those of the smallest part of a GPU, or of the largest."""
    shape = LinearShape(steps * 4 * 128 // itemsize, outputs, itemsize)
    orders = {
        (tuning.lanes, tuning.step)
        for tokens in range(1, MOST_TOKENS_OF_A_LAUNCH + 1)
        for num_sms in (1, 16, 78, 114, SMS)
        for tuning in [tune_gluon_linear(shape, tokens, num_sms)]
    }
    assert len(orders) == 1
    ((lanes, step),) = orders
    assert step == 128 // itemsize
    assert lanes in ((4, 8, 16 // (3 - itemsize)) if outputs <= FEW else (4,))


@pytest.mark.parametrize(
    ("outputs", "inputs", "itemsize", "lanes"),
    [
        (8, 4096, 2, 16),
        (128, 2048, 2, 8),
        (257, 7168, 2, 16),
        (FEW, 2048, 1, 4),
        (FEW, 4096, 1, 8),
        (FEW, 16384, 1, 8),
        (FEW + 1, 4096, 1, 4),
        (8, 1024, 2, 4),
        (8, 1280, 2, 4),
        (8, 1536, 2, 8),
    ],
)
def test_few_outputs_have_programs_of_more_warps(outputs: int, inputs: int, itemsize: int, lanes: int) -> None:
    """So that each takes its columns in four steps, where they can be divided so."""
    assert tune_gluon_linear(LinearShape(inputs, outputs, itemsize), 8, SMS).lanes == lanes


@given(TOKENS, MULTIPROCESSORS)
def test_all_of_a_router_is_under_way_at_once(tokens: int, num_sms: int) -> None:
    for outputs, inputs in ((8, 4096), (128, 2048), (513, 2048)):
        tuning = tune_gluon_linear(LinearShape(inputs, outputs, 2), tokens, num_sms)
        assert tuning.stages * tuning.lanes * tuning.step == inputs
        assert (tuning.rows, tuning.columns) == (16, 8)


@pytest.mark.parametrize(
    ("outputs", "tokens", "rows_of_a_program", "columns"),
    [
        (1024, 8, 16, 8),
        (2048, 1, 32, 8),
        (2048, 32, 32, 8),
        (5120, 8, 32, 8),
        (5120, 9, 64, 16),
        (5120, 32, 64, 16),
        (151_936, 1, 64, 8),
        (151_936, 16, 64, 16),
        (129, 64, 16, 8),
    ],
)
def test_tiles(outputs: int, tokens: int, rows_of_a_program: int, columns: int) -> None:
    tuning = tune_gluon_linear(LinearShape(2048, outputs, 1), tokens, SMS)
    assert (tuning.rows, tuning.columns) == (rows_of_a_program, columns)


def test_as_many_steps_are_under_way_as_have_room() -> None:
    """The output projection of 8 tokens has a multiprocessor to itself; that of a vocabulary shares it."""

    def stages(outputs: int, inputs: int, tokens: int) -> int:
        return tune_gluon_linear(LinearShape(inputs, outputs, 1), tokens, SMS).stages

    assert stages(2048, 4096, 1) == 8, "all of them"
    assert stages(2048, 4096, 8) == 6
    assert stages(5120, 2048, 8) == 4
    assert stages(6144, 4096, 8) == 4
    assert stages(151_936, 2048, 8) == 2


# --- what it takes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8"])
def test_whole_steps_are_taken(kind: str) -> None:
    wide, span = torch.float16 if kind == "fp16" else torch.bfloat16, 512 if kind == "fp8" else 256
    for inputs in (span, 4 * span):
        assert gluon_refusal(rows(2, inputs, wide), layer(3, inputs, kind)) is None
    for inputs in (span + 16, 33 * span):
        reason = gluon_refusal(rows(1, inputs, wide), layer(1, inputs, kind))
        assert reason == f"it takes up to 32 times {span} input channels, not {inputs}"


def test_memory_that_the_copy_engine_can_read() -> None:
    weights, x = layer(4, 256, "bf16"), rows(3, 256)
    shifted = torch.empty(4 * 256 + 1, dtype=torch.bfloat16)[1:].view(4, 256)
    of_weights = "it takes contiguous weights that begin at a multiple of 16 bytes"
    assert gluon_refusal(x, LinearWeights(shifted)) == of_weights
    assert gluon_refusal(x, LinearWeights(torch.empty(256, 4, dtype=torch.bfloat16).T)) == of_weights
    of_tokens = "it takes tokens that begin at multiples of 16 bytes"
    wide = rows(3, 512)
    assert gluon_refusal(wide[:, 4:260], weights) == of_tokens
    assert gluon_refusal(rows(3, 260)[:, :256], weights) == of_tokens
    assert gluon_refusal(wide[:, 8:264], weights) is None


def test_the_kernel_is_chosen_layer_by_layer() -> None:
    linear = gluon_linear.GluonLinear()
    assert linear.kernel(rows(2, 512), layer(3, 512, "fp8")) is gluon_linear.GLUON
    assert linear.kernel(rows(2, 528), layer(3, 528, "fp8")) is triton_linear.TRITON
    shape = LinearShape(512, 3, 1)
    tuning = linear.tuning(gluon_linear.GLUON, shape, 2, torch.device("cpu"))
    assert tuning == tune_gluon_linear(shape, 2, 1)
    assert linear.tuning(gluon_linear.GLUON, shape, 2, torch.device("cpu")) is tuning
