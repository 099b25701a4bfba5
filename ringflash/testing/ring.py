"""Error of ring attention on random inputs, relative to the budget of `tolerance`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ringflash
from ringflash.comm.group import Group
from ringflash.testing import dense, tolerance


def measure_ring(
    group: Group, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int],
    cu_seqlens: Tensor | None = None, **mask: Any,
) -> dict[str, float]:  # fmt: skip
    """Return error over budget of this rank's out, dq, dk and dv; infinity if any of them is not finite.

    Args:
        shape: seqlen of the whole sequence, num_heads, num_kv_heads, head_dim.
        mask: causal and window_size, as `ring_attention`.
    """
    seqlen, num_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator("cpu").manual_seed(0)  # equal inputs on all ranks
    tensors = [
        torch.randn(1, seqlen, heads, head_dim, generator=generator, device="cpu").to(device, dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    ]
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    want, base = (
        dense.attention(*(x.to(kind) for x in tensors), cu_seqlens=bounds, **mask) for kind in (torch.float64, dtype)
    )
    q, k, v, dout = (ringflash.shard_sequence(x, group).requires_grad_() for x in tensors)
    out = ringflash.ring_attention(q, k, v, group=group, cu_seqlens=cu_seqlens, **mask)
    assert isinstance(out, Tensor)
    gradients = torch.autograd.grad(out, (q, k, v), dout.detach())
    got = {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    if not all(x.isfinite().all() for x in got.values()):
        return dict.fromkeys(got, float("inf"))
    want, base = ({key: ringflash.shard_sequence(x[key], group) for key in got} for x in (want, base))
    ratios = tolerance.measure(got, want, None if dtype == torch.float64 else base, num_chunks=2)
    return {key: max(max(r.maximum, r.mean) for r in ratios if r.name == key) for key in got}
