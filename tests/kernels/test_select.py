from __future__ import annotations

import logging

import pytest
import torch

from subten.errors import KernelUnavailableError
from subten.kernels import OPERATIONS, REGISTRY, Implementation, select, select_kernels
from subten.kernels.norm import rms_norm_reference

CPU = torch.device("cpu")


def implementation(name, *, devices=("cpu",), reason=None, load=None, operation="rms_norm"):
    return Implementation(
        operation, name, frozenset(devices), load or (lambda: lambda *args: name), lambda use: reason
    )


@pytest.fixture
def prefer(monkeypatch):
    """Put implementations in front of the registry."""

    def put(*entries):
        monkeypatch.setattr(select, "REGISTRY", (*entries, *REGISTRY))

    return put


def never_loaded():
    raise AssertionError("an implementation that was not chosen was imported")


def test_every_operation_has_a_torch_reference_on_cpu():
    kernels = select_kernels(CPU)
    assert kernels.chosen == dict.fromkeys(OPERATIONS, "torch")
    assert all(callable(getattr(kernels, operation)) for operation in OPERATIONS)
    assert kernels.rms_norm is rms_norm_reference


def test_the_first_that_can_run_is_chosen(prefer):
    prefer(
        implementation("for_cuda", devices=["cuda"], load=never_loaded),
        implementation("broken", reason="no compiler was found", load=never_loaded),
        implementation("fast"),
        implementation("slow", load=never_loaded),
    )
    kernels = select_kernels(CPU)
    assert kernels.chosen["rms_norm"] == "fast"
    assert kernels.rms_norm() == "fast"


def test_the_choice_and_its_reasons_are_logged(prefer, caplog):
    prefer(implementation("for_cuda", devices=["cuda"]), implementation("broken", reason="no compiler was found"))
    with caplog.at_level(logging.INFO, logger="subten.kernels.select"):
        select_kernels(CPU)
    assert "linear on cpu: torch" in caplog.messages
    (line,) = (message for message in caplog.messages if message.startswith("rms_norm"))
    assert line == (
        "rms_norm on cpu: torch (not for_cuda: it is written for cuda devices) (not broken: no compiler was found)"
    )


def test_a_requested_implementation_is_used(prefer):
    prefer(implementation("fast", load=never_loaded))
    assert select_kernels(CPU, {"rms_norm": "torch"}).rms_norm is rms_norm_reference


@pytest.mark.parametrize(
    ("requested", "device", "message"),
    [
        ({"rms_norm": "broken"}, "cpu", "no rms_norm kernel can run on cpu: not broken: no compiler was found"),
        ({"rms_norm": "for_cuda"}, "cpu", "not for_cuda: it is written for cuda devices"),
        ({"rms_norm": "cutlass"}, "cpu", "no rms_norm kernel 'cutlass'; there are broken, for_cuda, torch"),
        ({"norm": "torch"}, "cpu", "no operation 'norm' to choose a kernel for, only rms_norm, rope"),
        ({}, "meta", "no rms_norm kernel can run on meta: .*not torch: it is written for cpu and cuda devices"),
    ],
)
def test_what_cannot_run_is_an_error_not_a_fallback(prefer, requested, device, message):
    prefer(
        implementation("broken", reason="no compiler was found", load=never_loaded),
        implementation("for_cuda", devices=["cuda"], load=never_loaded),
    )
    with pytest.raises(KernelUnavailableError, match=message):
        select_kernels(torch.device(device), requested)
