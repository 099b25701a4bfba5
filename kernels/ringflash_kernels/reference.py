"""Eager attention on any device and in any usual dtype: the specification the kernels are measured against.

Low-precision inputs are computed in fp32, fp64 inputs in fp64. Nothing is fused; rows are processed in
blocks so that the score matrix stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ringflash_kernels.mask import Mask
from ringflash_kernels.merge import merge_

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_SCORES = 1 << 20  # scores of one block of rows: several such blocks fit a CPU's cache

_num_pieces = 1


@contextmanager
def keys_in_pieces(number: int) -> Iterator[None]:
    """Let attention of this process merge pieces of its keys, the last one first, as the hops of a ring are merged."""
    global _num_pieces
    before, _num_pieces = _num_pieces, number
    try:
        yield
    finally:
        _num_pieces = before


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return the reason why this implementation cannot take the call, or None if it can."""
    return None if q.dtype in _DTYPES else f"dtype {q.dtype} (fp16, bf16, fp32 or fp64)"


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse, of the carried output and of accumulated gradients: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: Tensor,
    lse: Tensor,
    acc: Tensor | None = None,
) -> None:
    """See `api.attention_forward`; arguments are checked there."""
    if acc is None:
        out.zero_()
        lse.fill_(float("-inf"))
        state = out if out.dtype == lse.dtype else torch.zeros_like(out, dtype=lse.dtype)
    else:
        state = acc
    for rows, cols, visible in _blocks(q, mask):
        scores = _scores(q[:, rows], k[:, cols], softmax_scale).masked_fill(~visible, float("-inf"))
        part_lse = scores.logsumexp(-1)
        part = _weighted_values(_probabilities(scores, part_lse, visible), v[:, cols], visible)
        merge_(state[:, rows], lse[..., rows], part, part_lse.flatten(1, 2))
    if state is not out:
        out.copy_(state)


class ReferenceBackward:
    """Eager gradients of one attention, hop by hop; see `api.begin_backward`."""

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float,
        dlse: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        del deterministic  # every operation here is deterministic
        dtype = state_dtype(q.dtype)
        self.q, self.lse, self.softmax_scale = q, lse, softmax_scale
        self.dout = dout.to(dtype)
        self.delta = (self.dout * out.to(dtype)).sum(-1).transpose(1, 2)
        if dlse is not None:
            self.delta = self.delta - dlse
        self.dq = torch.zeros_like(q, dtype=dtype)

    def add(self, k: Tensor, v: Tensor, mask: Mask, dk: Tensor, dv: Tensor, *, accumulate: bool = True) -> None:
        """Add the gradients of the pairs of `mask` to dk, dv and self.dq; see `BackwardPass.add` of `api`."""
        num_kv_heads = k.shape[2]
        grad_k, grad_v = (torch.zeros_like(x, dtype=self.dq.dtype) for x in (k, v))
        for rows, cols, visible in _blocks(self.q, mask):
            q, dout = (_group(x[:, rows].to(self.dq.dtype), num_kv_heads) for x in (self.q, self.dout))
            keys, values = (x[:, cols].to(self.dq.dtype) for x in (k, v))
            lse, delta = (x[..., rows].unflatten(1, (num_kv_heads, -1)) for x in (self.lse, self.delta))
            p = _probabilities(_scores(self.q[:, rows], k[:, cols], self.softmax_scale), lse, visible)
            dp = torch.einsum("bihgd,bjhd->bhgij", dout, values)
            ds = (p * (dp - delta.unsqueeze(-1)) * self.softmax_scale).masked_fill(~visible, 0.0)
            self.dq[:, rows] += torch.einsum("bhgij,bjhd->bihgd", ds, keys).flatten(2, 3)
            grad_k[:, cols] += torch.einsum("bhgij,bihgd->bjhd", ds, q)
            grad_v[:, cols] += torch.einsum("bhgij,bihgd->bjhd", p, dout)
        for total, part in ((dk, grad_k), (dv, grad_v)):
            total.add_(part) if accumulate else total.copy_(part)

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Return dq: (batch, seqlen_q, num_heads, head_dim), dtype of q; in `out` if given."""
        return self.dq.to(self.q.dtype) if out is None else out.copy_(self.dq)


begin_backward = ReferenceBackward


def _blocks(q: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield blocks of query rows, and the columns from the first to the last that they see, with their visibility."""
    if not mask.regions:
        return
    first, end = mask.q_span
    visible = mask.dense(q.device)
    starts, stops = mask.bounds("cpu")
    num_keys = mask.k_span[1] - mask.k_span[0]
    block = max(1, _MAX_SCORES // (q.shape[0] * q.shape[2] * num_keys))
    size = -(-num_keys // _num_pieces)
    for start in range(first, end, block):
        rows = slice(start, min(start + block, end))
        stop = int(stops[rows].max())
        for left in reversed(range(int(starts[rows].min()), stop, size)):
            piece = slice(left, min(left + size, stop))
            yield rows, piece, visible[rows, piece]


def _scores(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Return scaled scores: (batch, num_kv_heads, group, rows, columns)."""
    dtype = state_dtype(q.dtype)
    return torch.einsum("bihgd,bjhd->bhgij", _group(q.to(dtype), k.shape[2]), k.to(dtype)) * softmax_scale


def _probabilities(scores: Tensor, lse: Tensor, visible: Tensor) -> Tensor:
    """Return exp(scores - lse), exactly zero for invisible pairs, also in rows that see nothing or hold NaN."""
    shift = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    return torch.exp(scores - shift.unsqueeze(-1)).masked_fill(~visible, 0.0)


def _weighted_values(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return p v: (batch, rows, num_heads, head_dim). A NaN or infinity in v reaches only the rows that see it."""
    broken = ~torch.isfinite(v)
    out = torch.einsum("bhgij,bjhd->bihgd", p, v.to(p.dtype).masked_fill(broken, 0.0)).flatten(2, 3)
    if broken.any():
        seen = torch.einsum("ij,bjhd->bihd", visible.to(p.dtype), broken.to(p.dtype)) > 0
        out = out.masked_fill(seen.repeat_interleave(p.shape[2], 2), float("nan"))
    return out


def _group(x: Tensor, num_kv_heads: int) -> Tensor:
    """View (batch, rows, num_heads, head_dim) as (batch, rows, num_kv_heads, group, head_dim)."""
    return x.unflatten(2, (num_kv_heads, -1))
