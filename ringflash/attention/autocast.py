"""Attention takes q, k and v in one dtype; under autocast they come in several."""

from __future__ import annotations

import torch


def autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype that autocast gives torch's own attention; itself where autocast is off, and fp64."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))
