"""Errors of gradients by layer: what a choice of attention adds to one layer, and to the gradients of a whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ringflash_kernels.api import attention_backward, attention_forward, needs_row_max

TENSORS = ("out", "dq", "dk", "dv")


Choice = str  # an implementation, as in the kernels' api
EXACT = "exact"  # the reference in fp64, of operands in any dtype


class Attention(torch.autograd.Function):
    """Causal attention on one device by a `Choice`; the backward appends its operands to `recorded` if it is a list."""

    recorded: list[tuple[Tensor, ...]] | None = None

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, choice: Choice) -> Tensor:
        out, lse, row_max = forward(q, k, v, choice)
        ctx.save_for_backward(q, k, v, out, lse, row_max)
        ctx.choice = choice
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, row_max = ctx.saved_tensors
        if Attention.recorded is not None:
            Attention.recorded.append((q, k, v, dout))
        return *(x.to(q.dtype) for x in gradients(dout, q, k, v, out, lse, row_max, ctx.choice)), None


def forward(q: Tensor, k: Tensor, v: Tensor, choice: Choice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out, lse and, for a backward that needs it, the largest score of each row."""
    impl, (q, k, v) = _taken(choice, q, k, v)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    row_max = torch.empty_like(lse) if needs_row_max(choice) else None
    out, lse = attention_forward(q, k, v, impl=impl, causal=True, lse=lse, row_max=row_max)
    return out, lse, row_max


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row_max: Tensor | None, choice: Choice
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, in fp64 if they are exact."""
    impl, operands = _taken(choice, dout, q, k, v)
    return attention_backward(*operands, out, lse, impl=impl, causal=True, row_max=row_max)


def _taken(choice: Choice, *operands: Tensor) -> tuple[str, tuple[Tensor, ...]]:
    """Return the implementation by its name in the kernels' api, and what it takes."""
    return ("reference", tuple(x.double() for x in operands)) if choice == EXACT else (choice, operands)


def errors(model: Any, tokens: Tensor, choices: dict[str, Choice]) -> dict[str, Any]:
    """Compare choices of attention in every layer of a model, and leave the model's choice as it was.

    Args:
        model: with `layers` and `choice`; model(tokens) is a loss.
        choices: by name.
    Returns:
        attention: by choice and layer, the errors of `TENSORS` for the q, k, v and dout that the layer has with exact
            attention in all layers.
        parameters: by choice and layer, the error of the gradient of the layer's parameters, with this choice in all
            layers. Errors are norms of differences from fp64 attention, relative to the norm of the exact result.
    """
    own = model.choice
    model.choice = EXACT
    Attention.recorded = []
    exact = _parameter_gradients(model, tokens)
    calls, Attention.recorded = Attention.recorded[::-1], None  # the backward began with the last layer
    attention: dict[str, list[dict[str, float]]] = {}
    parameters: dict[str, list[float]] = {}
    for name, choice in choices.items():
        attention[name] = [_call_errors(call, choice) for call in calls]
        model.choice = choice
        pairs = zip(_parameter_gradients(model, tokens), exact, strict=True)
        parameters[name] = [_error(got, want) for got, want in pairs]
    model.choice = own
    return {"attention": attention, "parameters": parameters}


def _parameter_gradients(model: Any, tokens: Tensor) -> list[Tensor]:
    """Return the gradient of the parameters of each layer, as one vector."""
    layers = [list(layer.parameters()) for layer in model.layers]
    found = iter(torch.autograd.grad(model(tokens), [x for layer in layers for x in layer]))
    return [nn.utils.parameters_to_vector([next(found).double() for _ in layer]) for layer in layers]


def _call_errors(call: tuple[Tensor, ...], choice: Choice) -> dict[str, float]:
    q, k, v, dout = call
    found = []
    for which in (choice, EXACT):
        state = forward(q, k, v, which)
        found.append((state[0], *gradients(dout, q, k, v, *state, which)))
    return {name: _error(got, want) for name, got, want in zip(TENSORS, *found, strict=True)}


def _error(got: Tensor, want: Tensor) -> float:
    return round(((got.double() - want.double()).norm() / want.double().norm()).item(), 6)
