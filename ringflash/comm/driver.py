"""Lists of commands for the CUDA driver, each of which is issued by one call of a function in C.

Asked by Python, an event takes the host 2 to 5 µs, and a kernel 10 to 20. The driver itself needs 1 to 3.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef uint32_t u32;
typedef uint64_t u64; /* also handles, and addresses of hosts and devices */

struct driver {
    int (*record)(u64 event, u64 stream);
    int (*wait)(u64 stream, u64 event, u32 flags);
    int (*write)(u64 stream, u64 address, u64 value, u32 flags);
    int (*copy)(u64 target, u64 source, u64 bytes, u64 stream);
    int (*launch)(u64 function, u32, u32, u32, u32, u32, u32, u32 shared, u64 stream, u64 params, u64 extra);
    int (*replace)(u64 map, u64 address);
};

struct patch { u64 at, offset; u32 slot, is_map; };
struct kernel { u64 function, params, patches; u32 num_patches, grid[3], block[3], shared; };
struct copies {
    int (*start)(u64 targets, u64 sources, u64 bytes, u64 count, u64 attributes, u64 firsts, u64 one, u64 stream);
    u64 targets, sources, bytes, count, attributes, firsts;
};
enum { RECORD, WAIT, WRITE, COPY, COPIES, LAUNCH };
struct command { u32 kind; int32_t value; u64 stream, a, b, c; };

static int launch(const struct driver *driver, const struct kernel *kernel, u64 stream, const u64 *slots)
{
    const struct patch *patches = (const struct patch *)kernel->patches;
    for (u32 i = 0; i < kernel->num_patches; i++) {
        u64 address = slots[patches[i].slot] + patches[i].offset;
        int error = 0;
        if (patches[i].is_map)
            error = driver->replace(patches[i].at, address);
        else
            *(u64 *)patches[i].at = address;
        if (error)
            return error;
    }
    const u32 *grid = kernel->grid, *block = kernel->block;
    return driver->launch(kernel->function, grid[0], grid[1], grid[2], block[0], block[1], block[2], kernel->shared,
                          stream, kernel->params, 0);
}

static int start(const struct copies *c, u64 stream)
{
    return c->start(c->targets, c->sources, c->bytes, c->count, c->attributes, c->firsts, 1, stream);
}

/* Issue commands until one fails. Return 0 or the driver's error. */
int issue(const struct driver *driver, const struct command *commands, u64 count, const u64 *slots, const u64 *values,
          u64 word)
{
    for (u64 i = 0; i < count; i++) {
        const struct command *c = &commands[i];
        u64 a = c->value < 0 ? c->a : values[c->value];
        int error = 1;
        switch (c->kind) {
        case RECORD: error = driver->record(a, c->stream); break;
        case WAIT: error = driver->wait(c->stream, a, 0); break;
        case WRITE: error = driver->write(c->stream, a, word, 0); break;
        case COPY: error = driver->copy(a, c->b, c->c, c->stream); break;
        case COPIES: error = start((const struct copies *)a, c->stream); break;
        case LAUNCH: error = launch(driver, (const struct kernel *)a, c->stream, slots); break;
        }
        if (error)
            return error;
    }
    return 0;
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "ringflash_commands", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_ringflash_commands(void) { return PyModule_Create(&module); }
"""
_RECORD, _WAIT, _WRITE, _COPY, _COPIES, _LAUNCH = range(6)
_FUNCTIONS = (
    "cuEventRecord", "cuStreamWaitEvent", "cuStreamWriteValue64_v2", "cuMemcpyAsync", "cuLaunchKernel",
    "cuTensorMapReplaceAddress",
)  # fmt: skip
_FOR_CAPTURES = (
    "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphGetNodes", "cuGraphKernelNodeGetParams_v2",
    "cuGraphKernelNodeGetAttribute", "cuFuncGetParamInfo", "cuKernelGetParamInfo", "cuGraphDestroy",
)  # fmt: skip
_MAP_BYTES = 128  # of a descriptor
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CAN_WRITE = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_CLUSTER, _COOPERATIVE = 4, 2  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _COOPERATIVE


class Command(NamedTuple):
    """A command: its kind, stream, and arguments.

    Args:
        value: index of the value of a call that replaces `a`; -1: none.
        kept: objects at whose addresses the driver reads.
    """

    kind: int
    stream: int
    a: int
    value: int = -1
    b: int = 0
    c: int = 0
    kept: Any = None


def record_command(stream: int, event: int, value: int = -1) -> Command:
    """Record an event on a stream, or that of each call."""
    return Command(_RECORD, stream, event, value)


def wait_command(stream: int, event: int, value: int = -1) -> Command:
    """Let a stream wait for an event, or for that of each call."""
    return Command(_WAIT, stream, event, value)


def write_command(stream: int, address: int) -> Command:
    """Write the word of each call, 8 bytes, to device memory."""
    return Command(_WRITE, stream, address)


def copy_command(stream: int, target: int, source: int, num_bytes: int, value: int = -1) -> Command:
    """Copy memory of devices, or to host memory of each call, which must be pinned."""
    return Command(_COPY, stream, target, value, source, num_bytes)


