"""Balancing loss of a mixture of experts over a sharded sequence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Parameters of transformers' load_balancing_loss_func.
_BALANCING_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def has_router_loss(model: Any) -> bool:
    """Return True if a model adds the balancing loss of its experts."""
    return getattr(getattr(model, "config", None), "output_router_logits", False)


def check_routers(model: nn.Module) -> None:
    """Raise NotImplementedError for a model without a balancing loss, or with another than `router_loss` computes."""
    own = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    names = "num_experts", "num_experts_per_tok", "router_aux_loss_coef"
    known = own is not None and list(signature(own).parameters) == _BALANCING_PARAMETERS and _is_router_loss(own)
    if not known or not all(hasattr(model, name) for name in names):
        raise NotImplementedError(
            "output_router_logits must be False for a model without transformers' load_balancing_loss_func over "
            f"num_experts and num_experts_per_tok, got True for {type(model).__name__}; compute the loss from the "
            "model's own outputs."
        )


@lru_cache(maxsize=8)
@torch.no_grad()
def _is_router_loss(compute: Callable[..., Any]) -> bool:
    """Return True if a function, which may have replaced transformers' own, gives the loss of six tokens."""
    logits = torch.linspace(-3, 3, 24, device="cpu").sin().view(6, 4)
    try:
        found = compute((logits,), 4, 2)
    except Exception:  # the user's own code
        return False
    return bool(abs(found - router_loss((logits,), 4, 2, None)) <= 1e-5)


def router_loss(
    router_logits: tuple[Tensor, ...],
    num_experts: int,
    experts_per_token: int,
    group: dist.ProcessGroup | None,
    is_token: Tensor | None = None,
) -> Tensor:
    """Return this rank's part of the loss that keeps experts balanced; the mean over the ranks is the sequence's.

        num_experts * sum over experts (share of the choices of this expert * mean probability of this expert)

    Both factors are means over the tokens of all layers. Choices have no gradient, so ranks only exchange their counts.
    The loss is linear in the probabilities, so each rank adds the terms of its own tokens, and gradients are averaged.

    Args:
        router_logits: of each layer, (tokens of this rank, num_experts).
        group: ranks that share the sequence; None is one process.
        is_token: (batch, seqlen_local), bool; padding is False and left out. Default is all True.
    Returns:
        loss: scalar, fp32 (fp64 for fp64).
    Source: equations 4 to 6 of Fedus et al. 2021 (Switch Transformer), arXiv:2101.03961, as transformers sums layers.
    """
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    device = router_logits[0].device
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)  # choices per expert, then tokens
    probability = torch.zeros(num_experts, dtype=dtype, device=device)
    for logits in router_logits:
        weights = logits.softmax(-1)
        chosen = weights.detach().topk(experts_per_token).indices
        counted = chosen.new_ones(len(logits), 1) if is_token is None else is_token.view(-1, 1).long()
        counts[:-1].scatter_add_(0, chosen.flatten(), counted.expand_as(chosen).flatten())
        counts[-1] += counted.sum()
        probability = probability + (weights if is_token is None else weights * counted).to(dtype).sum(0)
    if group is not None:
        dist.all_reduce(counts, group=group)
        probability = probability * group.size()
    tokens = counts[-1].clamp(min=1).to(dtype)
    return num_experts * (counts[:-1].to(dtype) / tokens * (probability / tokens)).sum()


def router_logits_of(model: Any, outputs: Any) -> tuple[Tensor, ...]:
    """Return the router logits of a forward; raise RuntimeError if there are none."""
    logits = getattr(outputs, "router_logits", None)
    if not logits:
        raise RuntimeError(
            f"router_logits must be among the outputs of {type(model).__name__} with output_router_logits=True, got "
            "none; set it to False for a model without experts."
        )
    return logits


def router_coefficient_of(model: Any) -> float:
    """Return the coefficient of a model's balancing loss; raise ValueError if its configuration has another."""
    own = model.router_aux_loss_coef
    if (configured := getattr(model.config, "router_aux_loss_coef", own)) != own:
        raise ValueError(
            f"router_aux_loss_coef must be the same in a model and its configuration, got {own} and {configured}; set "
            "both (TRL sets only the configuration's)."
        )
    return float(own)
