"""One set of names for the Gluon operations the kernels use, over the triton releases that have them.

Gluon is experimental and renames things between releases; nothing else in this package may import from
`triton.experimental`. `environment` says which releases were verified.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

__all__ = [
    "TensorDescriptor",
    "aggregate",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "named_barrier",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

tma_load = tma.async_copy_global_to_shared
tma_store = tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait


@builtin
def tma_reduce_add(desc, coord, smem, _semantic=None):
    """Add a tile of shared memory to global memory (no Python name before triton 3.8, the operation is there)."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, smem.handle)


@gluon.jit
def named_barrier(token, ID: gl.constexpr, NUM_THREADS: gl.constexpr, ARRIVE: gl.constexpr):
    """Arrive at, or wait for, hardware barrier ID; `token` only keeps the order. The compiler owns IDs 0 to 7."""
    if ARRIVE:
        asm: gl.constexpr = f"bar.arrive {ID}, {NUM_THREADS}; mov.b32 $0, $1;"
    else:
        asm: gl.constexpr = f"bar.sync {ID}, {NUM_THREADS}; mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [token], gl.int32, is_pure=False, pack=1)
