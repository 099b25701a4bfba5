"""Attention of a single process: one launch over its own K/V; nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash.attention.inputs import BackwardInputs
from ringflash_kernels.api import begin_checked_backward, implementation, out_shape, state_dtype
from ringflash_kernels.mask import Mask


@dataclass(frozen=True)
class LocalAttention:
    """One attention call of a single process, without its tensors.

    Args:
        mask: visible pairs of rows and keys.
        impl: kernel implementation, chosen and checked.
    """

    mask: Mask
    impl: str
    softmax_scale: float
    deterministic: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, row_max: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute attention.

        Args:
            q: (batch, seqlen_local, num_heads, head_dim).  k, v: (batch, seqlen_local, num_kv_heads, head_dim).
            row_max: as lse; an upper bound on the scores of each row is written to it.
        Returns:
            out: as q, as wide as v.  lse: (batch, num_heads, seqlen_local), natural log.
        Numerics: lse, and out until it is cast, are fp32 (fp64 for fp64).
        """
        kernel = implementation(self.impl, q, k, v)
        out = q.new_empty(out_shape(q, v))
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=state_dtype(q.dtype), device=q.device)
        kept = {} if row_max is None else {"row_max": row_max}
        kernel.forward(q, k, v, self.mask, self.softmax_scale, out=out, lse=lse, acc=None, **kept)
        return out, lse

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of `forward`.

        Returns:
            dq: as q.  dk, dv: as k, v.
        Numerics: dq, dk and dv are summed in fp32 (fp64 for fp64) and cast once; with products of the backward in FP8,
            dq of up to 131,072 keys in fp16.
        """
        dout, dlse, q, k, v, out, lse, row_max = inputs
        # Contiguous: compiled code relies on the strides that the operators' fakes return.
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        gradients = begin_checked_backward(
            dout, q, out, lse, impl=self.impl, num_kv_heads=k.shape[2], softmax_scale=self.softmax_scale, dlse=dlse,
            deterministic=self.deterministic, row_max=row_max, num_keys=self.mask.seqlen_k, only_dq=dq,
        )  # fmt: skip
        gradients.add(k, v, self.mask, dk, dv, accumulate=False)
        return gradients.finish(dq), dk, dv

    def num_posted(self) -> int:
        """Batches of messages that this rank has posted: none."""
        return 0
