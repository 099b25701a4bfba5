"""Kernels of the backward before its first hop and after its last.

preprocess   for every query row the pair (lse * log2(e), delta), delta = rowsum(dout * out) - dlse, and an fp32
             accumulator for dQ, zeroed on request. Rows that see nothing, and rows that pad a block, get lse = +inf,
             which makes their probabilities 0
postprocess  the accumulator scaled and cast, its columns put back in order
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringflash_kernels.hopper.launcher import Launcher

ROWS = 64  # rows of a program; statistics are padded to a multiple of it


@triton.jit
def _preprocess(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, stats_ptr, dq_ptr, seqlen, padded_seqlen, num_heads, num_blocks,
    out_batch, out_row, out_head, dout_batch, dout_row, dout_head,
    lse_batch, lse_head, lse_row, dlse_batch, dlse_head, dlse_row,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_DLSE: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """Compute (lse * log2(e), delta) of ROWS query rows of a head; with ZEROS, also fill their fp32 dQ with zeros."""
    block = tl.program_id(0) % num_blocks
    batch_head = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = row < seqlen
    loaded = inside[:, None]
    if HEAD_DIM < COLUMNS:
        loaded &= (column < HEAD_DIM)[None, :]
    value_loaded = loaded
    if VALUE_DIM < HEAD_DIM:
        value_loaded &= (column < VALUE_DIM)[None, :]

    out_at = batch * out_batch + row[:, None] * out_row + head * out_head + column[None, :]
    dout_at = batch * dout_batch + row[:, None] * dout_row + head * dout_head + column[None, :]
    out = tl.load(out_ptr + out_at, mask=value_loaded, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + dout_at, mask=value_loaded, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    lse = tl.load(lse_ptr + batch * lse_batch + head * lse_head + row * lse_row, mask=inside, other=float("-inf"))
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + batch * dlse_batch + head * dlse_head + row * dlse_row, mask=inside, other=0.0)
    empty = lse == float("-inf")
    stats_at = stats_ptr + batch_head * 2 * padded_seqlen + row
    tl.store(stats_at, tl.where(empty, float("inf"), lse * 1.4426950408889634))
    tl.store(stats_at + padded_seqlen, tl.where(empty, 0.0, delta))
    if ZEROS:
        dq_at = (batch_head * seqlen + row[:, None]) * HEAD_DIM + column[None, :]
        tl.store(dq_ptr + dq_at, tl.zeros([ROWS, COLUMNS], tl.float32), mask=loaded)


@triton.jit
def _postprocess(
    acc_ptr, dq_ptr, scale, seqlen, num_heads, num_blocks, first, dq_batch, dq_row, dq_head,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scale and cast dQ of ROWS query rows of a head, and undo `problem.interleave` of its columns."""
    program = first + tl.program_id(0)
    block = program % num_blocks
    batch_head = (program // num_blocks).to(tl.int64)
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    acc_at = (batch_head * seqlen + row) * HEAD_DIM + column
    inside = row < seqlen
    if HEAD_DIM < COLUMNS:
        inside &= column < HEAD_DIM
    x = tl.load(acc_ptr + acc_at, mask=inside, other=0.0) * scale
    x = tl.permute(tl.reshape(x, [ROWS, COLUMNS // 32, 4, 4, 2]), [0, 1, 3, 2, 4])
    x = tl.reshape(x, [ROWS, COLUMNS]).to(dq_ptr.dtype.element_ty)
    batch, head = batch_head // num_heads, batch_head % num_heads
    dq_at = batch * dq_batch + row * dq_row + head * dq_head + column
    tl.store(dq_ptr + dq_at, x, mask=inside)


_PREPROCESS, _POSTPROCESS = (Launcher(kernel, specialised=True) for kernel in (_preprocess, _postprocess))


def preprocess(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, stats: Tensor, dq: Tensor, heads: int, *, zeros: bool
) -> None:
    """Compute the statistics of every query row of the first heads, and fill their dq with zeros on request.

    Args:
        dout, out: (batch, seqlen_q, num_heads, value_dim), unit last stride. lse, dlse: (batch, num_heads, seqlen_q).
        stats, dq: see `statistics`.
        heads: of batch * num_heads.
    """
    _, seqlen, num_heads, value_dim = out.shape
    num_blocks, head_dim = -(-seqlen // ROWS), dq.shape[-1]
    has_dlse = dlse is not None
    dlse = lse if dlse is None else dlse
    _PREPROCESS(
        (head_dim, value_dim, has_dlse, zeros), num_blocks * heads,
        out, dout, lse, dlse, stats, dq, seqlen, num_blocks * ROWS, num_heads, num_blocks,
        *out.stride()[:3], *dout.stride()[:3], *lse.stride(), *dlse.stride(),
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, COLUMNS=1 << (head_dim - 1).bit_length(), ROWS=ROWS,
        HAS_DLSE=has_dlse, ZEROS=zeros,
    )  # fmt: skip


def statistics(q: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the statistics of every query row, (batch * num_heads, 2, padded seqlen_q), and dQ, (..., head_dim)."""
    batch, seqlen, num_heads, head_dim = q.shape
    stats = q.new_empty(batch * num_heads, 2, -(-seqlen // ROWS) * ROWS, dtype=torch.float32)
    return stats, q.new_empty(batch * num_heads, seqlen, head_dim, dtype=torch.float32)


def postprocess(acc: Tensor, dq: Tensor, softmax_scale: float, *, first: int = 0) -> None:
    """Write softmax_scale * acc to dq, with the columns back in order.

    Args:
        dq: (batch, seqlen_q, num_heads, head_dim), unit last stride.
        first: head of batch * num_heads to begin with.
    """
    batch, seqlen, num_heads, head_dim = dq.shape
    num_blocks = -(-seqlen // ROWS)
    _POSTPROCESS(
        head_dim, num_blocks * (batch * num_heads - first),
        acc, dq, softmax_scale, seqlen, num_heads, num_blocks, first * num_blocks, *dq.stride()[:3],
        HEAD_DIM=head_dim, COLUMNS=1 << (head_dim - 1).bit_length(), ROWS=ROWS,
    )  # fmt: skip
