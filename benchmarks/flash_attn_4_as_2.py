"""flash-attn-4's kernels under the names that ring-flash-attention imports from flash_attn 2.

A comparison of rings should not depend on the kernel, so if flash_attn 2 is not installed, ring-flash-attention runs
with the faster kernels. Its adapter for Hugging Face cannot be imported with transformers 5 and is skipped.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

INTERFACE, ADAPTERS = "flash_attn.flash_attn_interface", "ring_flash_attn.adapters"
VARLEN = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward", "flash_attn_varlen_func", "flash_attn_func")
ADAPTER_NAMES = ("substitute_hf_flash_attn", "update_ring_flash_attn_params")


def provide() -> None:
    """Make `import ring_flash_attn` work; flash_attn 2 is used if it is installed."""
    try:
        importlib.import_module(INTERFACE)
    except ImportError:
        kernels = (_flash_attn_forward, _flash_attn_backward)
        _stand_in(INTERFACE, {**{kernel.__name__: kernel for kernel in kernels}, **dict.fromkeys(VARLEN, _refuse)})
    _stand_in(ADAPTERS, dict.fromkeys(ADAPTER_NAMES, _refuse))


def _stand_in(name: str, contents: dict[str, Any]) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def _refuse(*_: object, **__: object) -> None:
    raise NotImplementedError("ring-flash-attention must be called for whole sequences here; install flash_attn 2.")


def _flash_attn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: None = None, return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # fmt: skip
    """Return out (batch, seqlen, heads, head_dim), lse (fp32, batch, heads, seqlen), and two Nones as in version 2."""
    from flash_attn.cute.interface import _flash_attn_fwd

    found = _flash_attn_fwd(q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True)
    return found[0], found[1], None, None


def _flash_attn_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: None = None, deterministic: bool = False, rng_state: None = None,
) -> None:  # fmt: skip
    """Write dq, dk and dv."""
    from flash_attn.cute.interface import _flash_attn_bwd

    _flash_attn_bwd(q, k, v, out, dout, softmax_lse, softmax_scale, causal, 0.0, dq=dq, dk=dk, dv=dv)
