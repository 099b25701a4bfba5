"""The loss that keeps the experts of a model balanced, over the whole sequence."""

from __future__ import annotations

import sys
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_TRANSFORMERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]  # what its load_balancing_loss_func takes


def check_routers(model: nn.Module) -> None:
    """Refuse a model whose loss of the routers is none that `router_loss` knows.

    Raises:
        NotImplementedError: no such loss in its family, or one of another form.
    """
    own = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    names = "num_experts", "num_experts_per_tok", "router_aux_loss_coef"
    if own is None or list(signature(own).parameters) != _TRANSFORMERS or not all(hasattr(model, n) for n in names):
        raise NotImplementedError(
            "output_router_logits must be False for a model without transformers' load_balancing_loss_func over "
            f"num_experts and num_experts_per_tok, got True for {type(model).__name__}; compute the loss from the "
            "model's own outputs."
        )


def router_loss(
    router_logits: tuple[Tensor, ...],
    num_experts: int,
    experts_per_token: int,
    group: dist.ProcessGroup | None,
    is_token: Tensor | None = None,
) -> Tensor:
    """The balancing loss of the whole sequence: its mean over the ranks, also of its gradients.

        num_experts * sum over experts (share of the choices that went to it * mean probability that it was given)

    Both are means over the tokens of all layers. Choices have no gradient, so ranks exchange their counts alone; in
    probabilities the loss is linear, and each rank's own tokens are its part.

    Args:
        router_logits: of each layer, (tokens of this rank, num_experts).
        group: ranks that share the sequence; None is one process.
        is_token: (batch, seqlen_local), bool; what is none is left out. Default all are.
    Returns:
        loss: scalar, fp32 (fp64 for fp64).
    Source: equations 4 to 6 of Fedus et al. 2021 (Switch Transformer), arXiv:2101.03961, as transformers sums layers.
    """
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    device = router_logits[0].device
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)  # of choices, and of tokens
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


def routed(model: Any, outputs: Any) -> tuple[Tensor, ...]:
    """The routers' logits of a forward.

    Raises:
        RuntimeError: the model has no layer with experts, or keeps their logits to itself.
    """
    logits = getattr(outputs, "router_logits", None)
    if not logits:
        raise RuntimeError(
            f"router_logits must be among the outputs of {type(model).__name__} with output_router_logits=True, got "
            "none; set it to False for a model without experts."
        )
    return logits


def router_coefficient(model: Any) -> float:
    """What a model's balancing loss is multiplied by.

    Raises:
        ValueError: the model was made with another one than its configuration has now.
    """
    own = model.router_aux_loss_coef
    if (configured := getattr(model.config, "router_aux_loss_coef", own)) != own:
        raise ValueError(
            f"router_aux_loss_coef must be the same in a model and its configuration, got {own} and {configured}; set "
            "both (TRL sets the configuration's alone)."
        )
    return float(own)
