"""Attention layers of a model that have called ring attention: others would attend to the shard of each rank."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from ringflash.huggingface.validation import attention_modules, name_of_layer


class ReachedLayers:
    """Names of the layers that have called ring attention: eagerly, or while they were traced by torch.compile."""

    def __init__(self, names: set[str] | None = None) -> None:
        self._names, self._all = names or set(), False
        self.key = str(next(_numbers))  # a string, since torch.compile would treat a changing number as a dynamic one
        _known[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> ReachedLayers:
        return ReachedLayers({*self._names})

    def add(self, name: str) -> None:
        """Note a layer."""
        self._names.add(name)

    def find_error(self, model: nn.Module) -> Exception | None:
        """Return the error for layers of a model that have not been noted by the end of its forward, or None."""
        if self._all:
            return None
        missing = [name for x in attention_modules(model) if (name := name_of_layer(x)) not in self._names]
        self._all = not missing
        if self._all:
            return None
        return NotImplementedError(
            f"each attention layer must call transformers' attention function, got none from {missing[0].strip()} "
            f"({len(missing)} in all), so that each rank would attend to its own shard; leave out what has replaced "
            "the layer or its forward, or put the model on the ring by ringflash.wrap_attention."
        )


_numbers = count()
_known: WeakValueDictionary[str, ReachedLayers] = WeakValueDictionary()


def mark_reached(layers: ReachedLayers, module: nn.Module) -> None:
    """Note that an attention layer calls ring attention."""
    _mark(layers.key, name_of_layer(module))


@torch.compiler.assume_constant_result
def _mark(key: str, name: str) -> None:
    """Note at trace time if compiled, since compiled checkpoints cannot mutate objects."""
    _known[key].add(name)
