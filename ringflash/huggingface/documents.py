"""Whether the document bounds that a model was given reach its attention: some models drop them on the way."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Documents:
    """Notes at the start of a model's forward whether it was given bounds; its first layer asks once.

    Layers that are checkpointed ask again in the backward, when another forward may have begun: nothing is noted then.
    """

    def __init__(self) -> None:
        self._giver: str | None = None

    @classmethod
    def watch(cls, model: nn.Module) -> Documents:
        """The notes of a model's forwards; of a model that is watched already, the same."""
        for hook in model._forward_pre_hooks.values():
            if isinstance(hook, cls):
                return hook
        notes = cls()
        model.register_forward_pre_hook(notes, with_kwargs=True)
        return notes

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook."""
        self._giver = None if kwargs.get("cu_seqlens") is None else type(model).__name__

    def find_loss(self, cu_seqlens: Tensor | None) -> Exception | None:
        """What is wrong with the bounds that the first layer got."""
        giver, self._giver = self._giver, None
        if giver is None or cu_seqlens is not None:
            return None
        return NotImplementedError(
            f"cu_seqlens must reach the attention, got None there from {giver}, which drops it; give each document a "
            "sequence of its own, or use another model."
        )
