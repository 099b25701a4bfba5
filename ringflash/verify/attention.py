"""Check of ring attention without the model, with the model's masks, against dense attention in fp64."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ringflash
from ringflash.comm.comparison import gather_values
from ringflash.testing import dense, tolerance
from ringflash.verify.compare import Check
from ringflash.verify.subject import Data

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64


def attention_checks(
    group: dist.ProcessGroup, data: Data, windows: set[int | None], causal: bool, dtype: torch.dtype
) -> list[Check]:
    """Run one check per window (the query's own key included; None is unlimited); results are equal on all ranks.

    fp32 is checked in fp64: in fp32 the ring's legitimate rounding is as large as the rounding of fp32 itself.
    """
    kind = torch.float64 if dtype == torch.float32 else dtype
    return [_check(group, data, window, causal, kind) for window in sorted(windows, key=lambda w: w or 0)]


def _check(group: dist.ProcessGroup, data: Data, window: int | None, causal: bool, dtype: torch.dtype) -> Check:
    side = -1 if window is None else window - 1
    mask = {"causal": causal, "window_size": (side, -1 if causal else side)}
    name = "attention alone" if window is None else f"attention alone, window {window}"
    spent = gather_values(group, _spent(group, data, mask, dtype))
    worst = {key: max(part[key] for part in spent) for key in spent[0]}
    return Check(name, max(worst.values()), [key for key, ratio in worst.items() if not ratio <= 1])


def _spent(group: dist.ProcessGroup, data: Data, mask: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Return error over budget of this rank's out, dq, dk and dv; infinity if any of them is not finite."""
    tensors = _draw(data, dtype)
    bounds = None if data.cu_seqlens is None else data.cu_seqlens.tolist()
    want, base = (
        dense.attention(*(x.to(kind) for x in tensors), cu_seqlens=bounds, **mask) for kind in (torch.float64, dtype)
    )
    q, k, v, dout = (ringflash.shard_sequence(x, group).requires_grad_() for x in tensors)
    out = ringflash.ring_attention(q, k, v, group=group, cu_seqlens=data.cu_seqlens, **mask)
    assert isinstance(out, torch.Tensor)
    gradients = torch.autograd.grad(out, (q, k, v), dout.detach())
    got = {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    if not all(x.isfinite().all() for x in got.values()):
        return dict.fromkeys(got, float("inf"))
    want, base = ({key: ringflash.shard_sequence(x[key], group) for key in got} for x in (want, base))
    ratios = tolerance.measure(got, want, None if dtype == torch.float64 else base, num_chunks=2)
    return {key: max(max(r.maximum, r.mean) for r in ratios if r.name == key) for key in got}


def _draw(data: Data, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Draw q, k, v and dout of the whole sequence, equal on all ranks."""
    generator = torch.Generator("cpu").manual_seed(0)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    shapes = ((1, data.seqlen, num, HEAD_DIM) for num in heads)
    drawn = (torch.randn(*s, generator=generator, device="cpu") for s in shapes)
    return tuple(x.to(data.input_ids.device, dtype) for x in drawn)
