"""Tensor maps for TMA: a rank-4 box per tile, so that (batch, seqlen, num_heads, head_dim) loads with any strides."""

from __future__ import annotations

import functools

import torch

from ringflash_kernels.hopper.compat import TensorDescriptor, gl

_ELEMENT = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
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


def tile_descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor of (rows, columns) of one batch and head; rows past the end read 0 and are not written."""
    strides = _box_strides(x)
    return Descriptor(x, list(x.shape), strides, [1, rows, 1, columns], tile_layout(rows, columns, x.dtype))


def cut(x: torch.Tensor | None, dim: int, bounds: tuple[int, int]) -> torch.Tensor | None:
    """Return x[start:stop] along `dim` as a view; x itself if that is all of it, since each view costs microseconds."""
    start, stop = bounds
    return x if x is None or stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)


def misaligned(x: torch.Tensor) -> str | None:
    """Return the reason why TMA cannot address x, or None if it can."""
    if x.stride(-1) != 1:
        return f"last stride {x.stride(-1)} (1)"
    unit = 16 // x.element_size()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1 and (stride % unit or stride < 0):
            return f"strides {tuple(x.stride())} (multiples of 16 bytes, {unit} elements)"
    if x.data_ptr() % 16:
        return f"data at address {x.data_ptr():#x} (a multiple of 16 bytes)"
    return None


def _box_strides(x: torch.Tensor) -> list[int]:
    """Return the strides of x, replaced for dimensions of size 1: unused there, but TMA needs multiples of 16 bytes."""
    shape, strides = x.shape, list(x.stride())
    for dim in range(3):
        if shape[dim] == 1:
            strides[dim] = 16
    return strides
