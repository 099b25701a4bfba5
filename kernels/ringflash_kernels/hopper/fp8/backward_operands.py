"""Operands of the FP8 backward, and dQ from its sums: each function is one launch.

Query row i has the weight w_i = n_i * exp(m_i - lse_i), where n_i = |dO_i| + |dlse_i|, and m_i is the row maximum of
the forward, so that exp(m_i - lse_i) is its largest probability. dV and dK are sums over rows and have one scale. W is
the largest weight of the heads that share a KV head, and w_i / W = a_i b_i is divided between the operands of a sum:

    dO8_i = 448 / n_i * dO_i                   P'_ij = 2^8 * a_i * exp(S_ij - m_i)
    delta'_i = 448 / n_i * delta_i             dS'_ij = 2^-g * P'_ij * (dO8_i V_j - delta'_i)
    dO8T_i = b_i * dO8_i                       dV_j = W / (448 * 2^8) * sum_i P'_ij dO8T_i
    Q8T_i = b_i * 448 / |Q|_max * Q_i          dK_j = scale * 2^g * W * |Q|_max / (448^2 * 2^8) * sum_i dS'_ij Q8T_i
                                               dQ_i = scale * b_i * W / (448 * 2^8) * sum_j dS'_ij (2^g K_j)

P' is at most 2^8. g is chosen per tile of 128 keys so that dS' cannot exceed 448: |dO8_i V_j| <= 448 |V_j|. So no
maxima are measured beforehand, and nothing saturates.

Where the number of keys is known, and so small that a sum in 16 bits is as good as e4m3 (`backward`), dQ is added up in
fp16: L2 adds half the bytes, in which it is the limit of the kernel otherwise. A sum is at most

    2^8 max_i exp(lse_i - m_i) * (480 max_j |V_j| + max_i |delta'_i|) * max_j |K_j|

with any part of the keys, since a_i <= 1. The unit of a KV head, a power of two, makes twice that 2^15 at most. A later
hop with larger keys has a smaller unit, to which dQ is brought before.

dQ_i is as precise as its own row of dS', whose smallest numbers e4m3 rounds to 0: a_i should be large. b_i may be as
small as 2^-9, because numbers of dO8_i are about 448 / sqrt(head_dim). So b_i is w_i / W from 2^-9 on, with a_i = 1,
then 2^-9, and below 2^-18 both are the square root. A row of a million equal keys has P' = 2^8 a_i like any other.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringflash_kernels.fp8_reference import BLOCK_K, BLOCK_Q, E4M3, SMALLEST_FACTOR, TAIL_BYTES
from ringflash_kernels.hopper.compat import gl, gluon
from ringflash_kernels.hopper.fp8.quantise import (
    SIGNS,
    adjacent_layout,
    butterfly,
    distant_layout,
    rows_of,
    signed,
)
from ringflash_kernels.hopper.launcher import Launcher

_RESCALE_PARTS = 8  # programs of a head
_MAXIMA = 8  # fp32 numbers of a KV head: see `QueryNumbers`
# fp32 scales of a tile: of S, dP, delta (before dP has its scale: with -1), dK, dV and dQ. At head_dim 256 the next one
# is that of K times that of V; the rest is unused.
SCALES = 8


@triton.jit
def _statistics(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, max_ptr, largest_q_ptr, rows_ptr, maxima_ptr, dq_ptr, seqlen, padded,
    num_heads, num_blocks, group,
    out_batch, out_row, out_head, dout_batch, dout_row, dout_head,
    lse_batch, lse_head, lse_row, dlse_batch, dlse_head, dlse_row, max_batch, max_head, max_row,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_DLSE: tl.constexpr, MAXIMA: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Compute `statistics` of ROWS query rows of a head; those of a KV head are joined by atomic maxima."""
    block = tl.program_id(0) % num_blocks
    batch_head = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, D)[None, :]
    inside = row < seqlen
    loaded = inside[:, None]
    out = tl.load(out_ptr + batch * out_batch + row[:, None] * out_row + head * out_head + column, mask=loaded, other=0)
    dout_at = dout_ptr + batch * dout_batch + row[:, None] * dout_row + head * dout_head + column
    dout = tl.load(dout_at, mask=loaded, other=0.0).to(tl.float32)
    delta = tl.sum(out.to(tl.float32) * dout, 1)
    size = tl.sqrt(tl.sum(dout * dout, 1))
    lse = tl.load(lse_ptr + batch * lse_batch + head * lse_head + row * lse_row, mask=inside, other=float("-inf"))
    if HAS_DLSE:
        dlse = tl.load(dlse_ptr + batch * dlse_batch + head * dlse_head + row * dlse_row, mask=inside, other=0.0)
        delta -= dlse
        size += tl.abs(dlse)
    # What is not finite in a row becomes NaN; e4m3 would round infinity to 448.
    size = tl.where(size < float("inf"), size, float("nan"))
    largest = tl.load(max_ptr + batch * max_batch + head * max_head + row * max_row, mask=inside, other=0.0)
    seen = lse != float("-inf")
    weight = tl.where(seen, size * tl.exp2((largest - tl.where(seen, lse, 0.0)) * 1.4426950408889634), 0.0)
    relative = delta * tl.where(size > 0.0, 448.0 / tl.maximum(size, 1e-30), size)
    relative = tl.where(tl.abs(relative) < float("inf"), relative, float("nan"))
    relative = tl.where(seen, relative, 0.0)

    at = rows_ptr + batch_head * 4 * padded + row
    tl.store(at, tl.where(seen, largest * 1.4426950408889634, float("inf")))
    tl.store(at + padded, relative)
    tl.store(at + 2 * padded, size)
    tl.store(at + 3 * padded, weight)
    # Values that are not finite must spoil only the rows that see them.
    maxima_at = maxima_ptr + batch_head // group * MAXIMA
    tl.atomic_max(maxima_at, tl.max(tl.where(weight < float("inf"), weight, 0.0), 0))
    relative = tl.abs(relative)
    tl.atomic_max(maxima_at + 1, tl.max(tl.where(relative < float("inf"), relative, 0.0), 0))
    tl.atomic_max(maxima_at + 2, tl.load(largest_q_ptr + tl.program_id(0)))
    total = tl.where(seen, tl.exp2((lse - largest) * 1.4426950408889634), 0.0)  # of the row's P, relative to exp(m)
    tl.atomic_max(maxima_at + 3, tl.max(tl.where(total < float("inf"), total, 0.0), 0))
    if ZEROS:
        dq_at = dq_ptr + (batch_head * seqlen + row[:, None]) * D + column
        tl.store(dq_at, tl.zeros([ROWS, D], dq_ptr.dtype.element_ty), mask=loaded)


