"""transformers' own loss of a model on a ring, which must not shift labels or add to the loss inside a shard."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import nn

from ringflash.huggingface.adapters import check_adapters
from ringflash.huggingface.forward_inputs import Given, labels_error


class ShardLoss:
    """The `loss_function` of a model: transformers' own, after a look at what only it sees.

    A wrapper may call a model's forward past its hooks, and some models drop `shift_labels` on the way to their loss.
    """

    def __init__(self, model: nn.Module, compute: Callable[..., Any], given: Given) -> None:
        self._model, self._compute, self._given = model, compute, given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of logits and labels."""
        if self._given.options.group is not None:
            check_adapters(self._model)  # put on since set_group
            if kwargs.get("shift_labels") is None:
                raise labels_error()
        return self._compute(*args, **kwargs)


def guard_losses(model: nn.Module, given: Given) -> None:
    """Have every causal language model within `model` refuse labels that it would shift inside a shard."""
    for module in model.modules():
        has_head = hasattr(type(module), "loss_function") and module.get_output_embeddings() is not None  # type: ignore[operator]
        compute: Any = module.loss_function if has_head else None
        if compute is None or isinstance(compute, ShardLoss) or "shift_labels" not in signature(compute).parameters:
            continue
        module.loss_function = ShardLoss(module, compute, given)  # type: ignore[assignment]
        module.register_forward_pre_hook(given.note_labels, with_kwargs=True)