def copies_command(stream: int, start: Any, arrays: Sequence[Any], attributes: Any, firsts: Any) -> Command:
    """Start several copies in one call.

    Args:
        start: the driver's function.
        arrays: targets, sources and sizes, ctypes arrays as `start` takes them; also attributes and firsts.
    """
    function = ctypes.cast(start, ctypes.c_void_p).value or 0
    targets, sources, sizes = map(ctypes.addressof, arrays)
    numbers = function, targets, sources, sizes, len(arrays[0]), ctypes.addressof(attributes), ctypes.addressof(firsts)
    made = (ctypes.c_uint64 * len(numbers))(*numbers)
    return Command(_COPIES, stream, ctypes.addressof(made), kept=(made, start, arrays, attributes, firsts))


class ReusedEvent:
    """An event of a call; once nobody refers to this object, the event is used again."""

    __slots__ = ("_event", "_unused", "cuda_event")

    def __init__(self, event: torch.cuda.Event, unused: list[torch.cuda.Event]) -> None:
        self._event, self._unused, self.cuda_event = event, unused, event.cuda_event

    def query(self) -> bool:
        """Return True if the work before it has finished."""
        return self._event.query()

    def __del__(self) -> None:
        self._unused.append(self._event)


_unused_events: defaultdict[int, list[torch.cuda.Event]] = defaultdict(list)  # by device


def take_event(stream: torch.cuda.Stream) -> ReusedEvent:
    """Return an event that nobody uses, of the device of a stream."""
    unused = _unused_events[stream.device_index]
    return ReusedEvent(unused.pop() if unused else new_event(stream), unused)


def new_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event that has a handle, which torch makes when it is recorded first."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def address_of(thing: ReusedEvent | torch.Tensor) -> int:
    """Return the handle of an event, or the address of a tensor."""
    return thing.data_ptr() if isinstance(thing, torch.Tensor) else thing.cuda_event


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
        commands: results of the functions above and of `Driver.captured_launch`.
    """

    def __init__(self, driver: Driver, commands: Sequence[Command]) -> None:
        self.driver, self.commands = driver, tuple(commands)
        self._array = (_Command * len(commands))(
            *[_Command(x.kind, x.value, x.stream, x.a, x.b, x.c) for x in commands]
        )

    def issue(self, slots: Sequence[int], values: Sequence[int], word: int) -> None:
        """Issue the commands.

        Args:
            slots: addresses of the tensors of a call.
            values: its events and host memory.
            word: its word.
        Raises:
            RuntimeError: the driver refused a command; those before it are issued.
        """
        array = ctypes.c_uint64
        given, own = (array * len(slots))(*slots), (array * len(values))(*values)
        driver = self.driver
        driver.check(driver.issue(driver.functions, self._array, len(self.commands), given, own, word))


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
        pointers: dict[int, tuple[int, int]],
        maps: Sequence[tuple[int, int] | None],
    ) -> Command | None:
        """Return the launch of a kernel as a command; None if it is not one kernel without attributes.

        It is read from a capture, so it does not depend on who launches.

        Args:
            launch: launches on a stream, while that is captured.
            stream: stream of the command.
            pointers: slot and offset of the addresses that differ between calls.
            maps: the same for the descriptors, in the order of the arguments; None if one stays.
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
            patches, left, to_find = list[_Patch](), iter(maps), set(pointers)
            for index, (at, size) in enumerate(zip(params, sizes, strict=True)):
                ctypes.memmove(at, node.params[index], size)
                content = ctypes.c_uint64.from_address(at).value
                place = next(left) if size == _MAP_BYTES else pointers.get(content) if size == 8 else None
                to_find.discard(content)
                if place is not None:
                    patches.append(_Patch(at, place[1], place[0], size == _MAP_BYTES))
            if to_find:
                return None
            array = (_Patch * len(patches))(*patches)
            kernel = _Kernel(
                node.kernel or node.function, ctypes.addressof(params), ctypes.addressof(array), len(patches),
                node.grid, node.block, node.shared,
            )  # fmt: skip
        return Command(_LAUNCH, stream, ctypes.addressof(kernel), kept=(kernel, array, params, memory))

    @contextmanager
    def _captured(self, launch: Callable[[torch.cuda.Stream], object]) -> Iterator[_NodeParams | None]:
        """Capture a launch, which is not executed, and give the parameters of its kernel; None if there are others."""
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


def compiled() -> Callable[..., int]:
    """Return the function in C, compiled by the means of triton, which keeps it in its cache."""
    from triton.runtime.build import compile_module_from_src

    module = compile_module_from_src(_SOURCE, "ringflash_commands")
    issue = ctypes.CDLL(module.__file__).issue
    issue.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_uint64] + [ctypes.c_void_p] * 2 + [ctypes.c_uint64]
    return issue


def plain_launch(
    launch: Callable[[torch.cuda.Stream], object],
    stream: int,
    pointers: dict[int, tuple[int, int]] | None = None,
    maps: Sequence[tuple[int, int] | None] = (),
) -> Command | None:
    """Return `Driver.plain_launch`; None without a driver."""
    known = driver()
    try:
        return None if known is None else known.plain_launch(launch, stream, pointers or {}, maps)
    except RuntimeError:  # the launch itself has been made before, and is made by Python again
        return None


@functools.cache
def driver() -> Driver | None:
    """Return the driver; None, after a warning, without a compiler, or with a driver that lacks a function."""
    try:
        return Driver()
    except Exception as error:  # of the loader, of triton or of the compiler
        warnings.warn(
            "calls are issued by Python, with equal results but more host time: the function in C needs a C compiler "
            f"and a driver of CUDA 12.4 or later, got {type(error).__name__}: {error}.",
            stacklevel=2,
        )
        return None