@triton.jit
def _query_operands(
    dout_ptr, q_ptr, rows_ptr, maxima_ptr, dout8_ptr, dout1_ptr, q1_ptr, stats_ptr, factor_ptr, seqlen, padded,
    num_heads, num_blocks, group,
    dout_batch, dout_row, dout_head, q_batch, q_row, q_head,
    D: tl.constexpr, SMALLEST: tl.constexpr, FP8_GRADIENTS: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Make the `QueryOperands` of 64 query rows of a head.

    With FP8_GRADIENTS, q and a second dO are also rounded to e4m3, transposed. Without, q times its factor is bf16.
    """
    block = tl.program_id(0) % num_blocks
    batch_head = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    position = tl.arange(0, 64)
    # In KEY_ORDER: position 4 t + 2 h + e of every 16 holds the row 8 h + 2 t + e.
    row = block * 64 + (position // 16 * 16 + position // 2 % 2 * 8 + position // 4 % 4 * 2 + position % 2)
    row = row.to(tl.int64)
    column = tl.arange(0, D)
    loaded = (row < seqlen)[:, None]
    dout_at = dout_ptr + batch * dout_batch + row[:, None] * dout_row + head * dout_head + column[None, :]
    dout = tl.load(dout_at, mask=loaded, other=0.0).to(tl.float32)
    q_at = q_ptr + batch * q_batch + row[:, None] * q_row + head * q_head + column[None, :]
    q = tl.load(q_at, mask=loaded, other=0.0).to(tl.float32)
    at = rows_ptr + batch_head * 4 * padded + row
    reference, delta, size, weight = (
        tl.load(at),
        tl.load(at + padded),
        tl.load(at + 2 * padded),
        tl.load(at + 3 * padded),
    )
    dout *= tl.where(size > 0.0, 448.0 / tl.maximum(size, 1e-30), size)[:, None]
    flat = (batch * seqlen + row[:, None]) * num_heads * D + head * D + column[None, :]
    tl.store(dout8_ptr + flat, dout.to(tl.float8e4nv), mask=loaded)
    factor = size * (1.0 / 448.0)
    if FP8_GRADIENTS:
        maxima_at = maxima_ptr + batch_head // group * MAXIMA
        total = tl.load(maxima_at)
        share = weight / tl.maximum(total, 1e-30)
        root = tl.sqrt(share)
        of_operand = tl.where(share > SMALLEST, share, tl.where(root > SMALLEST, SMALLEST, root))
        of_p = share / tl.maximum(of_operand, 1e-30)
        reference -= tl.where(weight > 0.0, 8.0 + tl.log2(tl.maximum(of_p, 1e-30)), float("-inf"))
        factor = of_operand * (total * (1.0 / (448.0 * 256.0)))
        q *= (of_operand * (448.0 / tl.maximum(tl.load(maxima_at + 2), 1e-30)))[:, None]
        dout *= of_operand[:, None]
        turned = ((batch_head * D + column[:, None]) * padded) + block * 64 + position[None, :]
        tl.store(dout1_ptr + turned, tl.trans(dout.to(tl.float8e4nv)))
        tl.store(q1_ptr + turned, tl.trans(q.to(tl.float8e4nv)))
    else:
        tl.store(q1_ptr + flat, (q * factor[:, None]).to(tl.bfloat16), mask=loaded)
    stats_at = stats_ptr + batch_head * 2 * padded + row
    tl.store(stats_at, reference)
    tl.store(stats_at + padded, delta)
    tl.store(factor_ptr + batch_head * padded + row, factor)


@triton.jit
def _set_unit(
    tail_ptr, maxima_ptr, num_blocks, num_kv_heads, tail_batch, tail_block, tail_head,
    D: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Choose the unit of dQ in fp16 for a KV head, so that no sum overflows, and its ratio to the previous unit."""
    head, batch = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    at = tail_ptr + batch.to(tl.int64) * tail_batch + head.to(tl.int64) * tail_head
    block = tl.arange(0, 256)
    k_scale, v_scale = tl.zeros([256], tl.float32), tl.zeros([256], tl.float32)
    for first in range(0, num_blocks, 256):
        number = (first + block).to(tl.int64)
        inside = number < num_blocks
        k_scale = tl.maximum(k_scale, tl.load(at + number * tail_block, mask=inside, other=0.0))
        v_scale = tl.maximum(v_scale, tl.load(at + number * tail_block + 1, mask=inside, other=0.0))
    maxima_at = maxima_ptr + tl.program_id(0) * MAXIMA
    # Numbers of a scale are at most 448 times it.
    of_v = 480.0 * 448.0 * (D**0.5) * tl.max(v_scale, 0) + tl.load(maxima_at + 1)
    bound = 512.0 * 448.0 * tl.max(k_scale, 0) * tl.load(maxima_at + 3) * of_v
    bound = tl.maximum(tl.load(maxima_at + 4), tl.minimum(bound, 3e38))
    exponent = (bound.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23  # of the next power of two
    unit = ((tl.minimum(tl.maximum(127 + 127 + 15 - exponent, 1), 254)) << 23).to(tl.float32, bitcast=True)
    tl.store(maxima_at + 4, bound)
    tl.store(maxima_at + 6, unit / tl.load(maxima_at + 5))
    tl.store(maxima_at + 5, unit)


@triton.jit
def _rescale(dq_ptr, maxima_ptr, size, group, PARTS: tl.constexpr, MAXIMA: tl.constexpr):
    """Multiply the fp16 dQ of a head by the ratio of its new unit to the old one, unless that is 1."""
    batch_head = (tl.program_id(0) // PARTS).to(tl.int64)
    ratio = tl.load(maxima_ptr + batch_head // group * MAXIMA + 6)
    if ratio != 1.0:
        for first in range(tl.program_id(0) % PARTS * 2048, size, PARTS * 2048):
            at = first + tl.arange(0, 2048)
            old = tl.load(dq_ptr + batch_head * size + at, mask=at < size, other=0.0)
            tl.store(dq_ptr + batch_head * size + at, (old.to(tl.float32) * ratio).to(tl.float16), mask=at < size)


@triton.jit
def _key_operands(
    k8_ptr, v8_ptr, tail_ptr, maxima_ptr, k_ptr, v_ptr, tile_ptr, scale_log2, softmax_scale, num_blocks, num_kv_heads,
    of_batch, of_block, of_head, tail_batch, tail_block, tail_head,
    dk_ptr, dv_ptr, num_keys, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    D: tl.constexpr, MODE: tl.constexpr, HAS_UNIT: tl.constexpr, MAXIMA: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Dequantise, or transpose, a record's K and V as the products of MODE read them, and write the tile's SCALES.

    ZEROS: write zeros to the record's dK and dV, too.
    """
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    block = (tl.program_id(0) // num_kv_heads % num_blocks).to(tl.int64)
    batch = (tl.program_id(0) // (num_kv_heads * num_blocks)).to(tl.int64)
    position, column = tl.arange(0, 128), tl.arange(0, D)[None, :]
    row = position[:, None]
    if ZEROS:
        key = block * 128 + row
        zeros = tl.zeros([128, D], dk_ptr.dtype.element_ty)
        tl.store(dk_ptr + batch * dk_batch + key * dk_row + head * dk_head + column, zeros, mask=key < num_keys)
        tl.store(dv_ptr + batch * dv_batch + key * dv_row + head * dv_head + column, zeros, mask=key < num_keys)
    if MODE == "fp8" and D == 256:  # KEY_ORDER
        row = (position // 16 * 16 + position // 2 % 2 * 8 + position // 4 % 4 * 2 + position % 2)[:, None]
    elif MODE == "fp8":  # the position 2 r + h of every 16 holds the key r + 8 h
        row = (position // 16 * 16 + position % 2 * 8 + position // 2 % 8)[:, None]
    at = batch * of_batch + block * of_block + head * of_head + row * D + column
    tail = tail_ptr + batch * tail_batch + block * tail_block + head * tail_head
    k_scale, v_scale = tl.load(tail), tl.load(tail + 1)
    k8 = tl.load(k8_ptr + at)
    k = k8.to(tl.float32) * k_scale
    v = tl.load(v8_ptr + at).to(tl.float32) * v_scale
    to = ((batch * num_blocks + block) * 128 + row) * num_kv_heads * D + head * D + column
    if MODE == "bf16":
        tl.store(v_ptr + to, v.to(tl.bfloat16))
    else:
        gain = 1.0
        of_dk = softmax_scale
        of_dv = 1.0
        if MODE == "fp8":
            maxima_at = maxima_ptr + (batch * num_kv_heads + head) * MAXIMA
            total, delta, q = tl.load(maxima_at), tl.load(maxima_at + 1), tl.load(maxima_at + 2)
            size = tl.sqrt(tl.sum(v * v, 1))
            bound = (480.0 * tl.max(tl.where(size < float("inf"), size, 0.0), 0) + delta) * (256.0 / 448.0)
            exponent = (bound.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23  # of the next power of two
            gain = (tl.minimum(tl.maximum(exponent, 67), 187) << 23).to(tl.float32, bitcast=True)
            of_dv = total * (1.0 / (448.0 * 256.0))
            of_dk = softmax_scale * gain * of_dv * q * (1.0 / 448.0)
        tile = tile_ptr + ((batch * num_kv_heads + head) * num_blocks + block) * 8
        tl.store(tile, k_scale * scale_log2)
        tl.store(tile + 1, v_scale / gain)
        tl.store(tile + 2, -1.0 / v_scale if MODE == "fp8" else 1.0)
        tl.store(tile + 3, of_dk)
        tl.store(tile + 4, of_dv)
        of_dq = k_scale * gain
        if MODE == "fp8" and D == 256:
            tl.store(tile + 6, k_scale * v_scale)
            tl.atomic_max(maxima_at + 7, of_dq)
        if HAS_UNIT:
            of_dq *= tl.load(maxima_at + 5)
        tl.store(tile + 5, of_dq)
    if MODE == "fp8":
        turned = ((batch * num_blocks + block) * num_kv_heads + head) * D * 128 + tl.arange(0, D)[:, None] * 128
        tl.store(k_ptr + turned + position[None, :], tl.trans(k8))
    else:
        tl.store(k_ptr + to, k.to(tl.bfloat16))


@gluon.jit
def _rotate_back(
    x, factor, unit, out, scale, seqlen, padded, num_heads, num_blocks, group, x_b, x_s, x_h, out_b, out_s, out_h,
    D: gl.constexpr, ROWS: gl.constexpr, SIGNS: gl.constexpr, INTERLEAVED: gl.constexpr, HAS_FACTOR: gl.constexpr,
    HAS_UNIT: gl.constexpr, ACCUMULATE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Rotate ROWS rows of a head back, by a Hadamard transform in registers and signs, scale and store them."""
    ADJACENT: gl.constexpr = max(4, D // 32)
    to: gl.constexpr = adjacent_layout(ROWS, D, WARPS, 8)
    head = gl.program_id(0) % num_heads
    block = gl.program_id(0) // num_heads % num_blocks
    batch = gl.program_id(0) // num_heads // num_blocks
    y, _ = rows_of(x, x_b, x_s, x_h, batch, block, head, seqlen, ROWS, D, adjacent_layout(ROWS, D, WARPS, ADJACENT))
    y = butterfly(butterfly(y, 1), 2)
    if ADJACENT == 8:
        y = butterfly(y, 4)
    y = gl.convert_layout(y, distant_layout(ROWS, D, WARPS, ADJACENT))
    if ADJACENT == 4:
        y = butterfly(y, 4)
    y = butterfly(butterfly(butterfly(y, 8), 16), 32)
    if D >= 128:
        y = butterfly(y, 64)
    if D == 256:
        y = butterfly(y, 128)
    if INTERLEAVED:  # columns (j, t, e) of each 8 INTERLEAVED are (t, j, e)
        y = y.reshape([ROWS, D // (8 * INTERLEAVED), 4, INTERLEAVED, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, D])
    y = gl.convert_layout(y, to)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, to))
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, to))
    y = signed(y * scale, column, SIGNS)
    if HAS_FACTOR:
        of_head = factor + (batch * num_heads + head).to(gl.int64) * padded
        of_row = gl.load(of_head + row, mask=row < seqlen, other=0.0)
        if HAS_UNIT:
            of_unit = gl.load(unit + (batch * num_heads + head) // group * 8)
            of_row = of_row / gl.where(of_unit > 0.0, of_unit, 1.0)  # 0 if no key was visible
        y *= of_row[:, None]
    at = out + batch.to(gl.int64) * out_b + head.to(gl.int64) * out_h + row[:, None].to(gl.int64) * out_s
    at += column[None, :]
    inside = (row < seqlen)[:, None] & (column < D)[None, :]
    if ACCUMULATE:
        y += gl.load(at, mask=inside, other=0.0).to(gl.float32)
    gl.store(at, y.to(out.dtype.element_ty), mask=inside)


_SET_UNIT, _RESCALE = (Launcher(kernel, specialised=True) for kernel in (_set_unit, _rescale))
_WARPS = {64: 4, 128: 4, 256: 8}  # of a program of the others
_STATISTICS, _QUERY_OPERANDS, _KEY_OPERANDS, _ROTATE_BACK = (
    {warps: Launcher(kernel, specialised=True, num_warps=warps) for warps in (4, 8)}
    for kernel in (_statistics, _query_operands, _key_operands, _rotate_back)
)


class QueryNumbers(NamedTuple):
    """fp32 numbers of the query side, in one allocation; blocks have 64 rows.

    Args:
        rows: (batch * num_heads, 4, padded seqlen_q), fp32.
        stats: (batch * num_heads, 2, padded seqlen_q).
        factor: (batch * num_heads, padded seqlen_q), of rows of dQ.
        maxima: (batch * num_kv_heads, 8): W, the largest |delta'|, |Q| and exp(lse - m); by `KeyOperands` the bound of
            dQ over all hops so far, its unit, and that as a share of the earlier one; at head_dim 256 the largest
            product of 2^g and the scale of K.
        scales, largest_q: (batch, num_heads, blocks), scale of q and the largest finite |q| of each block.
        clock: (1,), int32.
    """

    rows: Tensor
    stats: Tensor
    factor: Tensor
    maxima: Tensor
    scales: Tensor
    largest_q: Tensor
    clock: Tensor

    @classmethod
    def of(cls, q: Tensor, num_kv_heads: int) -> QueryNumbers:
        """Allocate those of q: (batch, seqlen_q, num_heads, head_dim)."""
        batch, seqlen, num_heads, _ = q.shape
        heads, num_blocks = batch * num_heads, -(-seqlen // BLOCK_Q)
        padded = num_blocks * BLOCK_Q
        of_blocks = batch, num_heads, num_blocks
        shapes = (heads, 4, padded), (heads, 2, padded), (heads, padded), (batch * num_kv_heads, _MAXIMA), of_blocks
        sizes = [math.prod(shape) for shape in (*shapes, of_blocks, (1,))]
        starts = [0, *accumulate(-(-size // 4) * 4 for size in sizes)]  # multiples of 16 bytes
        memory = q.new_empty(starts[-1], dtype=torch.float32)
        parts = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        views = [part.view(shape) for part, shape in zip(parts, (*shapes, of_blocks), strict=False)]
        return cls(*views, parts[-1].view(torch.int32))


def statistics(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    row_max: Tensor,
    numbers: QueryNumbers,
    dq_dtype: torch.dtype,
    *,
    zeros: bool = True,
) -> Tensor:
    """Compute reference, delta', size and weight of each row, and the maxima over rows, which must be zeros before.

    Args:
        dout, out: (batch, seqlen_q, num_heads, head_dim), unit last stride. lse, dlse, row_max: (batch, num_heads,
            seqlen_q), fp32.
        numbers: with `largest_q`; this function writes rows and maxima.
    Returns:
        dq: (batch * num_heads, seqlen_q, head_dim), zeros if asked for.
    """
    batch, seqlen, num_heads, head_dim = out.shape
    num_blocks = -(-seqlen // BLOCK_Q)
    dq = out.new_empty(batch * num_heads, seqlen, head_dim, dtype=dq_dtype)
    has_dlse = dlse is not None
    dlse = lse if dlse is None else dlse
    _STATISTICS[_WARPS[head_dim]](
        (head_dim, has_dlse, dq_dtype, zeros), num_blocks * batch * num_heads,
        out, dout, lse, dlse, row_max, numbers.largest_q, numbers.rows, numbers.maxima, dq, seqlen,
        num_blocks * BLOCK_Q, num_heads, num_blocks, batch * num_heads // numbers.maxima.shape[0],
        *out.stride()[:3], *dout.stride()[:3], *lse.stride(), *dlse.stride(),
        *row_max.stride(), D=head_dim, ROWS=BLOCK_Q, HAS_DLSE=has_dlse, MAXIMA=_MAXIMA,
        ZEROS=zeros,
    )  # fmt: skip
    return dq


class QueryOperands:
    """Operands of the query side; if dout1 and q1 are e4m3, their rows are in KEY_ORDER.

    dout8: (batch, seqlen_q, num_heads, head_dim), e4m3. dout1, q1: operands of dV and dK, in e4m3 (batch, num_heads,
    head_dim, padded seqlen_q), in bf16 as dout8. Also writes stats and factor of `numbers`, from rows and maxima.
    """

    def __init__(self, dout: Tensor, q: Tensor, numbers: QueryNumbers, *, fp8_gradients: bool) -> None:
        batch, seqlen, num_heads, head_dim = q.shape
        rows, stats, factor, maxima, *_ = numbers
        padded = rows.shape[2]
        self.dout8 = q.new_empty(q.shape, dtype=E4M3)
        if fp8_gradients:
            self.dout1, self.q1 = q.new_empty(2, batch, num_heads, head_dim, padded, dtype=E4M3)
        else:
            self.dout1, self.q1 = dout.to(torch.bfloat16), q.new_empty(q.shape, dtype=torch.bfloat16)
        _QUERY_OPERANDS[_WARPS[head_dim]](
            (head_dim, fp8_gradients), padded // BLOCK_Q * batch * num_heads,
            dout, q, rows, maxima, self.dout8, self.dout1, self.q1, stats, factor, seqlen, padded,
            num_heads, padded // BLOCK_Q, batch * num_heads // maxima.shape[0], *dout.stride()[:3], *q.stride()[:3],
            D=head_dim, SMALLEST=SMALLEST_FACTOR, FP8_GRADIENTS=fp8_gradients,
            MAXIMA=_MAXIMA,
        )  # fmt: skip


class KeyOperands:
    """Operands of the key side that are not in the records.

    k: for the mode "fp8" (batch, num_blocks, num_kv_heads, head_dim, 128), e4m3, the keys of every 16 in the order of
    dS (`backward_keys`, `backward_queries`); otherwise (batch, num_blocks * 128, num_kv_heads, head_dim), bf16. v: as
    the latter, for the mode "bf16" only.
    scales: (batch, num_kv_heads, num_blocks, SCALES), fp32.

    Args:
        zeros: dk and dv, (batch, seqlen_k, num_kv_heads, head_dim), unit last stride, to be filled with zeros.
    """

    def __init__(
        self,
        records: Tensor,
        head_dim: int,
        maxima: Tensor,
        *,
        mode: str,
        softmax_scale: float,
        has_unit: bool = False,
        zeros: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        batch, num_blocks, num_kv_heads, _ = records.shape
        shape = (batch, num_blocks * BLOCK_K, num_kv_heads, head_dim)
        if mode == "fp8":
            self.k = records.new_empty(batch, num_blocks, num_kv_heads, head_dim, BLOCK_K, dtype=E4M3)
        else:
            self.k = records.new_empty(shape, dtype=torch.bfloat16)
        self.v = records.new_empty(shape, dtype=torch.bfloat16) if mode == "bf16" else self.k
        self.scales = records.new_empty(batch, num_kv_heads, num_blocks, SCALES, dtype=torch.float32)
        k8, v8, tail = parts(records, head_dim)
        if has_unit:
            _SET_UNIT(
                (head_dim,), batch * num_kv_heads, tail, maxima, num_blocks, num_kv_heads, *tail.stride()[:3],
                D=head_dim, MAXIMA=_MAXIMA,
            )  # fmt: skip
        dk, dv = (self.k, self.k) if zeros is None else zeros
        _KEY_OPERANDS[_WARPS[head_dim]](
            (head_dim, mode, has_unit, zeros is not None), batch * num_blocks * num_kv_heads,
            k8, v8, tail, maxima, self.k, self.v, self.scales, softmax_scale / head_dim * math.log2(math.e),
            softmax_scale, num_blocks, num_kv_heads, *k8.stride()[:3], *tail.stride()[:3],
            dk, dv, dk.shape[1], *dk.stride()[:3], *dv.stride()[:3], D=head_dim, MODE=mode,
            HAS_UNIT=has_unit, MAXIMA=_MAXIMA, ZEROS=zeros is not None,
        )  # fmt: skip


def rescale(dq: Tensor, maxima: Tensor) -> None:
    """Bring dQ of earlier hops to the unit of the last one. dq: (batch * num_heads, seqlen_q, head_dim), fp16."""
    _RESCALE(
        (), _RESCALE_PARTS * dq.shape[0], dq, maxima, dq.shape[1] * dq.shape[2], dq.shape[0] // maxima.shape[0],
        PARTS=_RESCALE_PARTS, MAXIMA=_MAXIMA,
    )  # fmt: skip


def parts(records: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of records: k8 and v8 (batch, num_blocks, num_kv_heads, 128, head_dim), and fp32 scales."""
    size = BLOCK_K * head_dim
    k8, v8, tail = records.split((size, size, TAIL_BYTES), -1)
    k8, v8 = (x.view(E4M3).unflatten(-1, (BLOCK_K, head_dim)) for x in (k8, v8))
    return k8, v8, tail.view(torch.float32)


def add_rotated_back(
    x: Tensor,
    out: Tensor,
    scale: float,
    *,
    factor: Tensor | None = None,
    maxima: Tensor | None = None,
    interleaved: bool = False,
    accumulate: bool = False,
) -> None:
    """Write head_dim * scale * factor * rotate_back(x) to out, or add it.

    Args:
        x: (batch, seqlen, num_heads, head_dim). interleaved: its columns have the order of the dQ accumulator.
        factor: (batch * num_heads, padded seqlen), one for each row. maxima: of `QueryNumbers`, if x has a unit.
        out: as x, any dtype; unit last stride.
    """
    batch, seqlen, num_heads, head_dim = x.shape
    num_blocks, warps = -(-seqlen // BLOCK_Q), _WARPS[head_dim]
    given = x if factor is None else factor
    unit = given if maxima is None else maxima[:, 5:]
    group = 1 if maxima is None else batch * num_heads // maxima.shape[0]
    order = 0 if not interleaved else 8 if x.dtype != torch.float32 and head_dim >= 128 else 4
    _ROTATE_BACK[warps](
        (head_dim, factor is None, maxima is None, order, x.dtype, accumulate), num_blocks * num_heads * batch,
        x, given, unit, out, scale, seqlen, given.shape[1], num_heads, num_blocks, group, *x.stride()[:3],
        *out.stride()[:3], D=head_dim, ROWS=BLOCK_Q, SIGNS=SIGNS, INTERLEAVED=order, HAS_FACTOR=factor is not None,
        HAS_UNIT=maxima is not None, ACCUMULATE=accumulate, WARPS=warps,
    )  # fmt: skip
