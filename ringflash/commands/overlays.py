"""Merging of recipes that are laid over each other, the same in training and in `ringflash plan`."""

from __future__ import annotations

from typing import Any


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
