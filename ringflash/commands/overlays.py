"""Merging of recipes that are laid over each other, the same in training and in `ringflash plan`."""

from __future__ import annotations

from typing import Any

# `model.fp8_backward`, a key of earlier recipes, and what `model.impl` is in its place.
_FP8_BACKWARD = {"bf16": "hopper_fp8", "fp8_scores": "hopper_fp8_scores", "fp8": "hopper_fp8_all"}


def lay_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two mappings: values of `above` win, mappings are merged key by key.

    Exception: if the upper of two recipes names a checkpoint (`pretrained`), its `model.model` replaces the lower's,
    because its keys are changes of that checkpoint's config.json.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if key == "model" and above.get("pretrained") not in (None, below.get("pretrained")):
            old = None
        merged[key] = lay_over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def check_keys(recipe: object) -> None:
    """Raise ValueError if a recipe has a key that is no longer one."""
    model = recipe.get("model") if isinstance(recipe, dict) else None
    if isinstance(model, dict) and "fp8_backward" in model:
        given = model["fp8_backward"]
        impls = _FP8_BACKWARD.get(given, "one of " + ", ".join(_FP8_BACKWARD.values()))
        raise ValueError(f"model.fp8_backward must be left out, got {given!r}; write model.impl: {impls}.")
