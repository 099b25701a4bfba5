"""Probe of the positions that a layer sees: perturb one position and find the outputs that change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash.sequence.layout import shard_sequence
from ringflash.verify.capture import Capture, gather_whole, tensor_of, watched_modules
from ringflash.verify.observation import Tensors, prepare_batch
from ringflash.verify.target import Data, Training


class ForwardReader(Protocol):
    """Object with hooks in a module, which read tensors in its forward."""

    def close(self) -> Tensors:
        """Remove the hooks and return whole tensors by name."""


MakeReader = Callable[[nn.Module, dist.ProcessGroup | None, Data, str], ForwardReader]  # the str is the layout


class Touch(NamedTuple):
    """A watched module and the position of the whole sequence at which to perturb its input."""

    name: str
    position: int


class OutputReader:
    """Read the layer outputs of one forward, with or without a perturbation, gathered from all ranks."""

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
            hook = watched_modules(module)[touch.name].register_forward_pre_hook(_perturb(row), with_kwargs=True)
            self._stack.callback(hook.remove)

    def close(self) -> Tensors:
        """Remove the hooks and return the outputs by name."""
        self._stack.close()
        return {name: gather_whole(x, self.group, self.layout) for name, x in self._capture.outputs.items()}


@torch.no_grad()
def read_forward(training: Training, group: dist.ProcessGroup | None, data: Data, make_reader: MakeReader) -> Tensors:
    """Run one forward on every rank of the group and return the tensors that the reader collects, by name."""
    batch = prepare_batch(training, group, data)
    reader = make_reader(training.module, group, data, training.layout)
    training.module(**batch)
    return reader.close()


def replace_tokens(data: Data, positions: list[int]) -> Data:
    """Return the sequence with other tokens at some positions and unchanged labels."""
    tokens = data.input_ids.clone()
    tokens[:, positions] = (tokens[:, positions] + 1) % (int(tokens.max()) + 1)
    return replace(data, input_ids=tokens)


def changed_positions(before: Tensor, after: Tensor, least: float = 0.0) -> list[int]:
    """Return positions (dim 1) at which two tensors differ at all, or by more than `least` times the largest value."""
    different = (before - after).abs() > least * before.abs().max() if least else before != after
    return different.flatten(2).any(-1).any(0).nonzero().flatten().tolist()


def _perturb(row: Tensor) -> Any:
    """Return a pre-hook that rotates the features of the marked row by one."""

    def rotate(x: Any) -> Any:
        hidden = tensor_of(x, row.shape[1])
        if hidden is None:
            return x
        return torch.where(row.reshape(1, -1, *[1] * (hidden.dim() - 2)), hidden.roll(1, -1), hidden)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        named = {key: rotate(x) for key, x in kwargs.items() if key == "hidden_states"}
        return tuple(rotate(x) for x in args), kwargs | named

    return hook
