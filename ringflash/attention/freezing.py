"""Partly frozen models, such as LoRA on q and v alone: the ring differentiates in q, k and v together or not at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def differentiate_alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors themselves, or, where only some require grad, the others as if they did; their gradients go nowhere.

    Returns:
        alike: tensors of the same values and storage that all require grad, or none does.
    """
    wanted = [x for x in tensors if x.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return tensors
    return tuple(x if x.requires_grad else _WithoutGradient.apply(x, wanted[0]) for x in tensors)


class _WithoutGradient(torch.autograd.Function):
    """x, requiring grad because `like` does. x.detach().requires_grad_() would be a leaf that keeps its gradient until
    the graph dies, and breaks the graph of torch.compile."""

    @staticmethod
    def forward(x: Tensor, like: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None
