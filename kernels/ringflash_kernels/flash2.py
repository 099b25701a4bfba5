"""torch's FlashAttention-2 operators, for CUDA devices that our kernels do not support.

They return the log-sum-exp but cannot resume: each region of a mask is one call, and results are merged in fp32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ringflash_kernels.flash_calls import FlashCall, MergedBackward, merged_forward

_DTYPES = (torch.float16, torch.bfloat16)


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return the reason why this implementation cannot take the call, or None if it can."""
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} (fp16 or bf16)"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"head_dim {q.shape[-1]} (a multiple of 8 up to 256)"
    if q.device.type != "cuda":
        return f"device {q.device.type} (cuda only)"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "compute capability below 8.0"
    return None


def _flash(q: Tensor, k: Tensor, v: Tensor, call: FlashCall, softmax_scale: float) -> tuple[Tensor, Tensor]:
    left, right = call.window
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *call.lengths(q.device), 0.0, False, False,
        scale=softmax_scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse


forward = functools.partial(merged_forward, _flash)


class Flash2Backward(MergedBackward):
    """Gradients by torch's operator, hop by hop; see `api.begin_backward`."""

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
        call: FlashCall,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return dq, dk and dv of one operator call.

        The operator computes dS = P (dout v^T - rowsum(dout * out)) and takes no dlse. With unit values, dlse as dout
        and an out of zeros that is P dlse, the gradient through lse.
        """
        dq, dk, dv = self._flash(dout, q, k, v, out, lse, call)
        if dlse is not None:
            of_lse, unit = torch.zeros_like(dout), torch.zeros_like(v)
            of_lse[..., 0] = dlse.transpose(-1, -2)
            unit[..., 0] = 1.0
            lse_dq, lse_dk, _ = self._flash(of_lse, q, k, unit, torch.zeros_like(out), lse, call)
            dq, dk = dq.float() + lse_dq, dk.float() + lse_dk
        return dq, dk, dv

    def _flash(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: FlashCall
    ) -> tuple[Tensor, ...]:
        no_dropout = torch.empty(0, dtype=torch.int64, device=q.device)
        left, right = call.window
        with _deterministic(self.deterministic):
            return torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, lse, *call.lengths(q.device), 0.0, False, no_dropout, no_dropout,
                scale=self.softmax_scale, window_size_left=left, window_size_right=right,
            )  # fmt: skip


begin_backward = Flash2Backward


@contextlib.contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Set torch's global switch for determinism; its operator has no argument for it."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if enabled:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
