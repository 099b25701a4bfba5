"""How K, V and gradients move between the ranks of a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ringflash.group import backend_of
from ringflash.transport.buffers import buffer, buffer_bytes, release_buffers
from ringflash.transport.point_to_point import Message, Pending, PointToPoint, set_timeout

TRANSPORTS = ("gloo", "nccl")

__all__ = [
    "TRANSPORTS",
    "Message",
    "Pending",
    "PointToPoint",
    "buffer",
    "buffer_bytes",
    "choose_transport",
    "open_transport",
    "release_buffers",
    "set_timeout",
]

_open: dict[tuple[str, str], tuple[dist.ProcessGroup, PointToPoint]] = {}


def choose_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """The transport that `name` stands for.

    Raises:
        ValueError: unknown name.
        NotImplementedError: the group or the device cannot carry it.
    """
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(
            f"transport must be 'auto' or one of {TRANSPORTS}, got {name!r}; 'auto' takes the group's backend."
        )
    able = "gloo" if device.type == "cpu" else "nccl"
    if name not in ("auto", able):
        raise NotImplementedError(
            f"transport must carry tensors on {device.type} ({able!r}), got {name!r}; use 'auto'."
        )
    backend = backend_of(group, device)
    if backend != able:
        raise NotImplementedError(
            f"group must have backend {able!r} for tensors on {device.type}, got {backend!r}; "
            f"create it with init_process_group or new_group(backend={able!r})."
        )
    return able


def open_transport(name: str, group: dist.ProcessGroup) -> PointToPoint:
    """The transport of a group; on NCCL opened on first use by all its ranks together and kept."""
    if name == "gloo":  # nothing to open; a group kept beyond destroy_process_group keeps gloo's threads running
        return PointToPoint(name, group)
    key = (name, group.group_name)
    known = _open.get(key)
    if known is None or known[0] is not group:
        known = _open[key] = (group, PointToPoint(name, group))
    return known[1]
