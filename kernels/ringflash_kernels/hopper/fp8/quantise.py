"""Rounding to e4m3 on the GPU, bitwise equal to `fp8_reference`; each call is one launch.

A program takes one block of rows of one head. It rotates them in registers (columns 1, 2 and 4 apart within a thread,
then the others after a change of layout), finds the largest finite value, and rounds. Warps read and write whole rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ringflash_kernels.api import device_guard
from ringflash_kernels.fp8_reference import (
    BLOCK_K,
    BLOCK_Q,
    E4M3,
    SMALLEST_EXPONENT,
    TAIL_BYTES,
    Rows,
    record_bytes,
    sign_bits,
)
from ringflash_kernels.hopper.compat import gl, gluon
from ringflash_kernels.hopper.launcher import Launcher

_SMALLEST = gl.constexpr(127 + SMALLEST_EXPONENT)
_NUM_TAIL = gl.constexpr(TAIL_BYTES // 4)
SIGNS = tuple(word - (word >> 31 << 32) for word in sign_bits())  # as int32


@gluon.constexpr_function
def _bits(start, stop):
    """Return the powers of two from `start` on, below `stop`."""
    return [1 << i for i in range(start.bit_length() - 1, stop.bit_length() - 1)]


@gluon.constexpr_function
def _rows_layout(rows, columns, num_warps, of_thread, of_lanes):
    """Return the layout of (rows, columns) in which a warp has adjacent rows.

    Args:
        of_thread: distances of the columns of a thread.
        of_lanes: distances of the columns of different lanes.
    """
    of_warp, in_lanes = rows // num_warps, 32 >> len(of_lanes)
    registers = [[0, column] for column in of_thread] + [[row, 0] for row in _bits(in_lanes, of_warp)]
    lanes = [[0, column] for column in of_lanes] + [[row, 0] for row in _bits(1, in_lanes)]
    return gl.DistributedLinearLayout(registers, lanes, [[row, 0] for row in _bits(of_warp, rows)], [], [rows, columns])


@gluon.constexpr_function
def adjacent_layout(rows, columns, num_warps, num_adjacent):
    """Return the layout with adjacent columns in a thread, for global memory."""
    return _rows_layout(rows, columns, num_warps, _bits(1, num_adjacent), _bits(num_adjacent, columns))


@gluon.constexpr_function
def distant_layout(rows, columns, num_warps, distance):
    """Return the layout in which a thread has columns `distance` apart, and as many adjacent ones as it can hold."""
    held = rows // num_warps * distance // 32  # adjacent columns if the thread has one row
    held = min(distance, max(held, 1))
    return _rows_layout(rows, columns, num_warps, _bits(1, held) + _bits(distance, columns), _bits(held, distance))


@gluon.constexpr_function
def _keys_layout(columns, num_warps):
    """Return the layout with 8 adjacent columns of 4 keys in a thread, which are adjacent in KEY_ORDER."""
    others = [2, 4, 16, 32, 64]
    in_lanes, in_warps = 8 - columns.bit_length() + 1, num_warps.bit_length() - 1
    registers = [[0, 1], [0, 2], [0, 4], [1, 0], [8, 0]] + [[key, 0] for key in others[in_lanes + in_warps :]]
    lanes = [[0, column] for column in _bits(8, columns)] + [[key, 0] for key in others[:in_lanes]]
    warps = [[key, 0] for key in others[in_lanes : in_lanes + in_warps]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [128, columns])


@gluon.jit
def butterfly(x, DISTANCE: gl.constexpr):
    """Return sums and differences of columns DISTANCE apart; x is (rows, columns), both columns in one thread."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    pairs: gl.constexpr = columns // (2 * DISTANCE)
    low, high = x.reshape([rows, pairs, 2, DISTANCE]).permute([0, 1, 3, 2]).split()
    return gl.join(low + high, low - high).permute([0, 1, 3, 2]).reshape([rows, columns])


