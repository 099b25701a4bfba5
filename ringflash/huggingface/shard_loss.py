"""Guards of transformers' own loss, which would be computed from a shard only."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any
from weakref import ref

from torch import nn

from ringflash.huggingface.rank_errors import raise_on_every_rank
from ringflash.huggingface.validation import check_adapters


class ShardLoss:
    """A model's `loss_function`: transformers' own, guarded against labels and adapters that are wrong on a shard.

    Hooks do not suffice: a wrapper may call a model's forward directly, and some models drop `shift_labels` on the way.

    Attributes:
        compute: the function that is guarded.
    """

    def __init__(self, model: nn.Module, compute: Callable[..., Any], inputs: Any) -> None:
        self._model, self.compute, self._inputs = ref(model), compute, inputs  # a cycle would keep the model's memory

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardLoss, (self._model(), self.compute, self._inputs)  # of a copied model, the copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of logits and labels."""
        if self._inputs.options.group is not None:
            model = self._model()
            assert model is not None
            if (error := find_labels_error(model, kwargs)) is None:
                try:
                    check_adapters(model)  # added after set_group
                except NotImplementedError as found:
                    error = found
            if error is not None:
                raise_on_every_rank(self._inputs.options.group, error)
        return self.compute(*args, **kwargs)


def guard_losses(model: nn.Module, inputs: Any) -> None:
    """Make every model with a loss within `model` refuse labels from which it would compute the loss of a shard.

    Args:
        inputs: the model's `ForwardInputs`.
    """
    for module in model.modules():
        if not hasattr(type(module), "loss_function") or "labels" not in signature(type(module).forward).parameters:
            continue
        compute: Any = module.loss_function if module.get_output_embeddings() is not None else None  # type: ignore[operator]
        takes_shifted = compute is not None and "shift_labels" in signature(compute).parameters
        if takes_shifted and not isinstance(compute, ShardLoss):
            module.loss_function = ShardLoss(module, compute, inputs)  # type: ignore[assignment]
        if inputs.note_labels not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(inputs.note_labels, with_kwargs=True)


def find_logits_error(kept: Any) -> Exception | None:
    """Return the error for a number of last tokens, which each rank would take from its shard."""
    if not isinstance(kept, int) or not kept:
        return None
    return NotImplementedError(
        f"logits_to_keep must be 0 on a ring, or a tensor of rows of the shard, got {kept}: the last tokens of each "
        "shard are not those of the sequence; gather the hidden states that you need (ringflash.unshard_sequence)."
    )


def find_labels_error(model: nn.Module, given: dict[str, Any]) -> Exception | None:
    """Return the error for labels that a model would shift or count inside a shard."""
    if not isinstance(model.loss_function, ShardLoss):
        return NotImplementedError(
            f"labels must not be given to {type(model).__name__} on a ring, whose loss would be a mean over the shard; "
            "compute it from the logits: the sum over this rank's tokens * cp_size / number of labels in the whole "
            "sequence."
        )
    if coefficient := getattr(model, "z_loss_coefficient", 0):  # Bamba
        return NotImplementedError(
            f"z_loss_coefficient must be 0 with labels on a ring, got {coefficient}, with which each rank would add a "
            "mean over its own shard; set it to 0, or compute the loss from the logits."
        )
    for name in ("shift_labels", "num_items_in_batch"):
        if given.get(name) is None:
            return ValueError(
                f"{name} must be given with labels on a ring, got none: transformers would shift and count the labels "
                "of each shard; pass the batch of prepare_batch with labels=batch['shift_labels'], or use "
                "CausalLMWithLoss."
            )
    return None
