from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from subten.errors import KernelUnavailableError
from subten.formats import FORMATS, PageLayout, get_format
from subten.kernels import OPERATIONS, REGISTRY, Implementation, Use, select, select_attention, select_kernels
from subten.kernels.attention.gluon_decode import DECODE
from subten.kernels.attention.gluon_prefill import CheckedPrefill
from subten.kernels.attention.paged import TorchPagedAttention
from subten.kernels.moe import RouterSpec, gluon_moe, moe_reference
from subten.kernels.moe.plan import MoEShape
from subten.kernels.norm import rms_norm_reference
from support.moe import block, tokens

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
    kernels, attention = select_kernels(CPU), select_attention(Use(CPU))
    chosen = {**kernels.chosen, attention.operation: attention.name}
    assert chosen == dict.fromkeys(OPERATIONS, "torch")
    assert all(callable(getattr(kernels, operation)) for operation in kernels.chosen)
    assert kernels.rms_norm is rms_norm_reference
    assert attention.load() is TorchPagedAttention
    assert attention.ahead == 0


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
    assert "rope on cpu: torch" in caplog.messages
    passed_over = "(not gluon: it is written for cuda devices) (not triton: it is written for cuda devices)"
    assert f"linear on cpu: torch {passed_over}" in caplog.messages
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


# --- attention over a cache ------------------------------------------------------------------------------------


