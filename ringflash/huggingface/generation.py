"""`generate` for a model on a ring: each rank that calls it attends to whole prompts within its own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from ringflash.huggingface.consistency import ForwardInputs
from ringflash.huggingface.options import NAME, ModelRing

_num_running = 0


def is_generating() -> bool:
    """Return True while this process attends to whole prompts, which `wrap_attention` must not intercept."""
    return _num_running > 0


def generate_locally(model: nn.Module, inputs: ForwardInputs) -> None:
    """Make `generate` run off the ring, for every model within `model` that has it."""
    for module in model.modules():
        if hasattr(type(module), "set_attn_implementation") and module.can_generate():  # type: ignore[operator]
            module._ringflash_given = inputs  # type: ignore[assignment]
            module.generate = MethodType(_generate, module)  # type: ignore[assignment]


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run transformers' generate within this process: on one rank, or on each with a prompt of its own."""
    with _off_the_ring(self, self._ringflash_given):
        return type(self).generate(self, *args, **kwargs)


@contextmanager
def _off_the_ring(model: Any, inputs: ForwardInputs) -> Iterator[None]:
    """Give the model transformers' own attention, and put it back on the ring afterwards."""
    global _num_running
    options = inputs.options
    layers = [m for m in model.modules() if isinstance(getattr(m, "_ringflash", None), ModelRing)]
    _switch(inputs, layers, ModelRing(None), "sdpa" if model._supports_sdpa else "eager")
    _num_running += 1
    try:
        yield
    finally:
        _num_running -= 1
        _switch(inputs, layers, options, NAME)


def _switch(inputs: ForwardInputs, layers: list[Any], options: ModelRing, attn_implementation: str) -> None:
    inputs.options = options
    for layer in layers:
        layer._ringflash = options
    for config in inputs.configs:
        config._attn_implementation = attn_implementation
