"""Tensor maps for TMA: a rank-4 box per tile, so that (batch, seqlen, num_heads, head_dim) loads with any strides."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ringflash_kernels.hopper.compat import TensorDescriptor, gl

_ELEMENT = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
}


class Descriptor(TensorDescriptor):
    """Descriptor without triton's checks, which take 5 µs: `misaligned` checks before, and the driver after."""

    def __post_init__(self) -> None:
        pass


@functools.cache
def block_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a block for TMA, with the widest swizzle that its last dimension allows."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENT[dtype])


def tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a (1, rows, 1, columns) box."""
    return block_layout((1, rows, 1, columns), dtype)


def tile_descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor of (rows, columns) of one batch and head; rows past the end read 0 and are not written."""
    return block_descriptor(x, (1, rows, 1, columns))


def block_descriptor(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """Return a descriptor of blocks of x; elements past the end of x read 0 and are not written."""
    return Descriptor(x, *geometry(x.shape, x.stride(), block, x.dtype))


@functools.lru_cache(maxsize=1024)
def geometry(
    shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[int], list[int], list[int], gl.NVMMASharedLayout]:
    """Return the arguments of a descriptor without its tensor: shape, strides, block and layout, not to be changed.

    The stride of a dimension of one element is arbitrary in torch, but must be a multiple of 16 bytes here.
    """
    strides = tuple(shape[-1] * 16 if size == 1 else n for size, n in zip(shape, strides, strict=True))
    return list(shape), [*strides[:-1], 1], list(block), block_layout(block, dtype)


def cut(x: Tensor | None, dim: int, bounds: tuple[int, int]) -> Tensor | None:
    """Return x[start:stop] along `dim` as a view; x itself if that is all of it, since each view costs microseconds."""
    start, stop = bounds
    return x if x is None or stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)


def misaligned(x: Tensor) -> str | None:
    """Return the reason why TMA cannot address x, or None if it can."""
    problem = _misaligned_strides(x.shape, x.stride(), 16 // x.dtype.itemsize)
    if problem is None and x.data_ptr() % 16:
        return f"data at address {x.data_ptr():#x} (a multiple of 16 bytes)"
    return problem


@functools.lru_cache(maxsize=1024)
def _misaligned_strides(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> str | None:
    """Return the reason why TMA cannot address a tensor with these strides; they must be multiples of `unit`."""
    if strides[-1] != 1:
        return f"last stride {strides[-1]} (1)"
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size > 1 and (stride % unit or stride < 0):
            return f"strides {strides} (multiples of 16 bytes, {unit} elements)"
    return None
