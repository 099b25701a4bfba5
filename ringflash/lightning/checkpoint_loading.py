"""Checkpoints that differ from the model and optimizers they are loaded into: refused, or adapted to.

A distributed checkpoint has an optimizer's state by the names of parameters; a single file, by their numbers in the
order of the parameter groups. A parameter that no step has used has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.cloud_io import _load
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from ringflash.checkpoint.safe_files import check_together

Shape = tuple[int, ...] | None  # None for a value that is not a tensor


def first_undamaged(paths: list[Path], replace: Callable[[Path], None]) -> Path:
    """Return the first checkpoint that passes `check_together`; all ranks return the same one.

    Args:
        replace: called with the next path if a checkpoint is damaged.
    Raises:
        ValueError: all are damaged, or would run code; on every rank.
    """
    for path, previous in pairwise(paths):
        try:
            check_together(path)
            return path
        except ValueError as error:
            rank_zero_warn(f"{error} Continuing from the previous one, {previous}.")
            replace(previous)
    check_together(paths[-1])
    return paths[-1]


class Folder:
    """Distributed checkpoint: a directory with a part from each rank, which all ranks read together."""

    def __init__(self, path: Path) -> None:
        self.path, metadata = path, FileSystemReader(path).read_metadata()
        self._entries = {metadata.planner_data[x]: (x, entry) for x, entry in metadata.state_dict_metadata.items()}
        self.num_optimizers = len({place[0] for place in self._entries} - {"state_dict"})
        self.shapes = {
            place[1]: _shape(entry) for place, (_, entry) in self._entries.items() if place[0] == "state_dict"
        }

    def load_optimizer(self, index: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load an optimizer's state and options.

        Raises:
            ValueError: the checkpoint has other parameter groups, or another kind of state; on every rank.
        """
        name = f"optimizer_{index}"
        groups = self._read_groups(name)
        shapes: dict[str, dict[str, Shape]] = {}
        for place, (_, entry) in self._entries.items():
            if place[:2] == (name, "state"):
                shapes.setdefault(place[2], {})[place[3]] = _shape(entry) if len(place) == 4 else None
        own = _OwnState(self.path, module, optimizer)
        groups = own.match_by_name(groups)
        state = {parameter: own.place_for(parameter, found) for parameter, found in shapes.items()}
        dcp.load({name: {"state": state}}, checkpoint_id=self.path)
        own.load(state, groups)

    def _read_groups(self, optimizer: str) -> list[dict[str, Any]]:
        """Read the parameter groups of an optimizer, whose parameters are names."""
        entries = {place[2:]: x for place, x in self._entries.items() if place[:2] == (optimizer, "param_groups")}
        values: dict[str, Any] = dict.fromkeys(x for x, _ in entries.values())
        for x, entry in entries.values():
            if isinstance(entry, TensorStorageMetadata):
                values[x] = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load(values, checkpoint_id=self.path)
        groups: dict[Any, Any] = {}
        for (*within, last), (x, _) in entries.items():
            inner = groups
            for key in within:
                inner = inner.setdefault(key, {})
            inner[last] = values[x]
        return [groups[number] for number in sorted(groups)]


