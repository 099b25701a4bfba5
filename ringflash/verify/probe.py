"""Which positions one position reaches: a perturbation tells what a layer sees, whatever its numbers are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash.sequence.layout import shard_sequence
from ringflash.verify.capture import Capture, tensor_of, watched, whole
from ringflash.verify.observe import Tensors, prepared
from ringflash.verify.subject import Data, Training


class Reads(Protocol):
    """Reads something in the forward of a module until it is closed."""

    def close(self) -> Tensors:
        """Whole tensors, by name."""
        ...


Look = Callable[[nn.Module, dist.ProcessGroup | None, Data, str], Reads]  # the last is the layout


class Touch(NamedTuple):
    """The input of one watched module, at one position of the whole sequence."""

    name: str
    position: int


class Watch:
    """Reads what the layers put out in one forward, with or without a perturbation, joined over the ranks."""

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup | None, data: Data, layout: str, *, touch: Touch | None
    ) -> None:
        self.group, self.layout = group, layout
        self._stack = ExitStack()
        self._capture = Capture(module, data.seqlen // (1 if group is None else group.size()))
        self._stack.enter_context(self._capture)
        if touch is not None:
            mine = torch.arange(data.seqlen)[None] == touch.position
            row = shard_sequence(mine, group, 1, layout).to(data.input_ids.device)
            hook = watched(module)[touch.name].register_forward_pre_hook(_perturb(row), with_kwargs=True)
            self._stack.callback(hook.remove)

    def close(self) -> Tensors:
        """The outputs by name; nothing is watched any more."""
        self._stack.close()
        return {name: whole(x, self.group, self.layout) for name, x in self._capture.outputs.items()}


@torch.no_grad()
def watched_forward(training: Training, group: dist.ProcessGroup | None, data: Data, look: Look) -> Tensors:
    """What is read in one forward, by name; every rank of the group calls it together."""
    batch = prepared(training, group, data)
    watch = look(training.module, group, data, training.layout)
    training.module(**batch)
    return watch.close()


def with_other_tokens(data: Data, positions: list[int]) -> Data:
    """The sequence with another token at some positions, and the labels it had."""
    tokens = data.input_ids.clone()
    tokens[:, positions] = (tokens[:, positions] + 1) % (int(tokens.max()) + 1)
    return replace(data, input_ids=tokens)


def changed(before: Tensor, after: Tensor, least: float = 0.0) -> list[int]:
    """Positions (dim 1) at which two tensors differ: in any bit, or by more than `least` of the largest value."""
    different = (before - after).abs() > least * before.abs().max() if least else before != after
    return different.flatten(2).any(-1).any(0).nonzero().flatten().tolist()


def _perturb(row: Tensor) -> Any:
    """A hook that moves the features of the marked row round by one place."""

    def moved(x: Any) -> Any:
        hidden = tensor_of(x, row.shape[1])
        if hidden is None:
            return x
        return torch.where(row.reshape(1, -1, *[1] * (hidden.dim() - 2)), hidden.roll(1, -1), hidden)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        named = {key: moved(x) for key, x in kwargs.items() if key == "hidden_states"}
        return tuple(moved(x) for x in args), kwargs | named

    return hook
