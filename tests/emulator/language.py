"""The names that kernels take from Gluon, executed on numpy: `gl`, `mbarrier`, `tma`, wgmma, fences, barriers.

Layouts and types are the real ones and are carried along without effect; whatever is not defined here falls
through to the real module, and fails there with Triton's own message.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np

from ringflash_kernels.hopper.compat import gl as real_gl
from ringflash_kernels.hopper.compat import mbarrier as real_mbarrier
from tests.emulator import memory
from tests.emulator.memory import Barrier, BarrierArray, Block, Partition, SharedMemory, current_partition
from tests.emulator.scheduler import Task
from tests.emulator.values import (
    EmulationError,
    Pointer,
    Tensor,
    arithmetic,
    as_numpy,
    integer,
    is_float,
    numpy_dtype,
    poison,
    reduce_sum,
    result_dtype,
    truth,
)


class constexpr:
    """Annotation of compile-time arguments; calling it gives the plain value."""

    def __new__(cls, value):
        return value


class Accumulator(Tensor):
    """The result of an asynchronous wgmma; reading it before it was waited for raises."""

    __slots__ = ("_value", "_compute", "_shape")

    def __init__(self, compute, shape) -> None:
        self._value, self._compute, self._shape, self.dtype = None, compute, list(shape), real_gl.float32

    @property
    def data(self) -> np.ndarray:
        if self._value is None:
            raise EmulationError("accumulator is read before warpgroup_mma_wait covered its wgmma")
        return self._value

    @property
    def shape(self) -> list[int]:
        return list(self._shape)

    def retire(self) -> None:
        self._value = self._compute()
        self._compute = None


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a @ b, summed in fp64: in fp32, bits of an element would depend on BLAS and on its place in the tile."""
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    """a @ b + acc in fp32. Shared operands are read when the product is waited for, as late as the device may."""
    partition = current_partition()
    partition.pause()
    for operand in (a, b):
        if isinstance(operand, SharedMemory):
            operand.check_fenced("wgmma of")
    assert isinstance(b, SharedMemory), "wgmma takes its second operand from shared memory"
    (m, k), (kb, n) = a.shape, b.shape
    if k != kb or acc.shape != [m, n] or a.dtype != b.dtype or m % 64 or acc.dtype != real_gl.float32:
        raise EmulationError(f"wgmma of {a.dtype}{a.shape} and {b.dtype}{b.shape} into {acc.dtype}{acc.shape}")
    keep = truth(use_acc)

    def compute() -> np.ndarray:
        product = _product(a.data, b.data)
        return product + acc.data if keep else product

    result = Accumulator(compute, (m, n))
    partition.mmas.append(result)
    if is_async:
        return result
    return warpgroup_mma_wait(0, deps=(result,))


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    """Complete all but the last `num_outstanding` wgmmas of this partition."""
    partition = current_partition()
    partition.pause()
    while len(partition.mmas) > integer(num_outstanding):
        partition.mmas.pop(0).retire()
    assert deps, "warpgroup_mma_wait needs deps"
    values = tuple(_completed(dep) for dep in deps)
    return values[0] if len(values) == 1 else values


def _completed(dep):
    retired = isinstance(dep, Accumulator) and dep._value is not None
    return Tensor(dep.data, dep.dtype) if retired else dep


def fence_async_shared(cluster=False) -> None:
    """Make this partition's generic writes visible to TMA and wgmma."""
    current_partition().fence()


def _barrier_init(barrier: Barrier, count) -> None:
    barrier.initialise(integer(count))


def _barrier_arrive(barrier: Barrier, *, count=1, pred=True) -> None:
    current_partition().pause()
    if truth(pred):
        barrier.arrive(integer(count))


def _barrier_expect(barrier: Barrier, num_bytes, pred=True) -> None:
    current_partition().pause()
    if truth(pred):
        barrier.arrive(1, integer(num_bytes))


def _barrier_wait(barrier: Barrier, phase, pred=True, deps=()) -> None:
    if truth(pred):
        parity = integer(phase) % 2
        waits_for = _Lazy(lambda: f"parity {parity} of {barrier}")
        current_partition().pause(lambda: barrier.passed(parity), waits_for)


