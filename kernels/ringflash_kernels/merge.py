"""Combination of attention over two disjoint sets of keys, for implementations that cannot resume."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(acc: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Fold the attention (out, out_lse) over further keys into the state (acc, lse), in place.

        lse' = log(exp(lse) + exp(out_lse))        acc' = acc * exp(lse - lse') + out * exp(out_lse - lse')

    Args:
        acc: (batch, seqlen, num_heads, head_dim), fp32 or fp64, updated.
        lse: (batch, num_heads, seqlen), natural log, dtype of acc, updated.
        out, out_lse: the same shapes; any dtype.
    Numerics: computed in the dtype of acc; a row empty on both sides stays out = 0, lse = -inf.
    Source: the online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867, over blocks.
    """
    out_lse = out_lse.to(lse.dtype)
    total = torch.logaddexp(lse, out_lse)
    shift = torch.where(total == float("-inf"), torch.zeros_like(total), total)
    acc.mul_(_per_row(torch.exp(lse - shift)))
    acc.add_(out.to(acc.dtype) * _per_row(torch.exp(out_lse - shift)))
    lse.copy_(total)


def _per_row(weight: Tensor) -> Tensor:
    """View (batch, num_heads, seqlen) as a factor of (batch, seqlen, num_heads, head_dim)."""
    return weight.transpose(1, 2).unsqueeze(-1)
