"""Averages of gradients over the ranks of a group, in a loop without DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from ringflash.comm.group import Group, resolve


def average_gradients(parameters: Iterable[nn.Parameter], group: Group) -> None:
    """Average gradients over the ranks of a group, in place; all ranks call this together, after a backward.

    A rank that has not used a parameter, for example an expert for which it had no tokens, adds zeros. A parameter that
    no rank has used keeps no gradient, as in one process.

    Args:
        parameters: the same on all ranks, in one order, such as `module.parameters()`.
        group: ranks over which the loss is averaged: those of a ring, or of all rings.
    """
    group = resolve(group)
    every = list(parameters)
    if group is None or not every:
        return
    used = torch.tensor([x.grad is not None for x in every], dtype=torch.uint8, device=every[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    for parameter, is_used in zip(every, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()