class SingleFile:
    """Checkpoint of Lightning's default strategy, or of `save_distributed_checkpoint=False`."""

    def __init__(self, path: Path, weights_only: bool) -> None:
        self.path = path
        if weights_only:
            content = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        else:  # the user trusts the file, and Lightning loads it alike
            content = _load(path, map_location="cpu", weights_only=False)
        self.shapes = {x.replace("_orig_mod.", ""): _shape(value) for x, value in content["state_dict"].items()}
        self._optimizers = content.get("optimizer_states", [])
        self.num_optimizers = len(self._optimizers)

    def load_optimizer(self, index: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load an optimizer's state and options.

        Raises:
            ValueError: the file has other parameter groups, or another kind of state; on every rank that reads it.
        """
        saved, own = self._optimizers[index], _OwnState(self.path, module, optimizer)
        groups = own.match_by_number(saved["param_groups"])
        numbers = chain.from_iterable(group["params"] for group in groups)
        names = dict(zip(numbers, own.parameters, strict=True))
        state = {}
        for number, values in saved["state"].items():
            place = own.place_for(names[number], {key: _shape(value) for key, value in values.items()})
            state[names[number]] = _filled(place, values)
        own.load(state, groups)


class _OwnState:
    """State of this run's optimizer after a step with zeros, into which saved state is loaded."""

    def __init__(self, path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._path, self._optimizer = path, optimizer
        optimizer.state.clear()
        optimizer.zero_grad()
        state: Any = get_optimizer_state_dict(module, optimizer)
        self._state, self._groups = state["state"], state["param_groups"]
        names = chain.from_iterable(group["params"] for group in self._groups)
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self.parameters: dict[str, nn.Parameter] = dict(zip(names, parameters, strict=True))

    def match_by_name(self, saved: Sequence[Any]) -> list[Any]:
        """Return the saved group of the same names for each of the optimizer's groups, {} for an empty one."""
        found, wanted = ([sorted(group["params"]) for group in x] for x in (saved, self._groups))
        if sorted(filter(None, found)) != sorted(filter(None, wanted)):
            self._refuse_groups(found, wanted)
        return [saved[found.index(names)] if names else {} for names in wanted]

    def match_by_number(self, saved: Sequence[Any]) -> list[Any]:
        """Return the saved groups, which must be as large as the optimizer's; names that both know must be equal."""
        found, wanted = ([group["params"] for group in x] for x in (saved, self._groups))
        pairs = zip(saved, self._groups, strict=False)
        named = [(a["param_names"], b["param_names"]) for a, b in pairs if "param_names" in a and "param_names" in b]
        if [*map(len, found)] != [*map(len, wanted)] or any(a != b for a, b in named):
            self._refuse_groups(found, wanted)
        return list(saved)

    def _refuse_groups(self, found: Sequence[Any], wanted: Sequence[Any]) -> None:
        raise ValueError(
            f"{self._path} must have the parameter groups of this optimizer, got groups of {[*map(len, found)]} "
            f"parameters in it and of {[*map(len, wanted)]} here (if the numbers are equal, the parameters differ); "
            "make the groups in configure_optimizers as the run did that wrote the checkpoint."
        )

    def place_for(self, name: str, saved: Mapping[str, Shape]) -> dict[str, Any]:
        """Return the values of a parameter's state, to be overwritten by saved ones of the same keys and shapes."""
        parameter = self.parameters[name]
        if not parameter.requires_grad:  # frozen now; its state is kept in case it is trained again
            return {key: _place(parameter, shape) for key, shape in saved.items()}
        own = self._state.get(name, {})
        shapes = {key: _shape(value) for key, value in own.items()}
        if shapes != saved:
            raise ValueError(
                f"{self._path} must have the optimizer's state of {name}, of shapes {shapes}, got {dict(saved)}; make "
                "the optimizer and its parameter groups in configure_optimizers as the run did that wrote it."
            )
        return dict(own)

    def load(self, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Load a state by names, and the options of groups; options that are not saved keep this run's values."""
        numbers = {name: number for number, name in enumerate(self.parameters)}
        options = [
            {**own, **saved, "params": [numbers[name] for name in own["params"]]}
            for own, saved in zip(self._groups, groups, strict=True)
        ]
        self._optimizer.load_state_dict(
            {"state": {numbers[name]: values for name, values in state.items()}, "param_groups": options}
        )


def _shape(value: Any) -> Shape:
    """Return the shape of a tensor, or of a checkpoint's entry for one; None for anything else."""
    size = getattr(value, "size", None)
    return None if size is None else tuple(size() if callable(size) else size)


def _place(parameter: Tensor, shape: Shape) -> Tensor | None:
    """Return a tensor of zeros, sharded as the parameter if it has the parameter's shape; None if `shape` is None."""
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, requires_grad=False)
    return None if shape is None else torch.zeros(shape)


def _filled(place: Any, value: Any) -> Any:
    """Return a saved value, copied into the tensors of `place`, which all ranks do with the same value."""
    if isinstance(value, Mapping):
        return {key: _filled(place[key], x) for key, x in value.items()}
    if not isinstance(value, Tensor):
        return value
    if isinstance(place, DTensor):
        value = distribute_tensor(value, place.device_mesh, place.placements, src_data_rank=None)
    return place.copy_(value)


def check_fits(checkpoint: Folder | SingleFile, module: nn.Module | None, num_optimizers: int) -> None:
    """Check that a checkpoint has exactly the module's tensors, and the states of all optimizers if there are any.

    torch reads only the entries it is asked for: it would silently skip layers of a deeper model.

    Args:
        module: None if the tensors may differ.
    Raises:
        ValueError: tensors differ; the message names the first. On all ranks, if all see the checkpoint.
    """
    path = checkpoint.path
    if module is not None:
        stored = {name: shape for name, shape in checkpoint.shapes.items() if shape is not None}
        tensors = {x: t for x, t in get_model_state_dict(module).items() if isinstance(t, Tensor)}
        expected = {x: tuple(t.shape) for x, t in tensors.items()}
        if other := sorted(x for x in stored.keys() | expected.keys() if stored.get(x) != expected.get(x)):
            saved, own = (x.get(other[0], "none") for x in (stored, expected))
            raise ValueError(
                f"{path} must be a checkpoint of this model, got {other[0]} of shape {saved} in it and {own} here, and "
                f"{len(other) - 1} more that differ; give the model it was made with."
            )
    if num_optimizers and not checkpoint.num_optimizers:
        raise ValueError(
            f"{path} must have the optimizer's state to be continued, got only parameters (save_weights_only); give "
            "another, or start from its parameters: export it with python -m recipes.lightning.export for pretrained."
        )
    if num_optimizers and num_optimizers != checkpoint.num_optimizers:
        raise ValueError(
            f"{path} must have the state of {num_optimizers} optimizers, got {checkpoint.num_optimizers}; make them in "
            "configure_optimizers as the run did that wrote it."
        )
