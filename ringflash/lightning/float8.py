"""Linear layers in FP8, by torchao."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ringflash.huggingface.weights import modules_in_fp32

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def multiply_in_float8(model: Any, recipe: str, device_type: str) -> None:
    """Replace the linear layers of a transformers model by torchao's in FP8, in place; parameters keep their names.

    The output embedding, modules that stay in fp32, and sizes that are not multiples of 16 (tensor cores need them) are
    left as they are. Each layer is compiled on GPUs, since torchao's rounding is slow otherwise; CPUs emulate it.

    Args:
        recipe: "tensorwise", "rowwise", or "rowwise_with_gw_hp", whose weight gradients are not rounded.
    Raises:
        ValueError: an unknown recipe.
        RuntimeError: torchao is not installed.
    """
    if recipe not in RECIPES:
        raise ValueError(f"float8 must be one of {', '.join(RECIPES)}, got {recipe!r}; leave it out for bf16 products.")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ModuleNotFoundError as missing:
        raise RuntimeError(
            f"torchao must be installed for float8, got {missing}; pip install 'ringflash[float8]'."
        ) from missing
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=device_type != "cuda")
    left = {model.get_output_embeddings(), *(part for unit in modules_in_fp32(model) for part in unit.modules())}
    convert_to_float8_training(
        model,
        config=config,
        module_filter_fn=lambda layer, _: layer not in left and not any(size % 16 for size in layer.weight.shape),
    )
    if device_type == "cuda":
        # Variants are compiled by shape, with gradients and without; the default limit is 8.
        torch._dynamo.config.recompile_limit = 64
        for layer in model.modules():
            if isinstance(layer, Float8Linear):
                layer.compile(dynamic=False)
