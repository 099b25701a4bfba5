"""Shared memory, barriers and the TMA of one thread block, with what is asynchronous kept asynchronous.

Shared memory starts poisoned (NaN). A TMA load poisons its destination until it lands; a TMA store or reduction
reads its source as late as `tma_store_wait` allows and reaches global memory later still; a wgmma reads its
shared operands when it is waited for. Generic writes are tracked until the writer's proxy fence, and an
asynchronous access before it raises.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from tests.emulator.scheduler import Scheduler, Task
from tests.emulator.values import EmulationError, Tensor, as_array, gluon_dtype, integer, numpy_dtype, poison

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class SharedMemory:
    """A view of shared memory: `data`, and `unfenced`, which is non-zero where no proxy fence followed a write."""

    def __init__(self, data: np.ndarray, unfenced: np.ndarray, dtype, layout, name: str) -> None:
        self.data, self.unfenced, self.dtype, self.layout, self.name = data, unfenced, dtype, layout, name

    @classmethod
    def allocate(cls, shape, dtype, layout, name: str) -> SharedMemory:
        stored = numpy_dtype(dtype)
        data = np.full([integer(n) for n in shape], poison(stored), stored)
        return cls(data, np.zeros(data.shape, _BITS[stored.itemsize]), dtype, layout, name)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.ndim

    @property
    def numel(self) -> int:
        return self.data.size

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype, scalar=self.dtype)

    def _view(self, data, unfenced, name: str | None = None) -> SharedMemory:
        return SharedMemory(data, unfenced, self.dtype, self.layout, name or self.name)

    def index(self, i) -> SharedMemory:
        i = integer(i)
        if not 0 <= i < self.data.shape[0]:
            raise EmulationError(f"index {i} of {self.name}, which has {self.data.shape[0]} buffers")
        return self._view(self.data[i], self.unfenced[i], f"{self.name}[{i}]")

    def slice(self, start, length, dim=0) -> SharedMemory:
        start = integer(start)
        assert 0 <= start and start + length <= self.data.shape[dim], f"slice of {self.name} outside of it"
        key = (slice(None),) * dim + (slice(start, start + length),)
        return self._view(self.data[key], self.unfenced[key])

    def permute(self, order) -> SharedMemory:
        return self._view(self.data.transpose(order), self.unfenced.transpose(order))

    def reshape(self, shape) -> SharedMemory:
        shape = [integer(n) for n in shape]
        view = self._view(self.data.reshape(shape), self.unfenced.reshape(shape))
        assert np.shares_memory(view.data, self.data), f"reshape of {self.name} would copy"
        return view

    def reinterpret(self, dtype, shape, layout) -> SharedMemory:
        stored = numpy_dtype(dtype)
        count = math.prod(integer(n) for n in shape)
        assert count * stored.itemsize == self.data.nbytes, f"{self.name} has another size than {dtype}{shape}"
        assert self.data.flags.c_contiguous, f"{self.name} is not contiguous"
        data = self.data.reshape(-1).view(stored).reshape(shape)
        unfenced = self.unfenced.reshape(-1).view(_BITS[stored.itemsize]).reshape(shape)
        return SharedMemory(data, unfenced, dtype, layout, self.name)

    def load(self, layout=None) -> Tensor:
        current_partition().pause()
        return Tensor(self.data.copy(), self.dtype)

    def store(self, value: Tensor) -> None:
        partition = current_partition()
        partition.pause()
        if value.shape != self.shape or value.dtype != self.dtype:
            raise EmulationError(f"store of {value} into {self.name}, {self.dtype}{self.shape}")
        self.data[...] = value.data
        self.unfenced[...] = np.iinfo(self.unfenced.dtype).max
        partition.unfenced.append(self)

    def check_fenced(self, what: str) -> None:
        """Raise if an asynchronous access to this memory may overtake a generic write."""
        if self.unfenced.any():
            raise EmulationError(f"{what} {self.name} without a proxy fence after the generic write to it")


class Barrier:
    """An mbarrier: completes a phase when all arrivals and all announced bytes are in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count: int | None = None
        self.phase = self.pending = self.pending_bytes = 0

    def initialise(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int, expected_bytes: int = 0) -> None:
        self._check_initialised()
        self.pending -= count
        self.pending_bytes += expected_bytes
        if self.pending < 0:
            raise EmulationError(f"over-arrival at {self}: more than {self.count} arrivals in a phase")
        self._complete()

    def land(self, num_bytes: int) -> None:
        self.pending_bytes -= num_bytes
        self._complete()

    def passed(self, parity: int) -> bool:
        """Return whether the phase of this parity has completed."""
        self._check_initialised()
        return self.phase % 2 != parity

    def _complete(self) -> None:
        if self.pending == 0 and self.pending_bytes == 0:
            self.phase += 1
            self.pending = self.count

    def _check_initialised(self) -> None:
        if self.count is None:
            raise EmulationError(f"{self.name} is used before mbarrier.init")

    def __str__(self) -> str:
        return f"{self.name} (in phase {self.phase}, {self.pending} arrivals and {self.pending_bytes} bytes to come)"


class BarrierArray:
    """Allocated mbarriers; `index` selects one."""

    def __init__(self, count: int, name: str) -> None:
        self.barriers = [Barrier(f"{name}[{i}]") for i in range(count)]

    def index(self, i) -> Barrier:
        i = integer(i)
        if not 0 <= i < len(self.barriers):
            raise EmulationError(f"mbarrier index {i} of {len(self.barriers)}")
        return self.barriers[i]


class TensorDescriptor:
    """Host-made TMA descriptor of a torch tensor, checked as the driver checks it.

    Rank 1 to 5; loads outside of the tensor give zeros, stores and reductions there are dropped. A reduction that
    begins before the tensor is an illegal instruction on the GPU.
    """

    def __init__(self, base: torch.Tensor, shape, strides, block_shape, layout=None, padding: str = "zero") -> None:
        self.shape, self.strides, self.block_shape = list(shape), list(strides), list(block_shape)
        self.dtype, self.layout, self.base = gluon_dtype(base.dtype), layout, base
        self._check(base)
        array = as_array(torch.as_strided(base, (1,), (1,)))
        itemsize = array.itemsize
        self._array = np.lib.stride_tricks.as_strided(array, self.shape, [s * itemsize for s in self.strides])
        nbytes = math.prod(self.block_shape) * itemsize
        self.block_type = SimpleNamespace(nbytes=nbytes, shape=self.block_shape, element_ty=self.dtype)
        self.nbytes_per_cta = nbytes

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, block_shape, layout=None, padding: str = "zero") -> TensorDescriptor:
        return cls(tensor, tensor.shape, tensor.stride(), block_shape, layout, padding)

    def _check(self, base: torch.Tensor) -> None:
        rank = len(self.shape)
        assert 1 <= rank <= 5 and len(self.strides) == rank == len(self.block_shape), "rank must be 1 to 5"
        assert all(n > 0 for n in self.shape), f"descriptor of an empty tensor: {self.shape}"
        assert all(n > 0 and n & (n - 1) == 0 and n <= 256 for n in self.block_shape), f"block {self.block_shape}"
        assert self.strides[-1] == 1, "the last stride must be 1"
        assert all(s * base.itemsize % 16 == 0 for s in self.strides[:-1]), f"strides {self.strides}: not 16 bytes"
        assert self.block_shape[-1] * base.itemsize >= 16, "the innermost block must be at least 16 bytes"
        assert base.data_ptr() % 16 == 0, "the base must be 16-byte aligned"
        reach = base.storage_offset() + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        assert reach < base.untyped_storage().nbytes() // base.itemsize, "descriptor reaches beyond its storage"

    def _window(self, coord) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(in the tensor, in the block) parts of the block at `coord` that exist."""
        inside, within = [], []
        for start, block, size in zip(coord, self.block_shape, self.shape, strict=True):
            first, last = max(start, 0), max(min(start + block, size), max(start, 0))
            inside.append(slice(first, last))
            within.append(slice(first - start, last - start))
        return tuple(inside), tuple(within)

    def read(self, coord: list[int]) -> np.ndarray:
        block = np.zeros(self.block_shape, self._array.dtype)
        inside, within = self._window(coord)
        block[within] = self._array[inside]
        return block

    def write(self, coord: list[int], block: np.ndarray, reduce: bool) -> None:
        if reduce and min(coord) < 0:
            raise EmulationError(
                f"TMA reduction at {coord}, which is an illegal instruction: it begins before the tensor"
            )
        inside, within = self._window(coord)
        self._array[inside] = self._array[inside] + block[within] if reduce else block[within]


class Landing:
    """A write to global memory that happens once, at some later moment."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write, self.done = write, False

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            self._write()


class Partition:
    """Outstanding work of one partition of a thread block: TMA stores, wgmmas and unfenced writes."""

    def __init__(self, block: Block, task: Task, num_threads: int) -> None:
        self.block, self.task, self.num_threads = block, task, num_threads
        self.stores: list = []  # functions that read the source and return one that writes it
        self.landing: list[Landing] = []  # writes of stores that have read their source
        self.mmas: list = []  # accumulators in flight, oldest first
        self.unfenced: list[SharedMemory] = []

    def pause(self, condition=None, waits_for: str = "") -> None:
        self.task.pause(condition, waits_for)

    def fence(self) -> None:
        for memory in self.unfenced:
            memory.unfenced[...] = 0
        self.unfenced.clear()

    def finish_store_reads(self, pendings: int) -> None:
        """Let all but the last `pendings` TMA stores read their source; they land in global memory later."""
        while len(self.stores) > pendings:
            self.landing = [landing for landing in self.landing if not landing.done]
            self.landing.append(Landing(self.stores.pop(0)()))
            self.block.scheduler.launch_async(self.landing[-1])

    def check_finished(self) -> None:
        if self.stores:
            raise EmulationError(f"{self.task.name} ends while a TMA store still reads shared memory")
        if self.mmas:
            raise EmulationError(f"{self.task.name} ends with a wgmma that was not waited for")


class Block:
    """One thread block: its coordinates, its named barriers and its partitions' scheduler."""

    def __init__(self, scheduler: Scheduler, program_id: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.scheduler, self.program_id, self.grid = scheduler, program_id, grid
        self.named: dict[int, list[int]] = {}  # barrier id -> [threads arrived, completed generations]


def current_partition() -> Partition:
    """The partition that the calling thread runs."""
    return threading.current_thread().partition  # type: ignore[attr-defined]


def tma_load(desc, coord, barrier: Barrier, smem: SharedMemory, pred=True, multicast=False) -> None:
    """Start a load; the destination is undefined until `barrier` says so."""
    partition = current_partition()
    partition.pause()
    if not pred:
        return
    if smem.shape != desc.block_shape or smem.dtype != desc.dtype:
        raise EmulationError(f"TMA load of {desc.dtype}{desc.block_shape} into {smem.name}, {smem.dtype}{smem.shape}")
    smem.check_fenced("TMA load into")
    coord = [integer(c) for c in coord]
    smem.data[...] = poison(smem.data.dtype)

    def land() -> None:
        smem.data[...] = desc.read(coord)
        barrier.land(desc.block_type.nbytes)

    partition.block.scheduler.launch_async(land)


def tma_store(desc, coord, smem: SharedMemory, reduce: bool = False) -> None:
    """Start a store or reduction; the source is read at the latest when `tma_store_wait` returns."""
    partition = current_partition()
    partition.pause()
    if smem.shape != desc.block_shape or smem.dtype != desc.dtype:
        raise EmulationError(f"TMA store of {smem.name}, {smem.dtype}{smem.shape} as {desc.dtype}{desc.block_shape}")
    smem.check_fenced("TMA store of")
    coord = [integer(c) for c in coord]

    def read_source():
        block = smem.data.copy()
        return lambda: desc.write(coord, block, reduce)

    partition.stores.append(read_source)


def tma_reduce_add(desc, coord, smem: SharedMemory) -> None:
    """Start the addition of a tile to global memory."""
    tma_store(desc, coord, smem, reduce=True)


def tma_store_wait(pendings=0) -> None:
    """Wait until all but `pendings` stores have read their source (not until they are visible)."""
    partition = current_partition()
    partition.pause()
    partition.finish_store_reads(integer(pendings))


def tma_store_complete() -> None:
    """Wait until every store of this partition has landed."""
    partition = current_partition()
    partition.pause()
    partition.finish_store_reads(0)
    for landing in partition.landing:
        landing()
