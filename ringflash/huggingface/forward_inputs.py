"""Notes of a model's forward for its layer 0: positions, document bounds, and changes that take it off the ring."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.huggingface.global_length import depends_on_length, tell_of_the_sequence
from ringflash.huggingface.options import NAME, Options


class Given:
    """Notes at the start of a model's forward what it was given; its first layer asks once.

    Layers that are checkpointed ask again in the backward, when another forward may have begun: nothing is noted then.

    Args:
        names: parameters of the model's forward.
        options: of `set_group`; those without a group while the model runs off the ring on purpose.
        configs: the configurations by which transformers chooses the attention and the masks.
    """

    def __init__(self, names: tuple[str, ...], options: Options, configs: list[Any]) -> None:
        self._names = names
        self.options, self.configs = options, configs
        self._giver: str | None = None
        self._position_ids: Tensor | None = None
        self._errors: dict[str, Exception] = {}

    @classmethod
    def watch(cls, model: nn.Module, attention: list[nn.Module], options: Options) -> Given:
        """The notes of a model's forwards; of a model that is watched already, the same with new options."""
        configs = list({id(c): c for m in (model, *attention) if (c := getattr(m, "config", None))}.values())
        for hook in model._forward_pre_hooks.values():
            if isinstance(hook, cls):
                hook.options, hook.configs = options, configs
                return hook
        notes = cls(tuple(signature(type(model).forward).parameters)[1:], options, configs)
        model.register_forward_pre_hook(notes, with_kwargs=True)
        return notes

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._giver = None if given.get("cu_seqlens") is None else type(model).__name__
        self._position_ids = given.get("position_ids")
        if self.options.group is not None:
            self._stay_on_the_ring()
            for child in model.children():
                if depends_on_length(child) and not hasattr(child, "_ringflash"):  # put there since set_group
                    tell_of_the_sequence(child, self.options)

    def note_labels(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook of the model with the head: note labels that it would shift inside the shard."""
        self._errors.pop("labels", None)
        if self.options.group is not None and kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            self._errors["labels"] = labels_error()

    def _stay_on_the_ring(self) -> None:
        """Undo a change of attn_implementation and note it: layer 0 refuses it, where all ranks are in step."""
        for config in self.configs:
            if (used := config._attn_implementation) != NAME:
                config._attn_implementation = NAME
                self._errors["choice"] = ValueError(
                    f"attn_implementation must stay {NAME!r} after set_group, got {used!r}, with which each rank would "
                    "attend to its own shard; give each model a configuration of its own (copy.deepcopy(config)), or "
                    "take the model off the ring first by set_group(model, None)."
                )

    def take_positions(self) -> Tensor | None:
        """The positions that the model was given, for an attention that is not told of them."""
        positions, self._position_ids = self._position_ids, None
        return positions

    def find_error(self, cu_seqlens: Tensor | None) -> Exception | None:
        """Return the first error that was noted, or one for document bounds that did not reach the first layer."""
        giver, self._giver = self._giver, None
        errors, self._errors = self._errors, {}
        if errors:
            return next(iter(errors.values()))
        if giver is None or cu_seqlens is not None:
            return None
        return NotImplementedError(
            f"cu_seqlens must reach the attention, got None there from {giver}, which drops it; give each document a "
            "sequence of its own, or use another model."
        )


def labels_error() -> ValueError:
    """Return the error for labels that transformers would shift inside each shard."""
    return ValueError(
        "shift_labels must be given with labels on a ring, got labels only, which transformers would shift inside each "
        "shard; pass the batch of prepare_batch with labels=batch['shift_labels'], or use CausalLMWithLoss."
    )


def is_recomputed() -> bool:
    """Whether this runs inside a backward, as a checkpointed layer does a second time."""
    return torch._C._current_graph_task_id() != -1