def use_of(kv, *, device="cuda", dtype=torch.bfloat16, head_dim=128):
    return Use(torch.device(device), dtype, (PageLayout(get_format(kv), head_dim),))


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of some compute capability, as far as choosing goes."""

    def put(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return put


TRITON = {"bf16", "fp8", "kv4", "kv2", "k4v2", "kv2-plain"}
GLUON = {"kv2", "kv2-plain"}


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_attention_of_a_gpu_depends_on_the_gpu_and_the_format(gpu, capability):
    gpu(*capability)
    for name in FORMATS:
        expected = "triton" if capability >= (8, 0) and name in TRITON else "torch"
        if capability == (9, 0) and name in GLUON:
            expected = "gluon"
        choice = select_attention(use_of(name))
        assert choice.name == expected
        assert choice.ahead == (expected != "torch")


def test_a_format_that_is_passed_over_is_logged_with_the_reason(gpu, caplog):
    gpu(9, 0)
    with caplog.at_level(logging.INFO, logger="subten.kernels.select"):
        select_attention(use_of("kivi2"))
    (line,) = caplog.messages
    assert line.startswith("cached_attention on cuda: torch (not gluon: the triton kernels do not serve")
    assert "(not triton: the triton kernels do not serve the KV format 'kivi2'" in line


@pytest.mark.parametrize(
    ("name", "capability", "use", "message"),
    [
        ("triton", (9, 0), {"kv": "int4"}, "do not serve the KV format 'int4'"),
        ("triton", (9, 0), {"kv": "kv2", "head_dim": 272}, "head_dim 32 to 256, not 272"),
        ("triton", (9, 0), {"kv": "kv2", "dtype": torch.float64}, "the model in float64"),
        ("triton", (7, 5), {"kv": "kv2"}, "compute capability 8.0 or more"),
        ("gluon", (9, 0), {"kv": "kv4"}, "serves kv2 and kv2-plain, not the KV format 'kv4'"),
        ("gluon", (9, 0), {"kv": "k4v2"}, "not the KV format 'k4v2'"),
        ("gluon", (9, 0), {"kv": "bf16"}, "not the KV format 'bf16'"),
        ("gluon", (10, 0), {"kv": "kv2"}, "not gluon: it is written for compute capability 9.0"),
        ("gluon", (9, 0), {"kv": "kv2", "device": "cpu"}, "not gluon: it is written for cuda devices"),
        ("cutlass", (9, 0), {"kv": "kv2"}, "no cached_attention kernel 'cutlass'; there are gluon, triton, torch$"),
    ],
)
def test_an_attention_that_was_asked_for_is_never_replaced(gpu, name, capability, use, message):
    gpu(*capability)
    with pytest.raises(KernelUnavailableError, match=message):
        select_attention(use_of(**use), name)


def test_triton_runs_on_a_cpu_where_it_is_interpreted_and_asked_for(monkeypatch):
    use = use_of("kv2", device="cpu", dtype=torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_attention(use).name == "torch"
    assert select_attention(use, "triton").ahead == 1
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(KernelUnavailableError, match="in Triton's interpreter only"):
        select_attention(use, "triton")


def test_a_request_is_refused_before_a_model_is_loaded_where_no_format_could_help(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    for name, message in (("triton", "interpreter only"), ("gluon", "cuda devices"), ("flash", "there are gluon")):
        with pytest.raises(KernelUnavailableError, match=message):
            select_kernels(CPU, {"cached_attention": name})
    assert "cached_attention" not in select_kernels(CPU, {"cached_attention": "torch"}).chosen


# --- linear layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "dtype", "chosen", "reason"),
    [
        ((9, 0), torch.bfloat16, "gluon", None),
        ((9, 0), None, "gluon", None),
        ((8, 0), torch.float16, "triton", "not gluon: it is written for compute capability 9.0"),
        ((8, 9), torch.bfloat16, "triton", "not gluon: it is written for compute capability 9.0"),
        ((10, 0), torch.bfloat16, "triton", "not gluon: it is written for compute capability 9.0"),
        ((7, 5), torch.float16, "torch", "not triton: it needs compute capability 8.0 or more"),
        ((9, 0), torch.float32, "torch", "not gluon: it multiplies in 16 bit, and the model in float32"),
    ],
)
def test_the_linear_layers_of_a_gpu(gpu, caplog, capability, dtype, chosen, reason):
    gpu(*capability)
    cuda = torch.device("cuda")
    with caplog.at_level(logging.INFO, logger="subten.kernels.select"):
        kernels = select_kernels(cuda, dtype=dtype)
    assert kernels.chosen["linear"] == chosen
    assert "linear" not in kernels.uncapturable
    (line,) = (line for line in caplog.messages if line.startswith("linear on cuda"))
    assert line.startswith(f"linear on cuda: {chosen}")
    assert reason is None or reason in line
    if chosen == "gluon":
        assert select_kernels(cuda, {"linear": "triton"}, dtype=dtype).chosen["linear"] == "triton"
    else:
        with pytest.raises(KernelUnavailableError, match="no linear kernel can run on cuda: not gluon: it "):
            select_kernels(cuda, {"linear": "gluon"}, dtype=dtype)


# --- mixtures of experts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "dtype", "experts", "chosen", "reason"),
    [
        ((9, 0), torch.bfloat16, ((2048, 768),), "gluon", None),
        ((8, 0), torch.float16, (), "triton", None),
        ((9, 0), None, ((2048, 768), (2048, 1408)), "gluon", None),
        ((7, 5), torch.float16, ((2048, 768),), "unfused", "it needs compute capability 8.0 or more"),
        ((9, 0), torch.float32, ((2048, 768),), "unfused", "it multiplies in 16 bit, and the model in float32"),
        ((9, 0), torch.bfloat16, ((2048, 768), (2048, 40)), "unfused", "not 2048 and 40"),
    ],
)
def test_the_experts_of_a_gpu(gpu, caplog, capability, dtype, experts, chosen, reason):
    gpu(*capability)
    cuda = torch.device("cuda")
    with caplog.at_level(logging.INFO, logger="subten.kernels.select"):
        assert select_kernels(cuda, dtype=dtype, experts=experts).chosen["moe"] == chosen
    (line,) = (line for line in caplog.messages if line.startswith("moe on cuda"))
    assert line.startswith(f"moe on cuda: {chosen}")
    assert reason is None or reason in line
    if reason is not None:
        with pytest.raises(KernelUnavailableError, match=reason):
            select_kernels(cuda, {"moe": "triton"}, dtype=dtype, experts=experts)


@pytest.mark.parametrize(
    ("capability", "experts", "reason"),
    [
        ((8, 9), ((2048, 768),), "it is written for compute capability 9.0"),
        ((9, 0), ((384, 768),), "not 384 and 768"),
        ((9, 0), ((2048, 768), (2048, 1440)), "not 2048 and 1440"),
    ],
)
def test_experts_that_gluon_does_not_serve(gpu, caplog, capability, experts, reason):
    gpu(*capability)
    with caplog.at_level(logging.INFO, logger="subten.kernels.select"):
        kernels = select_kernels(torch.device("cuda"), dtype=torch.bfloat16, experts=experts)
    assert kernels.chosen["moe"] == "triton"
    (line,) = (line for line in caplog.messages if line.startswith("moe on cuda"))
    assert reason in line
    with pytest.raises(KernelUnavailableError, match=reason):
        select_kernels(torch.device("cuda"), {"moe": "gluon"}, dtype=torch.bfloat16, experts=experts)


def test_sums_whose_bits_depend_on_the_batch_are_taken_only_where_they_are_asked_for(gpu):
    gpu(9, 0)
    sums = {}
    for name in ("gluon", "gluon-float"):
        kernels = select_kernels(torch.device("cuda"), {"moe": name}, dtype=torch.bfloat16, experts=((2048, 768),))
        assert kernels.chosen["moe"] == kernels.moe.name == name
        shape = MoEShape.of(
            kernels.pack_experts(block(RouterSpec(4, 2, True), "block", hidden=1024, intermediate=128))
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gluon_moe, "multiprocessors", lambda _device: 132)
            sums[name] = kernels.moe.plan(shape, 1, torch.device("cuda")).sums
    assert sums == {"gluon": "fixed", "gluon-float": "float"}
    gpu(8, 0)
    with pytest.raises(KernelUnavailableError, match=r"it is written for compute capability 9\.0"):
        select_kernels(torch.device("cuda"), {"moe": "gluon-float"}, dtype=torch.bfloat16)


def test_weights_are_packed_for_the_kernel_that_was_chosen(gpu):
    gpu(9, 0)
    kernels = select_kernels(torch.device("cuda"), dtype=torch.bfloat16, experts=((2048, 768),))
    weights = block(RouterSpec(4, 2, True), "block", hidden=512, intermediate=128, shared=128)
    x = tokens(3, hidden=512)
    expected = moe_reference(x, weights)
    with torch.inference_mode():
        made = replace(weights, down=weights.down.clone())
    packed = kernels.pack_experts(made)
    assert packed.down.shape == (4, 2, 512, 64)
    assert torch.equal(moe_reference(x, packed), expected)
    assert select_kernels(CPU).pack_experts(weights) is weights


def test_fused_or_not_is_one_name():
    assert select_kernels(CPU, {"moe": "unfused"}).chosen["moe"] == "unfused"
    with pytest.raises(KernelUnavailableError, match="it is written for cuda devices"):
        select_kernels(CPU, {"moe": "triton"})


def test_every_engine_checks_the_kernels_of_prompts_by_itself() -> None:
    (gluon,) = (entry for entry in REGISTRY if entry.operation == "cached_attention" and entry.name == "gluon")
    one, other = (gluon.load().keywords for _ in range(2))
    assert isinstance(one["prefill"], CheckedPrefill)
    assert one["prefill"] is not other["prefill"]
    assert one["decode"] is other["decode"] is DECODE