class _Lazy:
    """Text that is made when it is read."""

    def __init__(self, make) -> None:
        self._make = make

    def __str__(self) -> str:
        return self._make()


def _allocated_name() -> str:
    """The variable that the kernel assigns an allocation to, for error messages."""
    frame = sys._getframe(2)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.split("=")[0].strip() if "=" in line else "shared memory"


def allocate_shared_memory(element_ty, shape, layout, value=None):
    name = _allocated_name()
    if isinstance(layout, real_mbarrier.MBarrierLayout):
        return BarrierArray(integer(shape[0]), name)
    smem = SharedMemory.allocate(shape, element_ty, layout, name)
    if value is not None:
        smem.store(value)
    return smem


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """Run the default partition here and every worker as a separate task; return when all have ended."""
    default = current_partition()
    block = default.block
    workers = []
    for i, ((function, args), num_warps) in enumerate(zip(functions_and_args[1:], worker_num_warps, strict=True)):
        name = f"{default.task.name}, worker {i} ({function.__name__})"
        workers.append(block.scheduler.spawn(name, partition_body(block, integer(num_warps), function, args)))
    function, args = functions_and_args[0]
    result = function(*args)
    default.pause(lambda: all(task.done for task in workers), "its workers to end")
    left = {number: threads for number, (threads, _) in block.named.items() if threads}
    if left:
        raise EmulationError(f"threads are left at named barriers when the kernel ends: {left}")
    return result


def partition_body(block: Block, num_warps: int, function, args):
    """A task's body that runs device code as a partition of `block`."""

    def body(task: Task) -> None:
        partition = Partition(block, task, 32 * num_warps)
        threading.current_thread().partition = partition  # type: ignore[attr-defined]
        function(*args)
        partition.check_finished()

    return body


