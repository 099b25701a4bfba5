"""Copies around the all-gather of K/V, each in one pass: `publish` writes this rank's K and V to its area, from which
other ranks pull; `collect` sums and casts the dK and dV that other ranks computed for this rank's keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringflash_kernels.hopper.launcher import Launcher

PUBLISHED_ROWS, SUMMED_ROWS = 32, 8  # rows of a program


@triton.jit
def _publish(
    k_ptr, v_ptr, area_ptr, offsets_ptr, row_map_ptr, rows, heads, num_blocks, area_rows,
    k_batch, k_row, k_head, v_batch, v_row, v_head,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows of K and V of a KV head, each to its line of the area; see `api.publish`."""
    head, block = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads
    batch, row = (block // num_blocks).to(tl.int64), (block % num_blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    exists = row < rows
    inside = exists[:, None]
    if HEAD_DIM < COLUMNS:
        inside &= column < HEAD_DIM
    value_inside = inside
    if VALUE_DIM < HEAD_DIM:
        value_inside &= column < VALUE_DIM
    first, step = tl.load(offsets_ptr + 2 * head), tl.load(offsets_ptr + 2 * head + 1)
    line = batch * area_rows + tl.load(row_map_ptr + row, mask=exists, other=0)
    # The compiler cannot infer the alignment of a loaded offset; without `multiple_of` it stores 2 bytes at a time.
    area_at = area_ptr + tl.multiple_of(first + line * step, 16)[:, None] + column
    k_at = k_ptr + (batch * k_batch + row * k_row + head * k_head)[:, None] + column
    v_at = v_ptr + (batch * v_batch + row * v_row + head * v_head)[:, None] + column
    tl.store(area_at, tl.load(k_at, mask=inside), mask=inside)
    tl.store(area_at + HEAD_DIM, tl.load(v_at, mask=value_inside), mask=value_inside)


def publish(k: Tensor, v: Tensor, area: Tensor, head_offsets: Tensor, row_map: Tensor, area_rows: int) -> None:
    """See `api.publish`; k and v must have unit last stride."""
    (batch, rows, heads, head_dim), value_dim = k.shape, v.shape[3]
    num_blocks = -(-rows // PUBLISHED_ROWS)
    _PUBLISH(
        (head_dim, value_dim), batch * num_blocks * heads,
        k, v, area, head_offsets, row_map, rows, heads, num_blocks, area_rows, *k.stride()[:3], *v.stride()[:3],
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, COLUMNS=1 << (head_dim - 1).bit_length(), ROWS=PUBLISHED_ROWS,
    )  # fmt: skip


@triton.jit
def _collect(
    own_ptr, others_ptr, sources_ptr, dk_ptr, dv_ptr, rows, heads, num_blocks, num_batches,
    own_batch, own_row, own_head, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum dK and dV of ROWS rows of a KV head: this rank's share, then those of the other ranks; see `api.collect`."""
    head, block = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads
    batch, row = (block // num_blocks).to(tl.int64), block % num_blocks * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    exists = row < rows
    inside = exists[:, None]
    if HEAD_DIM < COLUMNS:
        inside &= column < HEAD_DIM
    value_inside = inside
    if VALUE_DIM < HEAD_DIM:
        value_inside &= column < VALUE_DIM
    own_row_index = tl.load(sources_ptr + row, mask=exists, other=0).to(tl.int64)
    first = tl.load(sources_ptr + rows + row, mask=exists, other=0).to(tl.int64)
    size = tl.load(sources_ptr + 2 * rows + row, mask=exists, other=0).to(tl.int64)
    count = tl.load(sources_ptr + 3 * rows + row, mask=exists, other=0)
    own_at = own_ptr + (batch * own_batch + own_row_index * own_row + head * own_head)[:, None] + column
    others_at = others_ptr + (((first + batch * size) * heads + head) * (HEAD_DIM + VALUE_DIM))[:, None] + column
    step = (size * num_batches * heads * (HEAD_DIM + VALUE_DIM))[:, None]
    dk = tl.load(own_at, mask=inside, other=0.0)
    dv = tl.load(own_at + HEAD_DIM, mask=value_inside, other=0.0)
    for index in range(0, tl.max(count, 0), UNROLL):
        for ahead in tl.static_range(UNROLL):  # several loads in flight at a time
            has = (index + ahead < count)[:, None]
            dk += tl.load(others_at, mask=inside & has, other=0.0)
            dv += tl.load(others_at + HEAD_DIM, mask=value_inside & has, other=0.0)
            others_at += step
    row = row.to(tl.int64)
    dk_at = dk_ptr + (batch * dk_batch + row * dk_row + head * dk_head)[:, None] + column
    dv_at = dv_ptr + (batch * dv_batch + row * dv_row + head * dv_head)[:, None] + column
    tl.store(dk_at, dk.to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), mask=value_inside)


_PUBLISH, _COLLECT = (Launcher(kernel, specialised=True) for kernel in (_publish, _collect))


def collect(own: Tensor, others: Tensor, sources: Tensor, dk: Tensor, dv: Tensor) -> None:
    """See `api.collect`; own (last two dimensions) and others must be contiguous, dk and dv have unit last stride."""
    (batch, rows, heads, head_dim), value_dim = dk.shape, dv.shape[3]
    num_blocks = -(-rows // SUMMED_ROWS)
    _COLLECT(
        (head_dim, value_dim), batch * num_blocks * heads,
        own, others, sources, dk, dv, rows, heads, num_blocks, batch, *own.stride()[:3],
        *dk.stride()[:3], *dv.stride()[:3],
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, COLUMNS=1 << (head_dim - 1).bit_length(), ROWS=SUMMED_ROWS, UNROLL=4,
    )  # fmt: skip
