"""Which positions one position reaches: a perturbation tells what a layer sees, whatever its numbers are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash.layout import shard_sequence
from ringflash.verify.capture import Capture, tensor_of, watched
from ringflash.verify.observe import prepared, whole
from ringflash.verify.subject import Data, Training


@torch.no_grad()
def reached_through(
    training: Training, group: dist.ProcessGroup | None, data: Data, name: str, position: int
) -> list[int]:
    """Positions at which the output of one module changes when its input changes at `position` alone."""
    module = watched(training.module)[name]
    mine = torch.arange(data.seqlen)[None] == position
    row = shard_sequence(mine, group, 1, training.layout)[..., None].to(data.input_ids.device)
    before = _outputs(training, group, data, name)
    handle = module.register_forward_pre_hook(_perturb(row), with_kwargs=True)
    try:
        after = _outputs(training, group, data, name)
    finally:
        handle.remove()
    return changed(before, after)


@torch.no_grad()
def reached_by_token(training: Training, group: dist.ProcessGroup | None, data: Data, position: int) -> list[int]:
    """Positions at which the last layer's output changes when one token does."""
    tokens = data.input_ids.clone()
    tokens[:, position] = (tokens[:, position] + 1) % (int(tokens.max()) + 1)
    name = list(watched(training.module))[-1]
    return changed(*(_outputs(training, group, x, name) for x in (data, replace(data, input_ids=tokens))))


def _outputs(training: Training, group: dist.ProcessGroup | None, data: Data, name: str) -> Tensor:
    batch = prepared(training, group, data)
    length = data.seqlen // (1 if group is None else group.size())
    with Capture(training.module, length) as capture:
        training.module(**batch)
    return whole(capture.outputs[name], group, training.layout)


def changed(before: Tensor, after: Tensor) -> list[int]:
    """Positions (dim 1) at which two tensors differ in any bit."""
    return (before != after).flatten(2).any(-1).any(0).nonzero().flatten().tolist()


def _perturb(row: Tensor) -> Any:
    """A hook that moves the features of the marked row round by one place."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        def moved(x: Any) -> Any:
            hidden = tensor_of(x, row.shape[1])
            return x if hidden is None else torch.where(row, hidden.roll(1, -1), hidden)

        return tuple(moved(x) for x in args), kwargs | {k: moved(v) for k, v in kwargs.items() if k == "hidden_states"}

    return hook
