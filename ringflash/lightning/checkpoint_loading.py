"""Distributed checkpoints that differ from the model and optimizers they are loaded into: refused, or adapted to."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict


def check_fits(path: Path, found: Mapping[str, Any], module: nn.Module | None, optimizers: Sequence[Any]) -> None:
    """Check that a checkpoint has exactly the module's tensors, and an optimizer state if there are optimizers.

    torch reads only the entries it is asked for: it would silently skip layers of a deeper model.

    Args:
        found: metadata of the entries of the checkpoint at `path`, by name.
    Raises:
        ValueError: tensors differ, of which the message names the first; on all ranks, if all see the checkpoint.
    """
    prefix = "state_dict."
    if module is not None:
        stored = {x: tuple(m.size) for x, m in found.items() if x.startswith(prefix) and hasattr(m, "size")}
        tensors = {x: t for x, t in get_model_state_dict(module).items() if isinstance(t, torch.Tensor)}
        expected = {prefix + x: tuple(t.shape) for x, t in tensors.items()}
        if other := sorted(x for x in stored.keys() | expected.keys() if stored.get(x) != expected.get(x)):
            name, (saved, own) = other[0].removeprefix(prefix), (x.get(other[0], "none") for x in (stored, expected))
            raise ValueError(
                f"{path} must be a checkpoint of this model, got {name} of shape {saved} in it and {own} here, and "
                f"{len(other) - 1} more that differ; give the model it was made with."
            )
    if optimizers and not any(name.startswith("optimizer_0.") for name in found):
        raise ValueError(
            f"{path} must have the optimizer's state to be continued, got only parameters (save_weights_only); give "
            "another, or start from its parameters: export it with python -m recipes.lightning.export for pretrained."
        )


@contextmanager
def keep_options(
    found: Container[str], module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Keep the values of optimizers' options that a distributed checkpoint lacks while it is loaded.

    torch requires every option in the checkpoint: also initial_lr, which a scheduler adds, and options that a newer
    version of torch has added.
    """
    kept: list[tuple[torch.optim.Optimizer, int, str, Any]] = []
    for i, optimizer in enumerate(optimizers):
        for j, options in enumerate(optimizer.param_groups):
            prefix = f"optimizer_{i}.param_groups.{j}."
            kept += [(optimizer, j, name, x) for name, x in options.items() if prefix + name not in found]
    for optimizer in {id(x): x for x, *_ in kept}.values():
        get_optimizer_state_dict(module, optimizer)  # creates the state to load into, by a step that needs the options
    for optimizer, j, name, _ in kept:
        del optimizer.param_groups[j][name]
    yield
    for optimizer, j, name, value in kept:
        optimizer.param_groups[j].setdefault(name, value)
