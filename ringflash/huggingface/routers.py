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
    router_logits: tuple[Tensor, ...], num_experts: int, experts_per_token: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The balancing loss of the whole sequence: its mean over the ranks, also of its gradients.

        num_experts * sum over experts (share of the choices that went to it * mean probability that it was given)

    Both are means over the tokens of all layers. Choices have no gradient, so ranks exchange their counts alone; in
    probabilities the loss is linear, and each rank's own tokens are its part.

    Args:
        router_logits: of each layer, (tokens of this rank, num_experts).
        group: ranks that share the sequence, with as many tokens each; None is one process.
    Returns:
        loss: scalar, fp32 (fp64 for fp64).
    Source: equations 4 to 6 of Fedus et al. 2021 (Switch Transformer), arXiv:2101.03961, as transformers sums layers.
    """
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    device = router_logits[0].device
    choices = torch.zeros(num_experts, dtype=torch.int64, device=device)
    probability = torch.zeros(num_experts, dtype=dtype, device=device)
    tokens = 0
    for logits in router_logits:
        weights = logits.softmax(-1)
        chosen = weights.detach().topk(experts_per_token).indices.flatten()
        choices.scatter_add_(0, chosen, torch.ones_like(chosen))
        probability = probability + weights.to(dtype).sum(0)
        tokens += len(logits)
    everywhere = tokens
    if group is not None:
        dist.all_reduce(choices, group=group)
        everywhere *= group.size()
    return num_experts * (choices.to(dtype) / everywhere * (probability / tokens)).sum()


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
