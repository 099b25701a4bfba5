"""Check of ring attention without the model, with the model's masks, against dense attention in fp64."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringflash.comm.comparison import gather_values
from ringflash.testing.ring import measure_ring
from ringflash.verify.compare import Check
from ringflash.verify.target import Data

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
    """Compare `ring_attention` under one mask with dense attention in fp64; the check has the worst rank's ratios."""
    side = -1 if window is None else window - 1
    mask: dict[str, Any] = {"causal": causal, "window_size": (side, -1 if causal else side)}
    name = "attention alone" if window is None else f"attention alone, window {window}"
    shape = data.seqlen, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM
    mine = measure_ring(group, data.input_ids.device, dtype, shape, data.cu_seqlens, **mask)
    spent = gather_values(group, mine)
    worst = {key: max(part[key] for part in spent) for key in spent[0]}
    return Check(name, max(worst.values()), [key for key, ratio in worst.items() if not ratio <= 1])
