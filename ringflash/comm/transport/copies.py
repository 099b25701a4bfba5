"""Copies between the GPUs of a host, many with one call of the driver, where it has one that takes many.

torch's copy costs the host some 6 to 11 µs, and the keys of a packed sequence are hundreds of pieces.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence

import torch

from ringflash.comm.cuda_graphs import capturing

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_KERNELS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA 13. The hints are for managed memory."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class Copies:
    """Copies in no order among themselves, prepared once, to be made again and again.

    Args:
        pairs: target and source of each, contiguous and of one size; they stay where they are.
        device: of the stream.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
        self._pairs, self._device = tuple(pairs), device
        count = len(self._pairs)
        self._arrays = (
            (ctypes.c_uint64 * count)(*(target.data_ptr() for target, _ in self._pairs)),
            (ctypes.c_uint64 * count)(*(source.data_ptr() for _, source in self._pairs)),
            (ctypes.c_size_t * count)(*(target.nbytes for target, _ in self._pairs)),
        )

    def __call__(self) -> None:
        """On the current stream, which is not the default one."""
        batch = _driver_batch() if len(self._pairs) > 1 else None
        if batch is None or capturing(self._device) or self._refused(batch):  # a graph takes no batch
            for target, source in self._pairs:
                target.copy_(source, non_blocking=True)

    def _refused(self, batch: Callable[..., int]) -> bool:
        """Whether the driver made none of them, or not all."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        problem = batch(*self._arrays, len(self._pairs), _ATTRIBUTES, _FROM_THE_FIRST, 1, stream)
        if problem:
            warnings.warn(
                f"copies are made one by one, at more of the host's time: of {len(self._pairs)} in one call the driver "
                f"says error {problem}.",
                stacklevel=2,
            )
        return problem != 0


_ATTRIBUTES = _Attributes(_IN_STREAM_ORDER, (0, 0), (0, 0), _BESIDE_KERNELS)
_FROM_THE_FIRST = ctypes.c_size_t(0)


@functools.cache
def _driver_batch() -> ctypes._NamedFuncPointer | None:
    """cuMemcpyBatchAsync as drivers for CUDA 13 have it."""
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
