"""Liger's fused kernels in a transformers model, where they are installed."""

from __future__ import annotations

import inspect

import torch
from torch import nn


def use_liger(model: nn.Module) -> None:
    """Put Liger's RMSNorm, rotary embedding and SwiGLU into a model, in place.

    Liger replaces the rotary embedding in transformers' module, so for every model of the family in this process. Its
    losses are not used: they divide by the tokens of one rank (docs/memory.md).

    Raises:
        RuntimeError: liger-kernel is not installed, or there is no GPU for its kernels.
        NotImplementedError: a family that Liger does not know.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
    except ImportError as missing:
        raise RuntimeError(
            f"liger-kernel must be installed for liger=True, got {missing}; pip install liger-kernel, or set it False."
        ) from missing
    if not torch.cuda.is_available():
        raise RuntimeError("liger must be False without a GPU, got True; its kernels are CUDA kernels.")
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in known:
        raise NotImplementedError(f"model_type must be one that Liger knows, got {family!r}; set liger to False.")
    patch = known[family]
    losses = {"cross_entropy", "fused_linear_cross_entropy"} & set(inspect.signature(patch).parameters)
    patch(model=model, **dict.fromkeys(losses, False))
