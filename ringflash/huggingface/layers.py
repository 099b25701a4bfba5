"""The attention layers of a transformers model, and what its configuration says of each."""

from __future__ import annotations

from typing import Any

from torch import nn


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that follow `attn_implementation`, in the order of the layers."""
    return [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]


def layer_type(module: nn.Module) -> str | None:
    """The entry of `layer_types` for the layer of an attention module; None where there is none."""
    config: Any = getattr(module, "config", None)
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return types[index] if types and index is not None else None
