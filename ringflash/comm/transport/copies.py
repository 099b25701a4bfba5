"""Batched copies between the GPUs of a host: one driver call for many copies, if the driver supports it.

A copy by torch costs 6 to 11 µs of host time, and the keys of a packed sequence are hundreds of segments.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringflash.comm.cuda_graphs import capturing
from ringflash.comm.driver_commands import Command, copies_command, copy_command

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_KERNELS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA 13. The hints apply to managed memory."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class Copies:
    """Copies that may run in any order, prepared once and run repeatedly.

    Args:
        pairs: target and source of each copy, contiguous and of equal size, at fixed addresses.
        device: device of the stream.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
        self._pairs, self._device = tuple(pairs), device
        self._in_one_call = False
        count = len(self._pairs)
        self._arrays = (
            (ctypes.c_uint64 * count)(*(target.data_ptr() for target, _ in self._pairs)),
            (ctypes.c_uint64 * count)(*(source.data_ptr() for _, source in self._pairs)),
            (ctypes.c_size_t * count)(*(target.nbytes for target, _ in self._pairs)),
        )

    def __call__(self, stream: torch.cuda.Stream) -> None:
        """Run the copies on the current stream, which must not be the default stream."""
        batch = _driver_batch() if len(self._pairs) > 1 else None
        # Graphs do not support batches.
        self._in_one_call = not (batch is None or capturing(self._device) or self._refused(batch, stream))
        if not self._in_one_call:
            for target, source in self._pairs:
                target.copy_(source, non_blocking=True)

    def commands(self, stream: int) -> list[Command]:
        """Return the copies as driver commands: one command if the last run was one driver call, else one a copy."""
        if self._in_one_call:
            return [copies_command(stream, _driver_batch(), self._arrays, _ATTRIBUTES, _FROM_THE_FIRST)]
        return [copy_command(stream, *one) for one in zip(*self._arrays, strict=True)]

    def _refused(self, batch: Callable[..., int], stream: torch.cuda.Stream) -> bool:
        """Run the batch; return True if the driver refused some or all of the copies."""
        problem = batch(*self._arrays, len(self._pairs), _ATTRIBUTES, _FROM_THE_FIRST, 1, stream.cuda_stream)
        if problem:
            warnings.warn(
                f"copies are made one by one, which takes more host time: the driver returned error {problem} for "
                f"{len(self._pairs)} copies in one call.",
                stacklevel=2,
            )
        return problem != 0


_ATTRIBUTES = _Attributes(_IN_STREAM_ORDER, (0, 0), (0, 0), _BESIDE_KERNELS)
_FROM_THE_FIRST = ctypes.c_size_t(0)


@functools.cache
def _driver_batch() -> ctypes._NamedFuncPointer | None:
    """Return cuMemcpyBatchAsync in the version of CUDA 13 drivers; None if the driver lacks it."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    array = ctypes.POINTER(ctypes.c_uint64)
    sizes = ctypes.POINTER(ctypes.c_size_t)
    function.argtypes = [
        array, array, sizes, ctypes.c_size_t, ctypes.POINTER(_Attributes), sizes, ctypes.c_size_t, ctypes.c_void_p,
    ]  # fmt: skip
    return function
