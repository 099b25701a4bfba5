"""The FP8 kernels as an implementation of `api`. Imports triton only for a call that can use it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ringflash_kernels.fp8_reference import HEAD_DIMS, Rows
from ringflash_kernels.hopper import implementation as exact
from ringflash_kernels.hopper.implementation import collect as collect
from ringflash_kernels.hopper.implementation import publish as publish
from ringflash_kernels.mask import Mask


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return the reason why this implementation cannot take the call, or None if it can.

    Raises:
        RuntimeError: as that of `hopper`.
    """
    if q.shape[-1] not in HEAD_DIMS:
        return f"head_dim {q.shape[-1]} (one of {', '.join(map(str, HEAD_DIMS))})"
    return exact.unsupported(q, k, v)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float, **state: Any) -> None:
    """See `api.attention_forward`; arguments are checked there. `num_sms`: multiprocessors to use, default all."""
    forward_rows(quantise_q(q), quantise_kv(k, v, for_backward=False), mask, softmax_scale, **state)


def forward_rows(rows: Rows, records: Tensor, mask: Mask, softmax_scale: float, **state: Any) -> None:
    """Compute `forward` of quantised operands; see `fp8_reference.forward_rows`."""
    from ringflash_kernels.hopper.fp8 import forward

    forward.forward(rows, records, mask, softmax_scale, **state)


def quantise_q(q: Tensor) -> Rows:
    """Return the rounded queries; see `fp8_reference.quantise_q`."""
    from ringflash_kernels.hopper.fp8 import quantise

    return quantise.quantise_q(q)


def quantise_kv(k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return the records of k and v; see `fp8_reference.quantise_kv`."""
    from ringflash_kernels.hopper.fp8 import quantise

    return quantise.quantise_kv(k, v, **options)


def begin_backward(*args: Any, **kwargs: Any) -> Any:
    """Begin the gradients of one attention; see `api.begin_backward`."""
    from ringflash_kernels.hopper.fp8 import backward

    return backward.Fp8Backward(*args, **kwargs)
