"""The flash-attn-4 package (its CuTe kernels for compute capability 9.0 and 10.0), if it is installed.

It returns the log-sum-exp but cannot resume: each region of a mask is one call, and results are merged in fp32.
Used only on request: the package is a beta, and only its internal interface, which may change, takes a gradient of lse.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ringflash_kernels.flash_calls import FlashCall, MergedBackward, merged_forward
from ringflash_kernels.mask import Mask

_DTYPES = (torch.float16, torch.bfloat16)
_CAPABILITIES = (9, 10)
_HEAD_DIMS = (64, 96, 128, 192, 256)


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return the reason why this implementation cannot take the call, or None if it can."""
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} (fp16 or bf16)"
    if q.shape[-1] not in _HEAD_DIMS:
        return f"head_dim {q.shape[-1]} (one of {_HEAD_DIMS})"
    if q.device.type != "cuda":
        return f"device {q.device.type} (cuda only)"
    if torch.cuda.get_device_capability(q.device)[0] not in _CAPABILITIES:
        return "a compute capability other than 9.x and 10.x"
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "a machine without flash-attn-4 (pip install flash-attn-4)"
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


class Flash4Backward(MergedBackward):
    """Gradients by flash-attn-4, hop by hop; see `api.begin_backward`."""

    def gradients(self, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of one operator call."""
        from flash_attn.cute.interface import _flash_attn_bwd

        rows = call.rows
        q, out, dout, lse = self.q[:, rows], self.out[:, rows], self.dout[:, rows], self.lse[..., rows].contiguous()
        dlse = None if self.dlse is None else self.dlse[..., rows].contiguous()
        if call.is_packed:
            q, k, v, out, dout, lse = (x.squeeze(0) for x in (q, k, v, out, dout, lse))
            dlse = None if dlse is None else dlse.squeeze(0)
        options = _options(call, q.device)
        grads = _flash_attn_bwd(
            q, k, v, out, dout, lse, self.softmax_scale, dlse=dlse, deterministic=self.deterministic, **options
        )
        dq, dk, dv = (x.unsqueeze(0) for x in grads[:3]) if call.is_packed else grads[:3]
        return dq, dk, dv


begin_backward = Flash4Backward


def _flash(q: Tensor, k: Tensor, v: Tensor, call: FlashCall, softmax_scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    if call.is_packed:
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    options = _options(call, q.device)
    out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=softmax_scale, return_lse=True, **options)
    return (out.unsqueeze(0), lse.unsqueeze(0)) if call.is_packed else (out, lse)


def _options(call: FlashCall, device: torch.device) -> dict[str, object]:
    """Return window and document bounds as arguments of flash-attn-4, to which None is unlimited."""
    left, right = (None if side < 0 else side for side in call.window)
    options: dict[str, object] = {"window_size_left": left, "window_size_right": right}
    if call.is_packed:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options |= dict(zip(names, call.lengths(device), strict=True))
    return options
