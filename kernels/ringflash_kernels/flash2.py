"""torch's FlashAttention-2 operators, for CUDA devices that our kernels do not support.

They return the log-sum-exp but cannot resume: each region of a mask is one call, and results are merged in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ringflash_kernels.flash_calls import FlashCall, MergedBackward, merged_forward
from ringflash_kernels.mask import Mask

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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: Tensor,
    lse: Tensor,
    acc: Tensor | None = None,
) -> None:
    """See `api.attention_forward`; arguments are checked there."""
    merged_forward(_flash, q, k, v, mask, softmax_scale, out=out, lse=lse, acc=acc)


class Flash2Backward(MergedBackward):
    """Gradients by torch's operator, hop by hop; see `api.begin_backward`."""

    def gradients(self, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of one operator call."""
        dq, dk, dv = self._flash(self.dout, self.out, k, v, call)
        if self.dlse is not None:
            lse_dq, lse_dk = self._lse_gradients(k, v, call)
            dq, dk = dq.float() + lse_dq, dk.float() + lse_dk
        return dq, dk, dv

    def _lse_gradients(self, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        """Return the gradients dq and dk through lse: dS = P dlse.

        The operator computes dS = P (dout v^T - rowsum(dout * out)) and takes no dlse. With unit values, dlse as
        dout and zero out that is P dlse.
        """
        assert self.dlse is not None
        dout, unit = torch.zeros_like(self.q), torch.zeros_like(v)
        dout[..., 0] = self.dlse.transpose(1, 2)
        unit[..., 0] = 1.0
        dq, dk, _ = self._flash(dout, torch.zeros_like(self.q), k, unit, call)
        return dq, dk

    def _flash(self, dout: Tensor, out: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        rows = call.rows
        dout, q, out, lse = dout[:, rows], self.q[:, rows], out[:, rows], self.lse[..., rows]
        cum_q, cum_k, max_q, max_k = call.lengths(q.device)
        if call.is_packed:
            dout, q, k, v, out, lse = (x.squeeze(0) for x in (dout, q, k, v, out, lse))
        no_dropout = torch.empty(0, dtype=torch.int64, device=q.device)
        left, right = call.window
        with _deterministic(self.deterministic):
            grads = torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, lse.contiguous(), cum_q, cum_k, max_q, max_k, 0.0, False, no_dropout, no_dropout,
                scale=self.softmax_scale, window_size_left=left, window_size_right=right,
            )  # fmt: skip
        dq, dk, dv = (x.unsqueeze(0) for x in grads) if call.is_packed else grads
        return dq, dk, dv


begin_backward = Flash2Backward


def _flash(q: Tensor, k: Tensor, v: Tensor, call: FlashCall, softmax_scale: float) -> tuple[Tensor, Tensor]:
    cum_q, cum_k, max_q, max_k = call.lengths(q.device)
    if call.is_packed:
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    left, right = call.window
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cum_q, cum_k, max_q, max_k, 0.0, False, False,
        scale=softmax_scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return (out.unsqueeze(0), lse.unsqueeze(0)) if call.is_packed else (out, lse)


@contextlib.contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Set torch's global switch for determinism; its operator has no argument for it."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if enabled:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
