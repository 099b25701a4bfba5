"""The group of ranks that share one sequence, and the host that a rank runs on."""

from __future__ import annotations

import os
import platform
import warnings
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store

Group = dist.ProcessGroup | DeviceMesh | None

HOST_AXES = ("host", "gpu")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_backends: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()


def resolve(group: Group) -> dist.ProcessGroup | None:
    """Return the process group behind `group`; None if it has no other rank to communicate with.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, a 2-D one with the axes ("host", "gpu"), or None for one process.
            `dist.group.WORLD` is a ProcessGroup. The first call with a 2-D mesh is collective over its
            root mesh.
    Raises:
        ValueError: a mesh with other axes, without this rank, or not numbered host by host; or another type.
    """
    if isinstance(group, dist.ProcessGroup):  # first, since torch's test for a mesh takes 1 µs
        return group if group.size() > 1 else None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1 and group.mesh_dim_names != HOST_AXES:
            raise ValueError(
                f"group must be a 1-D mesh, or a 2-D one with axes {HOST_AXES}, got axes "
                f"{group.mesh_dim_names or group.ndim}; pass one axis of it."
            )
        if group.get_coordinate() is None:
            raise ValueError(
                f"group must be a mesh that holds this rank, got one of ranks {group.mesh.tolist()}; "
                "a rank outside the group must not call."
            )
        group = group.get_group() if group.ndim == 1 else _flatten(group)
    if group is None:
        if not torch.compiler.is_compiling():
            _warn_before_start()
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}; "
            "a rank outside the group must not call."
        )
    return group if group.size() > 1 else None


def _warn_before_start() -> None:
    """Warn if torchrun started several processes that have not joined yet: `dist.group.WORLD` is None until then."""
    size = int(os.environ.get("WORLD_SIZE") or "1")
    if size > 1 and not dist.is_initialized():
        warnings.warn(
            f"group is None, and this process, one of {size}, has not called init_process_group yet: it attends only "
            "to its own tokens. If these are a shard, read dist.group.WORLD after init_process_group.",
            stacklevel=4,
        )


def _flatten(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh of hosts and their GPUs, and remember how the mesh splits it."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"group must be a mesh of hosts and GPUs whose ranks ascend, got {mesh.mesh.tolist()}; "
            "number the ranks host by host."
        )
    group, split = mesh._flatten().get_group(), HostSplit(*mesh.mesh.shape)
    if _splits.setdefault(group, split) == split:
        return group
    others = _other_groups.setdefault(group, {})  # torch flattens all meshes of all ranks to the default group
    if split not in others:
        made = dist.new_group(ranks)
        assert isinstance(made, dist.ProcessGroup)
        others[split] = made
        _splits[others[split]] = split
    return others[split]


class HostSplit(NamedTuple):
    """Split of a group into hosts with equally many ranks each, numbered host by host.

    Args:
        num_hosts: number of hosts. In a 2-D mesh, the user decides which ranks are a host: any with fast links.
        num_gpus: ranks on each host.
    """

    num_hosts: int
    num_gpus: int

    def host_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the host of `rank`."""
        first = rank - rank % self.num_gpus
        return tuple(range(first, first + self.num_gpus))

    def hosts(self) -> list[tuple[int, ...]]:
        """Return the ranks of each host."""
        return [self.host_of(host * self.num_gpus) for host in range(self.num_hosts)]

    def rail_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same index on their hosts as `rank`, one of each host."""
        return tuple(range(rank % self.num_gpus, self.num_hosts * self.num_gpus, self.num_gpus))

    def __str__(self) -> str:
        return f"{self.num_hosts} x {self.num_gpus} (hosts x GPUs)"


_splits: WeakKeyDictionary[dist.ProcessGroup, HostSplit] = WeakKeyDictionary()
_other_groups: WeakKeyDictionary[dist.ProcessGroup, dict[HostSplit, dist.ProcessGroup]] = WeakKeyDictionary()


def known_split(group: dist.ProcessGroup) -> HostSplit | None:
    """Return how a group is split into hosts, the same on every rank.

    Return None if it is not the group of a 2-D mesh and its ranks have not compared their hosts yet.
    """
    return _splits.get(group)


def remember_split(group: dist.ProcessGroup, split: HostSplit) -> None:
    """Record how a group is split into hosts; called on all of its ranks."""
    _splits[group] = split


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the group's backend for tensors on `device`: "gloo" or "nccl"; "none" if it has none.

    Every implementation of NCCL is "nccl": from torch 2.15 on, a group that is created with "nccl" has "nccl2". Ring
    calls send messages over communicators of their own, so they need none in particular.
    """
    known = _backends.setdefault(group, {})
    if device.type not in known:  # a query for a missing backend takes 0.1 ms, as long as a kernel launch
        try:
            name = group._get_backend(device).name()
            known[device.type] = "nccl" if name.startswith("nccl") else name
        except RuntimeError:
            known[device.type] = "none"
    return known[device.type]


def store_of(group: dist.ProcessGroup | None) -> dist.Store | None:
    """Return the store that a group was created with; None if it has been destroyed, or for None."""
    try:
        return None if group is None else _get_process_group_store(group)
    except KeyError:
        return None


class Host(NamedTuple):
    """A host, or a container on one, identified by name and boot id.

    Both are needed: hosts created from one image may share a name, and containers of one host share a boot id.
    """

    name: str
    boot: str

    def __str__(self) -> str:
        return f"{self.name} ({self.boot})" if self.boot else self.name


def this_host() -> Host:
    """Return the host of this process; `boot` is the first 8 characters of its boot id, or empty without one."""
    try:
        boot = _BOOT_ID.read_text()[:8]
    except OSError:
        boot = ""
    return Host(platform.node(), boot)
