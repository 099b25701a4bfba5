"""`generate` of a model on a ring: each rank that calls it attends within its own process, to whole prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from ringflash.huggingface.forward_inputs import Given
from ringflash.huggingface.options import NAME, Options

_num_running = 0


def is_generating() -> bool:
    """Return whether this process attends to whole prompts now, as `wrap_attention` must let it."""
    return _num_running > 0


def generate_locally(model: nn.Module, given: Given) -> None:
    """Make `generate` of the models within `model` that have it run off the ring."""
    for module in model.modules():
        if hasattr(type(module), "set_attn_implementation") and module.can_generate():  # type: ignore[operator]
            module._ringflash_given = given  # type: ignore[assignment]
            module.generate = MethodType(generate, module)  # type: ignore[assignment]


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' generate, with attention within this process: one rank may call it, or each with its own prompt."""
    with _off_the_ring(self, self._ringflash_given):
        return type(self).generate(self, *args, **kwargs)


@contextmanager
def _off_the_ring(model: Any, given: Given) -> Iterator[None]:
    """Give the model transformers' own attention, and put the ring back afterwards."""
    global _num_running
    options, layers = given.options, [m for m in model.modules() if isinstance(getattr(m, "_ringflash", None), Options)]
    _give(given, layers, Options(None), "sdpa" if model._supports_sdpa else "eager")
    _num_running += 1
    try:
        yield
    finally:
        _num_running -= 1
        _give(given, layers, options, NAME)


def _give(given: Given, layers: list[Any], options: Options, attn_implementation: str) -> None:
    given.options = options
    for layer in layers:
        layer._ringflash = options
    for config in given.configs:
        config._attn_implementation = attn_implementation
