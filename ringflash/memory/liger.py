"""Liger's fused kernels in a transformers model."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable

import torch
from torch import nn


def use_liger(model: nn.Module, *, if_possible: bool) -> None:
    """Put Liger's RMSNorm, rotary embedding and SwiGLU into a model, in place.

    Liger replaces the rotary embedding in transformers' module, and thus for every model of the family in this process.
    Its losses are not used: they divide by the tokens of one rank (docs/plan.md).

    Args:
        if_possible: leave the model as it is instead of raising, with a warning if there is a GPU.
    Raises:
        RuntimeError: liger-kernel is not installed, or there is no GPU for its kernels.
        NotImplementedError: a family that Liger does not support.
    """
    try:
        patch = _patch_of(model)
    except RuntimeError as refusal:
        if not if_possible:
            raise
        if torch.cuda.is_available():
            warnings.warn(f"liger 'auto' goes without Liger's kernels: {refusal}", stacklevel=2)
        return
    _apply(patch, model)


def _patch_of(model: nn.Module) -> Callable[..., None]:
    """Return Liger's patch for the model's family. Raises as `use_liger`; NotImplementedError is a RuntimeError."""
    if not torch.cuda.is_available():
        raise RuntimeError("liger must be False without a GPU, got True; its kernels are CUDA kernels.")
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
    except ImportError as missing:
        raise RuntimeError(
            f"liger-kernel must be installed for liger=True, got {missing}; pip install liger-kernel, or set it False."
        ) from missing
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in known:
        raise NotImplementedError(f"model_type must be one that Liger knows, got {family!r}; set liger to False.")
    return known[family]


def _apply(patch: Callable[..., None], model: nn.Module) -> None:
    """Patch the model's modules, and restore the classes that Liger replaces in the family's Python module.

    transformers recognises modules to initialise by these classes; with Liger's, stacked experts would stay
    uninitialised.
    """
    losses = {"cross_entropy", "fused_linear_cross_entropy"} & set(inspect.signature(patch).parameters)
    names = {type(module).__module__ for module in model.modules()}
    families = [vars(sys.modules[name]) for name in names if name in sys.modules]
    classes = [{key: value for key, value in family.items() if isinstance(value, type)} for family in families]
    try:
        patch(model=model, **dict.fromkeys(losses, False))
    except Exception as error:  # for example, a dense layer in a model with experts
        raise NotImplementedError(
            f"model must be one that Liger can patch, got {type(error).__name__} for {type(model).__name__}: {error}; "
            "set liger to False."
        ) from error
    finally:
        for family, own in zip(families, classes, strict=True):
            family.update(own)
