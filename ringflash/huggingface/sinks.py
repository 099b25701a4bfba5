"""Attention sinks (GPT-OSS): a logit more in the softmax of each row, learned for each head, of a key without value."""

from __future__ import annotations

import torch
from torch import Tensor


def beside_sinks(attended: tuple[Tensor, Tensor], sinks: Tensor) -> Tensor:
    """Attention whose softmax has a sink in its denominator, from attention without: out * sigmoid(lse - sinks).

    Args:
        attended: out, (batch, seqlen, num_heads, head_dim), and lse, (batch, num_heads, seqlen), fp32 or fp64, with
            gradients, as `ring_attention` returns them. A row that sees nothing, 0 and -inf, stays 0.
        sinks: (num_heads,).
    Numerics: computed in lse's dtype, cast once.
    """
    out, lse = attended
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype)
