"""Attention sinks, from the results of attention without them."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add attention sinks (GPT-OSS): one learned logit per head in every row's softmax, for a key with no value.

    The result is out * sigmoid(lse - sinks), of attention with any mask: `apply_sinks(*ring_attention(...,
    return_lse=True), sinks)`. It is differentiable with respect to all three.

    Args:
        out: (batch, seqlen, num_heads, head_dim).
        lse: (batch, num_heads, seqlen), natural log, fp32 or fp64, with its gradient. A row that sees no key, 0 and
            -inf, stays 0.
        sinks: (num_heads,), any floating dtype; unscaled, as the scores after softmax_scale.
    Returns:
        out: as out.
    Raises:
        ValueError: shapes that do not fit.
    Numerics: computed in lse's dtype, cast once.
    """
    batch, seqlen, num_heads, _ = out.shape
    if lse.shape != (batch, num_heads, seqlen) or sinks.shape != (num_heads,):
        raise ValueError(
            f"lse must be (batch, num_heads, seqlen) {(batch, num_heads, seqlen)} and sinks (num_heads,) {(num_heads,)}"
            f" for out {tuple(out.shape)}, got {tuple(lse.shape)} and {tuple(sinks.shape)}; transpose them."
        )
    gap = lse - sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(gap.masked_fill(lse == -torch.inf, -torch.inf))  # also with a sink of -inf
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype)