def named_barrier(token, ID, NUM_THREADS, ARRIVE):
    """bar.arrive or bar.sync on hardware barrier ID, counted in threads."""
    partition = current_partition()
    partition.pause()
    state = partition.block.named.setdefault(integer(ID), [0, 0])
    state[0] += partition.num_threads
    if state[0] > NUM_THREADS:
        raise EmulationError(f"{state[0]} threads at named barrier {ID} of {NUM_THREADS}")
    generation = state[1]
    if state[0] == NUM_THREADS:
        state[:] = [0, generation + 1]
    if not ARRIVE:
        partition.pause(lambda: state[1] > generation, f"named barrier {ID}")
    return token


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """The few instructions that kernels write themselves."""
    barrier = re.search(r"bar\.(sync|arrive) (\d+), (\d+)", asm)
    if barrier:
        return named_barrier(args[0], int(barrier[2]), int(barrier[3]), barrier[1] == "arrive")
    if re.fullmatch(r"\s*ex2\.approx(\.ftz)?\.f32 \$0, \$1;\s*", asm):
        return _float_function(np.exp2)(args[0])
    if asm.startswith("cp.async.bulk.wait_group 0;"):  # tma_store_complete
        memory.tma_store_complete()
        return args[0]
    if asm.startswith("st.release.gpu"):  # publish
        store(*args)
        return args[1]
    if "red.release.gpu" in asm:  # count_up
        return _atomic(np.add.at)(args[0], current_partition().num_threads // 32)
    if "atom.global.add" in asm:  # draw_later
        return _atomic(np.add.at)(args[0], 1)
    if "ld.global.b32" in asm:  # load_lanes
        return [(args[0] + lane).load() for lane in range(4)]
    if asm.startswith("shfl.sync.idx"):  # of_lane
        return args[0][args[1]] if isinstance(args[0], list) else args[0]
    if "ld.acquire.gpu" in asm:  # wait_for
        pointer, number = args
        waits_for = _Lazy(lambda: f"{number} in global memory, where {pointer.load()} is")
        current_partition().pause(lambda: truth(pointer.load() == number), waits_for)
        return number
    if "vote.sync.any" in asm and "mul.f32" in asm:  # scale_unless_one
        return args[0] * args[1]
    if "cvt.rn.relu.f16x2.f32" in asm and "prmt.b32" in asm:
        return _e4m3_of_bits(args[0])
    if "cvt.rn.satfinite.e4m3x2.f32" in asm:  # pairs_in_e4m3
        low, high = (x.to(real_gl.float8e4nv).data.view(np.uint8).astype(np.uint16) for x in args)
        return Tensor((high << 8 | low).view(np.int16), real_gl.int16)
    if len(args) == 2 and "cvt.rn" in asm:  # pairs_of
        kind = real_gl.bfloat16 if "bf16x2" in asm else real_gl.float16
        low, high = (x.to(kind).data.view(np.uint16).astype(np.uint32) for x in args)
        return Tensor((high << 16 | low).view(np.int32), real_gl.int32)
    if asm == "mov.b32 {$0, $1}, $2;":  # columns_of
        bits = args[0].data.view(np.uint32)
        return tuple(Tensor(x.astype(np.uint16).view(np.int16), real_gl.int16) for x in (bits & 0xFFFF, bits >> 16))
    if "@p bar.warp.sync" in asm:  # computed
        return args[0]
    if "cvt.rn.bf16x2.f32" in asm or "cvt.rn.f16x2.f32" in asm or "cvt.f32.f16" in asm:  # packed, unpacked
        return args[0].to(dtype)
    if "max.f32" in asm:  # maxima_of_rows
        return _in_first_registers(args[0], np.fmax.reduce)
    if "max.s32" in asm and "vote.sync.any" in asm:  # largest_of_rows
        return _in_first_registers(args[0], _largest)
    if "setp.lt.and.s32" in asm:  # seen_only
        scores, row, end, key, stop = args
        return where((row < end) & (key < stop), scores, float("-inf"))
    if asm == "mov.b32 $0, $1;":  # opaque
        return args[0]
    if asm == "mul.rn.f32 $0, $1, $2;":
        return args[0] * args[1]
    raise NotImplementedError(f"the emulator does not know the instruction {asm!r}")


def _e4m3_of_bits(x: Tensor) -> Tensor:
    """The low byte of each number in fp16, negative ones as 0; the device's NaN is all ones."""
    bits = np.maximum(x.data, 0).astype(np.float16).view(np.uint16)
    bits = np.where(np.isnan(x.data), 0x7FFF, bits) & 0xFF
    return Tensor(bits.astype(np.uint8).view(numpy_dtype(real_gl.float8e4nv)), real_gl.float8e4nv)


def _largest(bits: np.ndarray, axis: tuple[int, int]) -> np.ndarray:
    top = bits.max(axis)
    return np.where(top < 0, bits.min(axis), top)


def _in_first_registers(x: Tensor, reduce) -> Tensor:
    """Each lane's columns of a row, reduced to where the lane's first register is; elsewhere nothing defined."""
    rows, columns = x.shape
    lanes = x.data.reshape(rows, columns // 8, 4, 2)
    result = np.full(lanes.shape, poison(x.data.dtype), x.data.dtype)
    result[:, 0, :, 0] = reduce(lanes, axis=(1, 3))
    return Tensor(result.reshape(rows, columns), x.dtype)


def _float_function(function):
    def evaluate(x):
        x = x if isinstance(x, Tensor) else Tensor(x, real_gl.float32)
        assert is_float(x.dtype), f"{function.__name__} of {x.dtype}"
        return Tensor(function(x.data), x.dtype)

    return evaluate


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z, the product not rounded."""
    assert x.dtype == y.dtype == z.dtype == real_gl.float32
    x, y, z = (value.data.astype(np.float64) for value in (x, y, z))
    return Tensor((x * y + z).astype(np.float32), real_gl.float32)


def where(condition, a, b) -> Tensor:
    dtype = result_dtype(a, b)
    return Tensor(np.where(as_numpy(condition), as_numpy(a, dtype), as_numpy(b, dtype)), dtype)


def maximum(a, b, propagate_nan=None):
    return arithmetic(np.maximum, a, b) if isinstance(a, Tensor) or isinstance(b, Tensor) else max(a, b)


def minimum(a, b, propagate_nan=None):
    return arithmetic(np.minimum, a, b) if isinstance(a, Tensor) or isinstance(b, Tensor) else min(a, b)


def load(pointer: Pointer, mask=None, other=None, **_) -> Tensor:
    current_partition().pause()
    return pointer.load(mask, other)


def store(pointer: Pointer, value, mask=None, **_) -> None:
    current_partition().pause()
    pointer.store(value, mask)


def _atomic(function):
    def atomic(pointer: Pointer, value, mask=None, sem=None, scope=None) -> Tensor:
        current_partition().pause()
        old = pointer.load(mask, 0)
        offset, enabled = pointer.locate(mask)
        stored = np.broadcast_to(as_numpy(value, pointer.element_dtype), offset.shape)
        function(pointer.storage, offset[enabled], stored[enabled])
        return old

    return atomic


def arange(start, end, layout=None) -> Tensor:
    start, end = integer(start), integer(end)
    assert (end - start) & (end - start - 1) == 0, f"arange of {end - start} elements: not a power of two"
    return Tensor(np.arange(start, end), real_gl.int32)


def full(shape, value, dtype, layout=None) -> Tensor:
    return Tensor(np.full([integer(n) for n in shape], as_numpy(value)).astype(numpy_dtype(dtype)), dtype)


def static_assert(condition, message="") -> None:
    assert condition, message


def cdiv(x, div):
    return (x + (div - 1)) // div


def device_range(*bounds, **_):
    """`range` of device code: the counter is a run-time int32."""
    for i in range(*(integer(bound) for bound in bounds)):
        yield Tensor(i, real_gl.int32)


def program_id(axis) -> Tensor:
    return Tensor(current_partition().block.program_id[integer(axis)], real_gl.int32)


def num_programs(axis=0) -> Tensor:
    return Tensor(current_partition().block.grid[integer(axis)], real_gl.int32)


class Language:
    """The `gl` (or `tl`) namespace: the functions below, and the real module for types and layouts."""

    constexpr = constexpr
    aggregate = staticmethod(lambda cls: cls)
    constexpr_function = staticmethod(lambda function: function)
    abs = staticmethod(lambda x: Tensor(np.abs(x.data), x.dtype))
    arange, full, where, maximum, minimum, cdiv = map(staticmethod, (arange, full, where, maximum, minimum, cdiv))
    zeros = staticmethod(lambda shape, dtype, layout=None: full(shape, 0, dtype))
    zeros_like = staticmethod(lambda x, **_: full(x.shape, 0, x.dtype))
    load, store = map(staticmethod, (load, store))
    atomic_add = staticmethod(_atomic(np.add.at))
    atomic_max = staticmethod(_atomic(np.maximum.at))
    exp2, log, log2, sqrt = (staticmethod(_float_function(f)) for f in (np.exp2, np.log, np.log2, np.sqrt))
    fma = staticmethod(_fma)
    max = staticmethod(lambda x, axis=None, **_: x.max(axis))
    sum = staticmethod(lambda x, axis=None, **_: reduce_sum(x, axis))
    convert_layout = multiple_of = staticmethod(lambda x, *_, **__: x)
    to_tensor = staticmethod(lambda x: x if isinstance(x, Tensor) else Tensor(x, result_dtype(x, x)))
    reshape = staticmethod(lambda x, *shape: x.reshape(*shape))
    permute = staticmethod(lambda x, *order: x.permute(*order))
    trans = staticmethod(lambda x: x.permute(1, 0))
    join = staticmethod(lambda a, b: Tensor(np.stack([a.data, b.data], -1), a.dtype))
    program_id, num_programs = staticmethod(program_id), staticmethod(num_programs)
    static_range = staticmethod(lambda *bounds: range(*map(integer, bounds)))
    static_assert = staticmethod(static_assert)
    allocate_shared_memory = staticmethod(allocate_shared_memory)
    warp_specialize = staticmethod(warp_specialize)
    inline_asm_elementwise = staticmethod(inline_asm_elementwise)

    def __getattr__(self, name: str):
        return getattr(real_gl, name)


gl = Language()

mbarrier = SimpleNamespace(
    MBarrierLayout=real_mbarrier.MBarrierLayout,
    init=_barrier_init, arrive=_barrier_arrive, expect=_barrier_expect, wait=_barrier_wait,
)  # fmt: skip

tma = SimpleNamespace(
    # names from triton 3.8 on
    store_wait=memory.tma_store_wait,
    async_load=memory.tma_load,
    async_store=memory.tma_store,
)
