"""What the figures were measured on, and the rate at which it reads memory."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

import torch

import subten
from subten.bench.timing import time_calls
from subten.engine.loading import choose_device
from subten.engine.memory import free_memory
from subten.errors import KernelUnavailableError

_READ_BYTES = 2**32
_CPU_READ_BYTES, _CPU_READS = 2**27, 5
_PRODUCT, _CPU_PRODUCT, _CPU_PRODUCTS = 8192, 1024, 5
"""Rows and columns of matrices whose product says how fast products are."""
_READ_FORMS = ((8, 2048), (4, 4096), (4, 8192))
"""Programs per multiprocessor and elements that each has in flight; the best of these is the ceiling."""


@dataclass(frozen=True)
class Machine:
    """The device and the programs; what could not be found out is None.

    Attributes:
        device: its name.
        capability: compute capability, such as "9.0".
        num_sms: multiprocessors; of a CPU, threads of torch.
        l2_bytes: size of the L2.
        memory_bytes: size of its memory; of a CPU's, what is free.
        driver: version of the driver.
        cuda: version that torch was built for.
        cudnn: version.
        torch: version.
        triton: version.
        python: version.
        subten: version.
        commit: of the source.
        read_tb_per_s: memory read in this run by a kernel that does nothing else, in 10^12 bytes per second.
    """

    device: str
    capability: str
    num_sms: int
    l2_bytes: int
    memory_bytes: int
    driver: str | None
    cuda: str | None
    cudnn: int | None
    torch: str
    triton: str | None
    python: str
    subten: str
    commit: str | None
    read_tb_per_s: float


def require_gpu() -> torch.device:
    """The device to measure.

    Raises:
        KernelUnavailableError: there is none.
    """
    if not torch.cuda.is_available():
        raise KernelUnavailableError(
            "the benchmarks measure a CUDA GPU, and torch finds none here; run them on a machine that has one"
        )
    return torch.device("cuda", torch.cuda.current_device())


def measured_device(name: str) -> torch.device:
    """`cpu` is one; `auto` and `cuda` are the GPU.

    Raises:
        KernelUnavailableError: there is none.
        ParameterError: another name.
    """
    return require_gpu() if name in ("auto", "cuda") else choose_device(name)


def require_sound_device(failure: BaseException) -> None:
    """After an unexpected failure: go on only if the device still works.

    Raises:
        KernelUnavailableError: it does not, so that nothing more can be measured in this process.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise KernelUnavailableError(
            f"the device stopped working: {first_line(failure)}; what was measured before is in the result"
        ) from error


def first_line(error: BaseException) -> str:
    """What went wrong, without the trace that a library adds."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def describe(device: torch.device, commit: str | None = None) -> Machine:
    """Ask the device, and measure its reading."""
    if device.type == "cpu":
        return _describe_cpu(commit)
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        device=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        num_sms=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        driver=_output("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"),
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        torch=torch.__version__,
        triton=_version("triton"),
        python=platform.python_version(),
        subten=subten.__version__,
        commit=commit or source_commit(),
        read_tb_per_s=_read_rate(device, properties.multi_processor_count),
    )


def _describe_cpu(commit: str | None) -> Machine:
    return Machine(
        device=f"CPU ({platform.processor() or platform.machine()})",
        capability=platform.machine(),
        num_sms=torch.get_num_threads(),
        l2_bytes=0,
        memory_bytes=free_memory(torch.device("cpu")),
        driver=None,
        cuda=None,
        cudnn=None,
        torch=torch.__version__,
        triton=_version("triton"),
        python=platform.python_version(),
        subten=subten.__version__,
        commit=commit or source_commit(),
        read_tb_per_s=_cpu_read_rate(),
    )


def source_commit() -> str | None:
    """The commit of the source that runs, with `-dirty` where files of it were changed."""
    here = str(Path(subten.__file__).parent)
    head = _output("git", "-C", here, "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{head}-dirty" if changed else head


def _read_rate(device: torch.device, num_sms: int) -> float:
    from subten.kernels.triton_read import read_all

    words = torch.randint(2**31 - 1, (_READ_BYTES // 4,), dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int32, device=device)
    times = []
    for per_sm, block in _READ_FORMS:

        def read(programs: int = per_sm * num_sms, block: int = block) -> None:
            read_all(words, out, programs, block)

        times.append(time_calls([read]).us)
    return words.nbytes / min(times) / 1e6


def _cpu_read_rate() -> float:
    words = torch.ones(_CPU_READ_BYTES // 4, dtype=torch.int32)
    times = []
    for _ in range(_CPU_READS):
        start = perf_counter()
        words.max()
        times.append(perf_counter() - start)
    return words.nbytes / min(times) / 1e12


def product_rate(device: torch.device) -> float:
    """What a large matrix product reaches, in 10^12 floating-point operations per second: on a GPU in bfloat16, on a
    CPU in float32."""
    if device.type == "cuda":
        a, b = (torch.randn(_PRODUCT, _PRODUCT, device=device).to(torch.bfloat16) for _ in range(2))
        return 2 * _PRODUCT**3 / time_calls([lambda: torch.mm(a, b)]).us / 1e6
    a, b = (torch.randn(_CPU_PRODUCT, _CPU_PRODUCT) for _ in range(2))
    times = []
    for _ in range(_CPU_PRODUCTS):
        start = perf_counter()
        torch.mm(a, b)
        times.append(perf_counter() - start)
    return 2 * _CPU_PRODUCT**3 / min(times) / 1e12


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(program: str, *arguments: str) -> str | None:
    """What a program prints, or None where it is not there, fails or hangs."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