@gluon.jit
def signed(x, columns, SIGNS: gl.constexpr):
    """Return x with the sign of each column."""
    word = columns * 0 + SIGNS[0]
    for i in gl.static_range(1, x.shape[1] // 32):
        word = gl.where(columns // 32 == i, SIGNS[i], word)
    return gl.where(((word >> columns % 32) & 1 == 1)[None, :], -x, x)


@gluon.jit
def rotated(x, columns, SIGNS: gl.constexpr, WARPS: gl.constexpr):
    """Return the rows of x, rotated as by `fp8_reference.rotate`, in another layout, and the largest absolute value."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    HALF: gl.constexpr = COLUMNS // 2
    x = signed(x, columns, SIGNS)
    x = butterfly(butterfly(butterfly(x, 1), 2), 4)
    x = gl.convert_layout(x, distant_layout(ROWS, COLUMNS, WARPS, 8))
    x = butterfly(butterfly(x, 8), 16)
    if COLUMNS >= 128:
        x = butterfly(x, 32)
    if COLUMNS == 256:
        x = butterfly(x, 64)
    low, high = x.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
    largest = largest_of(gl.abs(low) + gl.abs(high))  # the larger of |low + high| and |low - high|, also when rounded
    x = gl.join(low + high, low - high).permute([0, 2, 1]).reshape([ROWS, COLUMNS])
    return x, largest


@gluon.jit
def largest_of(x):
    """Return the largest |x| that is not NaN, or 0."""
    return gl.maximum(gl.max(gl.max(gl.abs(x), 1), 0), 0.0)  # 0 if all are NaN


@gluon.jit
def with_exponent(x, largest):
    """Return x with NaN for infinity, and the biased exponent of the power of two that scales the rest to e4m3."""
    if largest == float("inf"):
        x = gl.where(gl.abs(x) < float("inf"), x, float("nan"))
        largest = largest_of(x)
    return x, gl.maximum(((largest.to(gl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, _SMALLEST)


@gluon.jit
def power_of_two(biased):
    """Return 2^(biased - 127)."""
    return (biased << 23).to(gl.float32, bitcast=True)


@gluon.jit
def rounded(x, biased):
    """Return x divided by the power of two, in e4m3."""
    return (x * power_of_two(254 - biased)).to(gl.float8e4nv)


@gluon.jit
def rows_of(x, stride_b, stride_s, stride_h, batch, block, head, seqlen, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
            layout: gl.constexpr):  # fmt: skip
    """Load a block of rows of one head in fp32; zeros past the end."""
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    first = x + batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    at = first + row[:, None].to(gl.int64) * stride_s + column[None, :]
    inside = (row < seqlen)[:, None] & (column < COLUMNS)[None, :]
    return gl.load(at, mask=inside, other=0.0).to(gl.float32), column


@gluon.jit
def quantise_rows(
    x, values, scales, largest, zeros, num_zeros, seqlen, num_heads, num_blocks, stride_b, stride_s, stride_h,
    value_b, value_s, value_h,
    COLUMNS: gl.constexpr, ROWS: gl.constexpr, SIGNS: gl.constexpr, DEQUANTISED: gl.constexpr, LARGEST: gl.constexpr,
    WARPS: gl.constexpr, ROTATED: gl.constexpr = True,
):  # fmt: skip
    """Quantise q of one block and head; store it in e4m3 with its scale, or DEQUANTISED, which bf16 holds exactly.

    LARGEST: store the largest finite value before the rotation, too, and zeros for sums over blocks, which must be at
    most 32 for each block and head. K and V, which is not ROTATED: only DEQUANTISED.
    """
    layout: gl.constexpr = adjacent_layout(ROWS, COLUMNS, WARPS, 8)
    head = gl.program_id(0) % num_heads
    block = gl.program_id(0) // num_heads % num_blocks
    batch = gl.program_id(0) // num_heads // num_blocks
    q, column = rows_of(x, stride_b, stride_s, stride_h, batch, block, head, seqlen, ROWS, COLUMNS, layout)
    if LARGEST:
        found = largest_of(q)
        if found == float("inf"):
            found = largest_of(gl.where(gl.abs(q) < float("inf"), q, 0.0))
        gl.store(largest + (batch * num_heads + head) * num_blocks + block, found)
        index = gl.program_id(0) * 32 + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        gl.store(zeros + index, gl.zeros_like(index).to(gl.float32), mask=index < num_zeros)
    if ROTATED:
        q, found = rotated(q, column, SIGNS, WARPS)
    else:
        found = largest_of(q)
    q, biased = with_exponent(q, found)
    to: gl.constexpr = layout if DEQUANTISED else adjacent_layout(ROWS, COLUMNS, WARPS, 16)
    q = gl.convert_layout(rounded(q, biased), to)
    if DEQUANTISED:
        q = (q.to(gl.float32) * power_of_two(biased)).to(gl.bfloat16)
    else:
        gl.store(scales + (batch * num_heads + head) * num_blocks + block, power_of_two(biased))
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, to))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, to))
    at = values + batch.to(gl.int64) * value_b + head.to(gl.int64) * value_h
    inside = (row < seqlen)[:, None] & (column < COLUMNS)[None, :]
    gl.store(at + row[:, None].to(gl.int64) * value_s + column[None, :], q, mask=inside)


@gluon.jit
def store_tile(record, x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Store x as contiguous bytes."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    gl.store(record + row[:, None] * COLUMNS + column[None, :], x)


@gluon.jit
def store_tail(tail, biased, WARPS: gl.constexpr):
    """Store a tail except the scale of k."""
    index = gl.arange(0, _NUM_TAIL, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.store(tail + index, gl.where(index == 1, power_of_two(biased), 0.0), mask=index > 0)


@gluon.jit
def quantise_keys(record, tail, k, column, SIGNS: gl.constexpr, WARPS: gl.constexpr):
    """Store the first tile of a record, and its scale."""
    COLUMNS: gl.constexpr = k.shape[1]
    k, largest = rotated(k, column, SIGNS, WARPS)
    k, biased = with_exponent(k, largest)
    gl.store(tail, power_of_two(biased))
    layout: gl.constexpr = adjacent_layout(k.shape[0], COLUMNS, WARPS, 16)
    store_tile(record, gl.convert_layout(rounded(k, biased), layout), k.shape[0], COLUMNS, layout)


@gluon.jit
def transposed(v, WARPS: gl.constexpr):
    """Return v as (columns, keys) with each 16 keys in KEY_ORDER."""
    KEYS: gl.constexpr = v.shape[0]
    COLUMNS: gl.constexpr = v.shape[1]
    layout: gl.constexpr = adjacent_layout(COLUMNS, KEYS, WARPS, 16)
    v = v.reshape([KEYS // 16, 2, 4, 2, COLUMNS]).permute([4, 0, 2, 1, 3]).reshape([COLUMNS, KEYS])
    return gl.convert_layout(v, layout)


@gluon.jit
def quantise_records(
    k, v, records, tails, numbers, seqlen, num_heads, num_blocks, k_b, k_s, k_h, v_b, v_s, v_h,
    COLUMNS: gl.constexpr, KEYS: gl.constexpr, SIGNS: gl.constexpr, TRANSPOSED: gl.constexpr, NUMBERED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Quantise k (even programs) or v (odd programs) of one record; NUMBERED: `numbers` says where it is stored."""
    layout: gl.constexpr = adjacent_layout(KEYS, COLUMNS, WARPS, 8)
    index = gl.program_id(0) // 2
    head = index % num_heads
    block = index // num_heads % num_blocks
    batch = index // num_heads // num_blocks
    number = gl.load(numbers + index) if NUMBERED else index.to(gl.int64)
    record = records + number * (2 * KEYS * COLUMNS + 4 * _NUM_TAIL)
    tail = tails + number * (KEYS * COLUMNS // 2 + _NUM_TAIL)
    if gl.program_id(0) % 2 == 0:
        keys, column = rows_of(k, k_b, k_s, k_h, batch, block, head, seqlen, KEYS, COLUMNS, layout)
        quantise_keys(record, tail, keys, column, SIGNS, WARPS)
    else:
        v_layout: gl.constexpr = _keys_layout(COLUMNS, WARPS) if TRANSPOSED else layout
        values, _ = rows_of(v, v_b, v_s, v_h, batch, block, head, seqlen, KEYS, COLUMNS, v_layout)
        values, biased = with_exponent(values, largest_of(values))
        store_tail(tail, biased, WARPS)
        values = rounded(values, biased)
        record += KEYS * COLUMNS
        if TRANSPOSED:
            store_tile(record, transposed(values, WARPS), COLUMNS, KEYS, adjacent_layout(COLUMNS, KEYS, WARPS, 16))
        else:
            to: gl.constexpr = adjacent_layout(KEYS, COLUMNS, WARPS, 16)
            store_tile(record, gl.convert_layout(values, to), KEYS, COLUMNS, to)


_WARPS = {64: 4, 128: 4, 256: 8}  # warps of a program for q, and for k and v
_KEY_WARPS = {64: 4, 128: 8, 256: 8}
# With 80 registers of a thread an SM runs half as many programs again, which takes a tenth less time. 256 spills.
_REGISTERS = {64: 80, 128: 80}


@functools.cache
def _launcher(kernel: Any, head_dim: int, warps: int) -> Launcher:
    return Launcher(kernel, specialised=True, num_warps=warps, max_registers=_REGISTERS.get(head_dim))


def quantise_q(q: Tensor) -> Rows:
    """See `fp8_reference.quantise_q`.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), bf16 or fp16; copied unless its last stride is 1.
    """
    scales = q.new_empty(q.shape[0], q.shape[2], -(-q.shape[1] // BLOCK_Q), dtype=torch.float32)
    return _rows(q, scales, None)


def quantise_and_measure_q(q: Tensor, scales: Tensor, largest: Tensor, zeros: Tensor) -> Rows:
    """Return `quantise_q` with these scales. Also write the largest finite |q| of each block of rows, and zeros.

    Args:
        scales, largest: (batch, num_heads, num_blocks), fp32.
        zeros: fp32, contiguous, at most 32 elements for each block and head.
    """
    return _rows(q, scales, largest, zeros)


def _rows(q: Tensor, scales: Tensor, largest: Tensor | None, zeros: Tensor | None = None) -> Rows:
    values = torch.empty(q.shape, dtype=E4M3, device=q.device)
    _quantise_rows(q, values, scales, largest, zeros)
    return Rows(values, scales)


def dequantised_q(q: Tensor) -> Tensor:
    """Return `quantise_q` of q times its scales, still rotated: (batch, seqlen_q, num_heads, head_dim), bf16, exact."""
    return _dequantised(q, BLOCK_Q, rotated=True)


def dequantised_kv(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded k, still rotated, and v of `quantise_kv` as `dequantised_q` does."""
    return _dequantised(k, BLOCK_K, rotated=True), _dequantised(v, BLOCK_K, rotated=False)


def _dequantised(x: Tensor, rows: int, *, rotated: bool) -> Tensor:
    values = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _quantise_rows(x, values, None, rows=rows, rotated=rotated)
    return values


def _quantise_rows(
    q: Tensor,
    values: Tensor,
    scales: Tensor | None,
    largest: Tensor | None = None,
    zeros: Tensor | None = None,
    *,
    rows: int = BLOCK_Q,
    rotated: bool = True,
) -> None:
    """Write values and scales of q, its largest values, and zeros; without `scales`, values times scales."""
    q = _with_unit_stride(q)
    batch, seqlen, num_heads, head_dim = q.shape
    num_blocks, dequantised = -(-seqlen // rows), scales is None
    warps = _WARPS[head_dim] if rows == BLOCK_Q else _KEY_WARPS[head_dim]
    with device_guard(q.device):
        _launcher(quantise_rows, head_dim, warps)(
            (head_dim, dequantised, largest is None, rows, rotated), num_blocks * num_heads * batch,
            q, values, values if scales is None else scales, values if largest is None else largest,
            values if zeros is None else zeros, 0 if zeros is None else zeros.numel(), seqlen, num_heads, num_blocks,
            *q.stride()[:3], *values.stride()[:3],
            COLUMNS=head_dim, ROWS=rows, SIGNS=SIGNS, DEQUANTISED=dequantised, LARGEST=largest is not None,
            WARPS=warps, ROTATED=rotated,
        )  # fmt: skip


def quantise_kv(
    k: Tensor, v: Tensor, *, for_backward: bool, out: Tensor | None = None, numbers: Tensor | None = None
) -> Tensor:
    """See `fp8_reference.quantise_kv`.

    Args:
        k, v: (batch, seqlen_k, num_kv_heads, head_dim), bf16 or fp16; copied unless their last stride is 1.
        out, numbers: as there, contiguous.
    """
    k, v = _with_unit_stride(k), _with_unit_stride(v)
    batch, seqlen, num_heads, head_dim = k.shape
    num_blocks = -(-seqlen // BLOCK_K)
    if out is None:
        out = torch.empty(batch, num_blocks, num_heads, record_bytes(head_dim), dtype=torch.uint8, device=k.device)
    assert out.is_contiguous() and (numbers is None or numbers.is_contiguous())  # the kernel gets no strides of them
    values, tails = out.view(E4M3), out.view(torch.float32)[..., -TAIL_BYTES // 4 :]
    warps, numbered = _KEY_WARPS[head_dim], numbers is not None
    with device_guard(k.device):
        _launcher(quantise_records, head_dim, warps)(
            (head_dim, for_backward, numbered), 2 * num_blocks * num_heads * batch,
            k, v, values, tails, values if numbers is None else numbers, seqlen, num_heads, num_blocks,
            *k.stride()[:3], *v.stride()[:3],
            COLUMNS=head_dim, KEYS=BLOCK_K, SIGNS=SIGNS, TRANSPOSED=not for_backward, NUMBERED=numbered, WARPS=warps,
        )  # fmt: skip
    return out


def _with_unit_stride(x: Tensor) -> Tensor:
    """Return x, or a copy if the columns of a row are not adjacent, which the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()
