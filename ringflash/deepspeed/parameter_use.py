"""Engines whose ranks use different parameters, such as other experts of a list.

ZeRO packs the gradients that a rank has, in the order in which they arrive. It would add gradients of different
parameters to one another without an error. deepspeed 0.19.8:

    stage 0                    fills in zeros itself
    stage 1                    reduces after the backward; zeros are filled in before
    stage 1 with overlap_comm  reduces in the backward, in order of arrival: refused before the step
    stages 2 and 3             the same; stage 3 also gathers parameters when a layer is called: refused there
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from ringflash.comm.agreement import agree
from ringflash.comm.call_order import CallOrder

_REMEDY = (
    "call every layer on every rank, with an empty input if the rank has no tokens for it, or use stage 1 without "
    "overlap_comm"
)


def watch_parameters(engine: Any) -> None:
    """Fill in the gradients that a rank lacks, or refuse ranks that lack different ones; all ranks call this together.

    Raises:
        ValueError: later, in a forward or backward, on every rank: ranks use different parameters.
    """
    stage = engine.zero_optimization_stage()
    if stage == 0 or dist.group.WORLD is None:
        return
    ParameterUse(engine.module, in_order=stage > 1 or getattr(engine.optimizer, "overlap_comm", False))
    if stage == 3:
        order = CallOrder(dist.group.WORLD, "layer", _REMEDY)
        for name, layer in engine.module.named_modules():
            if next(layer.parameters(recurse=False), None) is not None:
                layer.register_forward_pre_hook(partial(_compare_gathering, order, name), prepend=True)


class ParameterUse:
    """Gradients that have arrived in the current backward.

    Args:
        in_order: they are reduced as they arrive, so that all ranks must have the same ones in the same order.
    """

    def __init__(self, module: nn.Module, in_order: bool) -> None:
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._in_order = in_order
        self._arrived: list[str] = []
        self._backward = -1  # number of autograd's graph task; an error ends one without `_end`
        for name, parameter in self._trained.items():
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))

    def _note(self, name: str, _: nn.Parameter) -> None:
        backward = torch._C._current_graph_task_id()
        if not self._arrived or backward != self._backward:
            self._backward, self._arrived = backward, []
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]
        self._arrived.append(name)

    def _end(self) -> None:
        """Fill in or compare, between the backward and DeepSpeed's work after it."""
        arrived, self._arrived = self._arrived, []
        missing = [name for name in self._trained if name not in set(arrived)]
        if self._in_order:
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            order = zlib.crc32("\n".join(arrived).encode())
            signature: dict[str, object] = {"no gradient of": listed or "none", "order of gradients": order}
            agree(dist.group.WORLD, signature, remedy=_REMEDY)
            return
        for name in missing:
            if self._trained[name].grad is None:
                self._trained[name].grad = torch.zeros_like(self._trained[name])


@torch.compiler.disable(reason="ranks compare the layers that they call")
def _compare_gathering(order: CallOrder, name: str, layer: nn.Module, _: Any) -> None:
    """Compare a layer whose parameters stage 3 has to gather; a forward pre-hook."""
    own: list[Any] = list(layer.parameters(recurse=False))
    if any(p.ds_status != ZeroParamStatus.AVAILABLE for p in own) and torch._C._current_graph_task_id() == -1:
        order.enter(name, own[0].device.type)
