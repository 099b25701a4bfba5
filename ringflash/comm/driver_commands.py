"""Commands for the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

_RECORD, _WAIT, _WRITE, _COPY, _COPIES, LAUNCH = range(6)


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
    """Record an event on a stream: one event for all calls, or an event of each call."""
    return Command(_RECORD, stream, event, value)


def wait_command(stream: int, event: int, value: int = -1) -> Command:
    """Let a stream wait for an event: one event for all calls, or an event of each call."""
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
