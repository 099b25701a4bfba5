"""What a model's forward was given: positions and document bounds, of which some tell their attention nothing."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn


class Given:
    """Notes at the start of a model's forward what it was given; its first layer asks once.

    Layers that are checkpointed ask again in the backward, when another forward may have begun: nothing is noted then.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._giver: str | None = None
        self._position_ids: Tensor | None = None

    @classmethod
    def watch(cls, model: nn.Module) -> Given:
        """The notes of a model's forwards; of a model that is watched already, the same."""
        for hook in model._forward_pre_hooks.values():
            if isinstance(hook, cls):
                return hook
        notes = cls(tuple(signature(type(model).forward).parameters)[1:])
        model.register_forward_pre_hook(notes, with_kwargs=True)
        return notes

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._giver = None if given.get("cu_seqlens") is None else type(model).__name__
        self._position_ids = given.get("position_ids")

    def take_positions(self) -> Tensor | None:
        """The positions that the model was given, for an attention that is not told of them."""
        positions, self._position_ids = self._position_ids, None
        return positions

    def find_loss(self, cu_seqlens: Tensor | None) -> Exception | None:
        """What is wrong with the bounds that the first layer got."""
        giver, self._giver = self._giver, None
        if giver is None or cu_seqlens is not None:
            return None
        return NotImplementedError(
            f"cu_seqlens must reach the attention, got None there from {giver}, which drops it; give each document a "
            "sequence of its own, or use another model."
        )


def is_recomputed() -> bool:
    """Whether this runs inside a backward, as a checkpointed layer does a second time."""
    return torch._C._current_graph_task_id() != -1
