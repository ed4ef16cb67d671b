"""Gluon kernels on a CPU: what they compute, and whether their barriers keep what is read from being overwritten.

Triton's interpreter does not run Gluon. Here the modules of a kernel are executed once more as plain Python, over a
language of torch tensors: layouts say nothing, a pointer is a tensor with offsets, PTX is read line by line.

Partitions of warps take turns. At every barrier another one may run, in an order drawn from a seed. A product
that is asynchronous is computed when it is waited for and no earlier: if somebody was allowed to overwrite its
operands by then, it is wrong. That nobody can go on is an error.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.experimental.gluon
from torch import Tensor

_PREFIX = "triton.experimental.gluon"


# --- memory ----------------------------------------------------------------------------------------------------


class Pointer:
    """To elements of a tensor, which are counted from its start."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def to(self, kind: Any, bitcast: bool = False) -> Pointer:
        assert bitcast, "a pointer can only be read as another one"
        size, other = self.memory.itemsize, torch.empty((), dtype=kind.dtype).itemsize
        place = torch.as_tensor(self.offset) * size
        assert bool((place % other == 0).all()), "an address that is not aligned"
        return Pointer(self.memory.view(kind.dtype), place // other)


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
    offset = torch.as_tensor(pointer.offset).long()
    if mask is None:
        assert bool((offset >= 0).all())
        return pointer.memory[offset]
    offset, mask = torch.broadcast_tensors(offset, torch.as_tensor(mask))
    found = pointer.memory[torch.where(mask, offset, 0)]
    return torch.where(mask, found, torch.as_tensor(other).to(found.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Any) -> None:
    offset, value, mask = torch.broadcast_tensors(pointer.offset.long(), value, torch.as_tensor(mask))
    pointer.memory[offset[mask]] = value[mask].to(pointer.memory.dtype)


class Shared:
    """Shared memory; what nobody wrote is NaN, or as many ones."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @property
    def shape(self) -> Sequence[int]:
        return list(self.memory.shape)

    def index(self, place: Any) -> Shared:
        assert 0 <= int(place) < len(self.memory)
        return Shared(self.memory[int(place)])

    def store(self, value: Tensor) -> None:
        assert value.shape == self.memory.shape
        assert value.dtype == self.memory.dtype
        self.memory.copy_(value)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.permute(*order))

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.memory.view(dtype).view(*shape))


# --- barriers and turns ----------------------------------------------------------------------------------------


@dataclass
class Barrier:
    """A phase ends when so many have arrived."""

    count: int = 0
    arrived: int = 0
    phase: int = 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase ^ 1


class Barriers:
    """An allocation of barriers."""

    def __init__(self, count: int) -> None:
        self._all = [Barrier() for _ in range(count)]

    def index(self, place: Any) -> Barrier:
        return self._all[int(place)]


class DeadlockError(AssertionError):
    """Nobody can go on."""


@dataclass
class Turns:
    """One partition runs at a time; the others wait for a barrier, or for their turn."""

    draw: random.Random
    lock: threading.Condition = field(default_factory=threading.Condition)
    waiting: dict[int, Callable[[], bool]] = field(default_factory=dict)
    running: int | None = None
    failure: BaseException | None = None

    def take(self, partitions: Sequence[Callable[[], None]]) -> None:
        """Run all of them to their ends."""
        self.waiting = dict.fromkeys(range(len(partitions)), lambda: True)
        threads = [threading.Thread(target=self._run, args=item, daemon=True) for item in enumerate(partitions)]
        for thread in threads:
            thread.start()
        with self.lock:
            self._next()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def wait(self, ready: Callable[[], bool]) -> None:
        """Go on when this is so."""
        own = self.running
        assert own is not None
        with self.lock:
            self.waiting[own] = ready
            self._next()
            self.lock.wait_for(lambda: self.running == own or self.failure is not None)
            if self.failure is not None:
                raise DeadlockError("another partition failed")

    def _run(self, own: int, partition: Callable[[], None]) -> None:
        with self.lock:
            self.lock.wait_for(lambda: self.running == own or self.failure is not None)
            if self.failure is not None:
                return
        try:
            partition()
        except BaseException as failure:
            self.failure = self.failure or failure
        with self.lock:
            self._next()

    def _next(self) -> None:
        ready = [own for own, condition in self.waiting.items() if condition()]
        self.running = self.draw.choice(ready) if ready else None
        if self.running is not None:
            del self.waiting[self.running]
        elif self.waiting and self.failure is None:
            self.failure = DeadlockError(f"{len(self.waiting)} partitions wait for each other")
        self.lock.notify_all()


# --- PTX -------------------------------------------------------------------------------------------------------


def _halves(register: Tensor) -> Tensor:
    return register.reshape(-1).view(torch.float16).view(*register.shape, 2)


def _register(halves: Tensor) -> Tensor:
    return halves.to(torch.float16).contiguous().view(torch.int32).squeeze(-1)


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return _register((_halves(a).double() * _halves(b).double() + _halves(c).double()).to(torch.float16))


_PTX: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, n: ((a.long() & 0xFFFFFFFF) >> n.long()).to(torch.int32),
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if int(table) == 0xEA else None,
    "neg.f16x2": lambda a: a ^ -0x7FFF8000,
    "sub.rn.f16x2": lambda a, b: _register(_halves(a) - _halves(b)),
    "mul.rn.f16x2": lambda a, b: _register(_halves(a) * _halves(b)),
    "fma.rn.f16x2": _fused,
    "cvt.rn.f16x2.f32": lambda high, low: _register(torch.stack([low, high], -1)),
}


def run_ptx(code: str, operands: Sequence[Tensor]) -> Tensor:
    """What is in $0 after these instructions, with the operands in $1, $2, ..."""
    operands = torch.broadcast_tensors(*operands)
    registers: dict[str, Tensor] = {f"${i + 1}": operand for i, operand in enumerate(operands)}

    def value(word: str) -> Tensor:
        if word in registers:
            return registers[word]
        number = int(word, 0)
        return torch.tensor(number - (1 << 32) if number >= 1 << 31 else number, dtype=torch.int32)

    for line in filter(None, (part.strip() for part in code.strip(" {}").split(";"))):
        if line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        target, *arguments = re.split(r"\s*,\s*", rest)
        registers[target] = _PTX[name](*map(value, arguments))
    return registers["$0"].expand(operands[0].shape)


# --- the language ----------------------------------------------------------------------------------------------


class Constant(int):
    """A `gl.constexpr` of a number."""

    @property
    def value(self) -> int:
        return int(self)


def _constant(x: Any) -> Any:
    return Constant(x) if type(x) is int else x


@dataclass
class Product:
    """An accumulator whose products are under way."""

    sums: Tensor
    under_way: Sequence[tuple[Any, Shared]]

    def done(self) -> Tensor:
        sums = self.sums
        for a, b in self.under_way:
            left = a.memory if isinstance(a, Shared) else a
            assert left.dtype == b.memory.dtype == torch.float16
            sums = sums + (left.double() @ b.memory.double()).float()
        return sums


def _product(a: Any, b: Shared, sums: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    assert is_async
    before = sums if isinstance(sums, Product) else Product(sums, ())
    if not use_acc:
        before = Product(torch.zeros_like(before.sums), ())
    return Product(before.sums, (*before.under_way, (a, b)))


def _waited(outstanding: int, deps: Sequence[Any]) -> Any:
    results = tuple(x.done() if isinstance(x, Product) else x for x in deps)
    return results[0] if len(results) == 1 else results


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any, value: Tensor | None = None) -> Any:
    if layout == "barriers":
        return Barriers(shape[0])
    memory = torch.full(list(shape), torch.nan if dtype.is_floating_point else -1, dtype=dtype)
    if value is not None:
        memory.copy_(value)
    return Shared(memory)


def _elementwise(code: str, constraints: str, args: Sequence[Tensor], *, dtype: Any, is_pure: bool, pack: int) -> Any:
    assert is_pure
    assert pack == 1
    assert constraints.count(",") == len(args)
    found = run_ptx(code, args)
    assert found.dtype == dtype
    return found


class _Type:
    """What a pointer points to."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _scalar(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.int32)


def _both(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: operation(torch.as_tensor(a), torch.as_tensor(b))


class Emulator:
    """Runs the kernels of some modules.

    Args:
        modules: names of modules with Gluon kernels; those imported from others come first.
        seed: of the order in which partitions take turns.
    """

    def __init__(self, *modules: str, seed: int) -> None:
        self._turns = Turns(random.Random(seed))
        self._program: tuple[int, int, int] = (0, 0, 0)
        self._grid: tuple[int, int, int] = (1, 1, 1)
        self._modules: dict[str, ModuleType] = {}
        for name in modules:
            importlib.import_module(name)  # With all that it needs, in the language that they are written in.
        with self._language():
            for name in modules:
                spec = importlib.util.find_spec(name)
                assert spec is not None
                assert spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                sys.modules[name] = self._modules[name] = module
                spec.loader.exec_module(module)
                if hasattr(module, "reinterpret"):
                    module.reinterpret = Shared.reinterpret

    def launch(self, module: str, kernel: str, grid: tuple[int, int, int], arguments: dict[str, Any]) -> None:
        """Run all programs of a kernel, with tensors on the CPU."""
        function = getattr(self._modules[module], kernel)
        given = {
            name: Pointer(x.view(-1)) if isinstance(x, Tensor) else _scalar(x) if type(x) is int else x
            for name, x in arguments.items()
        }
        self._grid = grid
        for self._program in product(*map(range, grid)):
            function(**given)

    @contextmanager
    def _language(self) -> Iterator[None]:
        names = [_PREFIX, f"{_PREFIX}.language", f"{_PREFIX}.language.nvidia.hopper"]
        before = {name: module for name, module in sys.modules.items() if name.startswith(("triton", "subten"))}
        real = triton.experimental.gluon
        gluon, language, hopper = (ModuleType(name) for name in names)
        gluon.jit = self._jit  # type: ignore[attr-defined]
        gluon.constexpr_function = lambda function: function  # type: ignore[attr-defined]
        gluon.language = language  # type: ignore[attr-defined]
        vars(language).update(vars(self._gl()))
        vars(hopper).update(vars(self._hopper()))
        sys.modules.update(dict(zip(names, (gluon, language, hopper), strict=True)))
        triton.experimental.gluon = gluon
        try:
            yield
        finally:
            sys.modules.update(before)
            triton.experimental.gluon = real

    @staticmethod
    def _jit(function: Any = None, **_: Any) -> Any:
        return function if function is not None else (lambda function: function)

    def _gl(self) -> SimpleNamespace:
        layout = lambda *_, **__: None  # noqa: E731
        return SimpleNamespace(
            constexpr=_constant,
            int16=torch.int16,
            int32=torch.int32,
            int64=torch.int64,
            float16=torch.float16,
            float32=torch.float32,
            pointer_type=_Type,
            BlockedLayout=layout,
            SliceLayout=layout,
            DotOperandLayout=layout,
            NVMMADistributedLayout=layout,
            NVMMASharedLayout=layout,
            program_id=lambda axis: _scalar(self._program[axis]),
            num_programs=lambda axis: _scalar(self._grid[axis]),
            static_range=range,
            arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
            full=lambda shape, value, dtype, layout: torch.full(list(shape), value, dtype=dtype),
            zeros=lambda shape, dtype, layout: torch.zeros(list(shape), dtype=dtype),
            full_like=lambda x, value: torch.full_like(x, value),
            load=_load,
            store=_store,
            where=lambda c, a, b: torch.where(torch.as_tensor(c), a, b),
            minimum=_both(torch.minimum),
            maximum=_both(torch.maximum),
            cdiv=lambda a, b: -(-a // b),
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis),
            exp2=torch.exp2,
            join=lambda a, b: torch.stack([a, b], -1),
            reshape=lambda x, shape: x.reshape(*shape),
            permute=lambda x, order: x.permute(*order),
            broadcast=torch.broadcast_tensors,
            convert_layout=lambda x, layout: x,
            inline_asm_elementwise=_elementwise,
            allocate_shared_memory=_allocate,
            warp_specialize=self._warp_specialize,
        )

    def _hopper(self) -> SimpleNamespace:
        return SimpleNamespace(
            fence_async_shared=lambda: None,
            warpgroup_mma=_product,
            warpgroup_mma_wait=_waited,
            mbarrier=SimpleNamespace(
                MBarrierLayout=lambda: "barriers",
                init=lambda barrier, count: setattr(barrier, "count", count),
                wait=self._wait,
                arrive=self._arrive,
            ),
        )

    def _wait(self, barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if bool(pred):
            self._turns.wait(lambda: barrier.phase != int(phase))

    def _arrive(self, barrier: Barrier, *, count: int) -> None:
        assert count == 1
        barrier.arrive()
        self._turns.wait(lambda: True)

    def _warp_specialize(self, partitions: Sequence[tuple[Any, Any]], warps: Any, registers: Any) -> None:
        assert len(warps) == len(registers) == len(partitions) - 1
        self._turns.take([lambda function=function, args=args: function(*args) for function, args in partitions])
