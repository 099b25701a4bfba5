"""The flash-attn-4 package (its CuTe kernels for compute capability 9.0 and 10.0), if it is installed.

It returns the log-sum-exp but cannot resume: each region of a mask is one call, and results are merged in fp32.
Used only on request: the package is a beta, and only its internal interface, which may change, takes a gradient of lse.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from ringflash_kernels.flash_calls import FlashCall, MergedBackward, merged_forward

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


def _flash(q: Tensor, k: Tensor, v: Tensor, call: FlashCall, softmax_scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    options = _options(call, q.device)
    out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=softmax_scale, return_lse=True, **options)
    return out, lse


forward = functools.partial(merged_forward, _flash)


class Flash4Backward(MergedBackward):
    """Gradients by flash-attn-4, hop by hop; see `api.begin_backward`."""

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
        call: FlashCall,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return dq, dk and dv of one operator call."""
        from flash_attn.cute.interface import _flash_attn_bwd

        options = _options(call, q.device)
        dq, dk, dv, *_ = _flash_attn_bwd(
            q, k, v, out, dout, lse, self.softmax_scale, dlse=dlse, deterministic=self.deterministic, **options
        )
        return dq, dk, dv


begin_backward = Flash4Backward


def _options(call: FlashCall, device: torch.device) -> dict[str, object]:
    """Return window and document bounds as arguments of flash-attn-4, to which None is unlimited."""
    left, right = (None if side < 0 else side for side in call.window)
    options: dict[str, object] = {"window_size_left": left, "window_size_right": right}
    if call.is_packed:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options |= dict(zip(names, call.lengths(device), strict=True))
    return options
