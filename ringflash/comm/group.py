"""The group of ranks that share one sequence, in the forms a caller may hold it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None

_backends: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()


def resolve(group: Group) -> dist.ProcessGroup | None:
    """The process group behind `group`; None where there is nobody to communicate with.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, or None for one process. `dist.group.WORLD` is a ProcessGroup.
    Raises:
        ValueError: a mesh of several axes, or of other ranks, or something else.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D mesh, got axes {group.mesh_dim_names or group.ndim}; pass one axis of it."
            )
        if group.get_coordinate() is None:
            raise ValueError(
                f"group must be a mesh that holds this rank, got one of ranks {group.mesh.tolist()}; "
                "a rank outside the group must not call."
            )
        group = group.get_group()
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}; "
            "a rank outside the group must not call."
        )
    return group if group.size() > 1 else None


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend for this group's tensors on `device`: "gloo", "nccl", or "none" where there is none."""
    known = _backends.setdefault(group, {})
    if device.type not in known:  # asking for one that is not there takes 0.1 ms, as long as a kernel's launch
        try:
            known[device.type] = group._get_backend(device).name()
        except RuntimeError:
            known[device.type] = "none"
    return known[device.type]


class HoldsGroup:
    """A module whose copies have its process group, which cannot be copied."""

    group: dist.ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied
