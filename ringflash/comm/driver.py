"""The CUDA driver, and lists of commands; one call of a function in C issues a list.

From Python, an event takes the host 2 to 5 µs, and a kernel 10 to 20 µs. The driver itself needs 1 to 3 µs.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ringflash.comm.command_issuer import compiled
from ringflash.comm.driver_commands import LAUNCH, Command

_FUNCTIONS = (
    "cuEventRecord", "cuStreamWaitEvent", "cuStreamWriteValue64_v2", "cuMemcpyAsync", "cuLaunchKernel",
    "cuTensorMapReplaceAddress",
)  # fmt: skip
_FOR_CAPTURES = (
    "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphGetNodes", "cuGraphKernelNodeGetParams_v2",
    "cuGraphKernelNodeGetAttribute", "cuFuncGetParamInfo", "cuKernelGetParamInfo", "cuGraphDestroy",
)  # fmt: skip
_MAP_BYTES = 128  # size of a descriptor
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CAN_WRITE = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_CLUSTER, _COOPERATIVE = 4, 2  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _COOPERATIVE


class _Command(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint32), ("value", ctypes.c_int32)] + [
        (name, ctypes.c_uint64) for name in ("stream", "a", "b", "c")
    ]


class _Patch(ctypes.Structure):
    _fields_ = [
        ("at", ctypes.c_uint64), ("offset", ctypes.c_int64), ("slot", ctypes.c_uint32), ("is_map", ctypes.c_uint32),
    ]  # fmt: skip


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64), ("params", ctypes.c_uint64), ("patches", ctypes.c_uint64),
        ("num_patches", ctypes.c_uint32), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
    ]  # fmt: skip


class _NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32), ("params", ctypes.POINTER(ctypes.c_void_p)), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    ]  # fmt: skip


class CommandList:
    """Commands that are issued together, in their order.

    Args:
        commands: made by `ringflash.comm.driver_commands` and `Driver.plain_launch`.
    """

    def __init__(self, driver: Driver, commands: Sequence[Command]) -> None:
        self.driver, self.commands = driver, tuple(commands)
        self._array = (_Command * len(commands))(
            *[_Command(x.kind, x.value, x.stream, x.a, x.b, x.c) for x in commands]
        )
        self._addresses = ctypes.addressof(driver.functions), ctypes.addressof(self._array)

    def issue(self, slots: list[int], values: list[int], word: int) -> None:
        """Issue the commands.

        Args:
            slots: addresses of the tensors of a call.
            values: its events and host memory.
            word: its word.
        Raises:
            RuntimeError: the driver refused a command; those before it are issued.
        """
        driver, (functions, commands) = self.driver, self._addresses
        driver.check(driver.issue(functions, commands, len(self.commands), slots, values, word))


class Driver:
    """The CUDA driver, and the function in C.

    Raises:
        Exception: there is no driver, it lacks a function, or the function in C cannot be compiled.
    """

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL("libcuda.so.1")
        addresses = [ctypes.cast(library[name], ctypes.c_void_p).value for name in (*_FUNCTIONS, *_FOR_CAPTURES)]
        self.functions = (ctypes.c_void_p * len(addresses))(*addresses)
        can_write = ctypes.c_int()
        self.check(library.cuDeviceGetAttribute(ctypes.byref(can_write), _CAN_WRITE, torch.cuda.current_device()))
        if not can_write.value:
            raise RuntimeError("words must be written by the driver, got a device that cannot")
        self.issue = compiled()

    def check(self, error: int) -> None:
        """Raise RuntimeError for an error of the driver."""
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(text))
            raise RuntimeError(f"CUDA error {error}: {(text.value or b'unknown').decode()}")

    def plain_launch(
        self,
        launch: Callable[[torch.cuda.Stream], object],
        stream: int,
        pointers: Sequence[tuple[int, int, int]],
        maps: Sequence[tuple[int, int] | None],
    ) -> Command | None:
        """Return the launch of a kernel as a command; None if it is not one kernel without attributes.

        It is read from a capture, so it does not depend on who launches.

        Args:
            launch: launches on a stream, while that is captured.
            stream: stream of the command.
            pointers: the addresses that differ between calls, in the order of the arguments, with slot and offset.
            maps: slots and offsets of the descriptors, in the same order; None if one stays.
        """
        with self._captured(launch) as node:
            if node is None:
                return None
            sizes = list(self._sizes(node))
            if max(sizes, default=0) > _MAP_BYTES or sizes.count(_MAP_BYTES) != len(maps):
                return None
            memory = ctypes.create_string_buffer(_MAP_BYTES * (len(sizes) + 1))
            first = -(-ctypes.addressof(memory) // _MAP_BYTES) * _MAP_BYTES
            params = (ctypes.c_uint64 * len(sizes))(*range(first, first + _MAP_BYTES * len(sizes), _MAP_BYTES))
            patches, left, to_find = list[_Patch](), iter(maps), deque(pointers)
            for index, (at, size) in enumerate(zip(params, sizes, strict=True)):
                ctypes.memmove(at, node.params[index], size)
                place = next(left) if size == _MAP_BYTES else None
                if size == 8 and to_find and to_find[0][0] == ctypes.c_uint64.from_address(at).value:
                    place = to_find.popleft()[1:]
                if place is not None:
                    patches.append(_Patch(at, place[1], place[0], size == _MAP_BYTES))
            if to_find:
                return None
            array = (_Patch * len(patches))(*patches)
            kernel = _Kernel(
                node.kernel or node.function, ctypes.addressof(params), ctypes.addressof(array), len(patches),
                node.grid, node.block, node.shared,
            )  # fmt: skip
        return Command(LAUNCH, stream, ctypes.addressof(kernel), kept=(kernel, array, params, memory))

    @contextmanager
    def _captured(self, launch: Callable[[torch.cuda.Stream], object]) -> Iterator[_NodeParams | None]:
        """Capture a launch without executing it, and yield its kernel's parameters; None unless it is one kernel."""
        library, graph, count = self._library, ctypes.c_void_p(), ctypes.c_size_t(2)
        stream, nodes, node = torch.cuda.Stream(), (ctypes.c_void_p * 2)(), _NodeParams()
        handle = ctypes.c_void_p(stream.cuda_stream)
        self.check(library.cuStreamBeginCapture_v2(handle, _RELAXED))
        try:
            launch(stream)
        finally:
            self.check(library.cuStreamEndCapture(handle, ctypes.byref(graph)))
        try:
            self.check(library.cuGraphGetNodes(graph, nodes, ctypes.byref(count)))
            plain = count.value == 1 and not library.cuGraphKernelNodeGetParams_v2(
                ctypes.c_void_p(nodes[0]), ctypes.byref(node)
            )
            for attribute in (_COOPERATIVE, _CLUSTER):
                value = (ctypes.c_int * 16)()
                if plain and not library.cuGraphKernelNodeGetAttribute(ctypes.c_void_p(nodes[0]), attribute, value):
                    plain = max(value[:3]) <= (attribute == _CLUSTER)
            yield node if plain else None
        finally:
            library.cuGraphDestroy(graph)

    def _sizes(self, node: _NodeParams) -> Iterator[int]:
        """Yield the bytes of each parameter of a kernel."""
        look = self._library.cuKernelGetParamInfo if node.kernel else self._library.cuFuncGetParamInfo
        function, offset, size = ctypes.c_void_p(node.kernel or node.function), ctypes.c_size_t(), ctypes.c_size_t()
        index = 0
        while not look(function, ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size)):
            yield size.value
            index += 1


def plain_launch(
    launch: Callable[[torch.cuda.Stream], object],
    stream: int,
    pointers: Sequence[tuple[int, int, int]] = (),
    maps: Sequence[tuple[int, int] | None] = (),
) -> Command | None:
    """Return `Driver.plain_launch`; None without a driver."""
    cuda_driver = driver()
    try:
        return None if cuda_driver is None else cuda_driver.plain_launch(launch, stream, pointers, maps)
    except RuntimeError:  # the launch itself has been made before, and is made by Python again
        return None


@functools.cache
def driver() -> Driver | None:
    """Return the driver; None, after a warning, if there is no compiler or the driver lacks a function."""
    try:
        return Driver()
    except Exception as error:  # errors of the loader, of triton or of the compiler
        warnings.warn(
            "Python issues the work of calls, with equal results but more host time: the C function for it needs a C "
            f"compiler and a driver for CUDA 12.4 or later, got {type(error).__name__}: {error}.",
            stacklevel=2,
        )
        return None
