"""The Hopper kernels as an implementation of `api`. Triton is imported only by a call that can use it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ringflash_kernels.hopper.environment import check_environment


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return the reason why this implementation cannot take the call, or None if it can.

    Raises:
        RuntimeError: the GPU is supported, but triton or its C compiler is not. Only the caller should decide to
            use a slower kernel instead.
    """
    if q.device.type != "cuda":
        return f"device {q.device.type} (cuda only)"
    if _capability(q.device) != (9, 0):
        return f"compute capability {'.'.join(map(str, _capability(q.device)))} (9.0)"
    check_environment()
    from ringflash_kernels.hopper.forward import host

    return host.unsupported(q, k, v)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def forward(*args: Any, **state: Any) -> None:
    """See `api.attention_forward`; arguments are checked there. `num_sms`: multiprocessors to use; default all."""
    from ringflash_kernels.hopper.forward import host

    host.forward(*args, **state)


def begin_backward(*args: Any, **kwargs: Any) -> Any:
    """See `api.begin_backward`."""
    from ringflash_kernels.hopper.backward import host

    return host.HopperBackward(*args, **kwargs)


def publish(*args: Any) -> None:
    """See `api.publish`."""
    from ringflash_kernels.hopper import gather_scatter

    gather_scatter.publish(*args)


def collect(*args: Tensor) -> None:
    """See `api.collect`."""
    from ringflash_kernels.hopper import gather_scatter

    gather_scatter.collect(*args)
