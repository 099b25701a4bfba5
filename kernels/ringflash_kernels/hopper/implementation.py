"""The Hopper kernels as an implementation of `api`. Imports triton only for a call that can use it."""

from __future__ import annotations

from typing import Any

import torch

from ringflash_kernels.hopper.environment import check_environment
from ringflash_kernels.mask import Mask


def unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why this implementation cannot take the call; None when it can.

    Raises:
        RuntimeError: the GPU is right, but triton or its C compiler is not. A slower kernel in its place should be
            the caller's decision.
    """
    if q.device.type != "cuda":
        return f"device {q.device.type} (cuda)"
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability(q.device)))} (9.0)"
    check_environment()
    from ringflash_kernels.hopper.forward import host

    return host.unsupported(q, k, v)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    acc: torch.Tensor | None = None,
    num_sms: int | None = None,
) -> None:
    """See `api.attention_forward`; arguments are checked there. `num_sms`: multiprocessors to use, default all."""
    from ringflash_kernels.hopper.forward import host

    host.forward(q, k, v, mask, softmax_scale, out=out, lse=lse, acc=acc, num_sms=num_sms)


def Backward(*args: Any, **kwargs: Any) -> Any:
    """Gradients of one attention, hop by hop; see `api.begin_backward`."""
    from ringflash_kernels.hopper.backward import host

    return host.Backward(*args, **kwargs)


def publish(
    k: torch.Tensor, v: torch.Tensor, area: torch.Tensor, lines: torch.Tensor, there: torch.Tensor, area_rows: int
) -> None:
    """See `api.publish`."""
    from ringflash_kernels.hopper import gather_scatter

    gather_scatter.publish(k, v, area, lines, there, area_rows)


def collect(own: torch.Tensor, others: torch.Tensor, sources: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """See `api.collect`."""
    from ringflash_kernels.hopper import gather_scatter

    gather_scatter.collect(own, others, sources, dk, dv)
