"""`generate` for a model on a ring: each rank that calls it attends to whole prompts within its own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import nn

from ringflash.huggingface.forward_inputs import ForwardInputs
from ringflash.huggingface.options import NAME, ModelRing, give_inputs, inputs_of

_num_running = 0


def is_generating() -> bool:
    """Return True while this process attends to whole prompts, which `wrap_attention` must not intercept."""
    return _num_running > 0


def generate_locally(model: nn.Module, inputs: ForwardInputs) -> None:
    """Make `generate` run off the ring, for every model within `model` that has it."""
    for module in model.modules():
        if hasattr(type(module), "set_attn_implementation") and module.can_generate():  # type: ignore[operator]
            give_inputs(module, inputs)
            module.generate = LocalGenerate(module)  # type: ignore[assignment]


class LocalGenerate:
    """A model's `generate`: transformers' own, within this process. One rank may call it, or each with its own prompt.

    The model is referred to weakly: a cycle would keep its memory, and its group, until Python collects garbage.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalGenerate, (self._model(),)  # of a copied model, the copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what transformers' `generate` returns."""
        model: Any = self._model()
        with _off_the_ring(model, inputs_of(model)):
            return type(model).generate(model, *args, **kwargs)


@contextmanager
def _off_the_ring(model: Any, inputs: ForwardInputs) -> Iterator[None]:
    """Give the model transformers' own attention, and put it back on the ring afterwards."""
    global _num_running
    options = inputs.options
    _switch(inputs, ModelRing(None), "sdpa" if model._supports_sdpa else "eager")
    _num_running += 1
    try:
        yield
    finally:
        _num_running -= 1
        _switch(inputs, options, NAME)


def _switch(inputs: ForwardInputs, options: ModelRing, attn_implementation: str) -> None:
    inputs.options = options
    for config in inputs.configs:
        config._attn_implementation = attn_implementation
