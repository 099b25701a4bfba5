"""Averages of gradients over the ranks of a group, in a loop without DDP and FSDP2."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ringflash.comm.agreement import gather
from ringflash.comm.group import Group, resolve
from ringflash.comm.modules.parameters import ParameterCheck, is_shared


def average_gradients(parameters: Iterable[nn.Parameter], group: Group) -> None:
    """Average gradients over the ranks of a group, in place; all ranks call this together, after a backward.

    A rank that has not used a parameter, for example an expert for which it had no tokens, adds zeros. A parameter that
    no rank has used keeps no gradient, as in one process. A parameter with `allreduce = False`, which other ranks do
    not have, is only divided by the number of ranks.

    Args:
        parameters: the same on all ranks, in one order, such as `module.parameters()`.
        group: ranks over which the loss is averaged: the ranks of a ring, or of all rings.
    Raises:
        ValueError: parameters that differ between the ranks, on every rank; compared in the calls 1, 2, 4, 8, ...
    """
    group = resolve(group)
    every = list(dict.fromkeys(parameters))  # tied ones once
    if group is None or not every:
        return
    equal = _averaged.setdefault(every[0], ParameterCheck())
    equal.compare(((f"parameter {i} {tuple(x.shape)}", x) for i, x in enumerate(every)), group)
    _fill([x for x in every if is_shared(x)], group)
    for parameter in every:
        if parameter.grad is not None:
            if is_shared(parameter):
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()


_averaged = WeakIdKeyDictionary()  # from the first of the averaged parameters to their comparison


class GradientFiller:
    """Filler of missing gradients: zeros for parameters that only other ranks of a ring have used in a backward.

    Many loops all-reduce the gradients that exist (`if p.grad is not None`). If ranks had gradients of different
    parameters, the all-reduce would add these. For FSDP2 see `align_units`.
    """

    def __init__(self) -> None:
        self._backward = -1  # id of the last one; an error may have ended it before it was compared

    def begin(self, module: nn.Module, group: dist.ProcessGroup | None, output: object) -> None:
        """Compare the ranks at the end of each backward through the outputs of a forward."""

        def queue(_: Tensor) -> None:
            if self._backward != (present := torch._C._current_graph_task_id()):
                self._backward = present
                torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            """Give zeros to parameters whose gradient only other ranks have, after each backward."""
            assert group is not None
            # Without FSDP2's DTensors, known by an attribute: importing their class takes longer than importing torch.
            trained = (x for x in module.parameters() if x.requires_grad and is_shared(x))
            parameters = [x for x in trained if not hasattr(x, "device_mesh")]
            used = bytes(x.grad is not None for x in parameters)
            if used and len(set(gather(group, zlib.crc32(used)))) > 1:
                _fill(parameters, group)

        if group is not None:
            for x in tree_leaves(output):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(queue)


def _fill(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give zeros to parameters without a gradient that another rank of the group has used."""
    if not parameters:
        return
    used = torch.tensor([x.grad is not None for x in parameters], dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
