"""How K, V and gradients move between the ranks of a ring."""

from __future__ import annotations

import warnings
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringflash.comm.group import backend_of
from ringflash.comm.timeouts import device_timeout
from ringflash.comm.transport import buffers
from ringflash.comm.transport.buffers import buffer
from ringflash.comm.transport.message_memory import MessageMemory
from ringflash.comm.transport.peer_memory import NoPeerMemory, OutOfReach, PeerMemory, SymmetricMemory
from ringflash.comm.transport.point_to_point import Message, Pending, PointToPoint

TRANSPORTS = ("gloo", "nccl", "copy_engine")
UNDECIDED = "copy_engine or nccl"  # what auto stands for until the ranks of a group have compared their places

Transport = PointToPoint | PeerMemory

__all__ = [
    "TRANSPORTS",
    "Message",
    "MessageMemory",
    "PeerMemory",
    "Pending",
    "PointToPoint",
    "Transport",
    "buffer",
    "buffer_bytes",
    "choose_transport",
    "message_memory",
    "open_transport",
    "release_buffers",
    "transport_name",
]

_open: dict[tuple[str, str], tuple[dist.ProcessGroup, Transport]] = {}
_TRIAL_BYTES = 4096
_decided: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def choose_transport(name: str, group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """The transport that `name` stands for; UNDECIDED for "auto" over NCCL before its ranks first called together.

    None for a single process, which sends nothing.

    Raises:
        ValueError: unknown name.
        NotImplementedError: the group or the device cannot carry it.
    """
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(
            f"transport must be 'auto' or one of {TRANSPORTS}, got {name!r}; 'auto' takes what the GPUs' links allow."
        )
    if group is None:
        return None
    able = "gloo" if device.type == "cpu" else "nccl"
    if name == "copy_engine" and device.type == "cuda":
        return name
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
    return _decided.get(group, UNDECIDED) if (name, able) == ("auto", "nccl") else able


def open_transport(name: str, group: dist.ProcessGroup) -> Transport:
    """The transport of a group; but for gloo opened on first use by all its ranks together and kept.

    Args:
        name: one of TRANSPORTS; UNDECIDED is decided here: the copy engine where every rank can map the others'
            memory, which is tried, else NCCL.
    Raises:
        RuntimeError: on every rank, where "copy_engine" finds more than one host or GPUs without peer access.
    """
    if name == "gloo":  # nothing to open; a group kept beyond destroy_process_group keeps gloo's threads running
        return PointToPoint(name, group)
    if name == UNDECIDED:
        name = _decided[group] = _decide(group)
    key = (name, group.group_name)
    known = _open.get(key)
    if known is None or known[0] is not group:
        known = _open[key] = (group, _opened(name, group))
    return known[1]


def _opened(name: str, group: dist.ProcessGroup) -> Transport:
    if name != "copy_engine":
        return PointToPoint(name, group)
    return SymmetricMemory(group, int(device_timeout(group).total_seconds() * 1000))


def _decide(group: dist.ProcessGroup) -> str:
    """The same on every rank: only what all of them were told stands in the way of the copy engine."""
    try:
        memory = open_transport("copy_engine", group)
        assert not isinstance(memory, PointToPoint)
        memory.reserve("kv", _TRIAL_BYTES)
    except NoPeerMemory as problem:
        _open.pop(("copy_engine", group.group_name), None)
        if not isinstance(problem, OutOfReach):
            warnings.warn(f"transport 'auto' takes 'nccl', since 'copy_engine' cannot be had: {problem}", stacklevel=2)
        return "nccl"
    return "copy_engine"


def transport_name(transport: Transport | None) -> str | None:
    """One of TRANSPORTS; None for a single process."""
    if transport is None:
        return None
    return transport.name if isinstance(transport, PointToPoint | MessageMemory) else "copy_engine"


def message_memory(channel: PointToPoint, device: torch.device) -> MessageMemory:
    """What gathers keys by heads over these messages; one for a channel, kept as long."""
    key = (f"{channel.name} by heads", channel.group.group_name)
    known = _open.get(key)
    if known is None or known[0] is not channel.group:
        known = _open[key] = (channel.group, MessageMemory(channel, device))
    assert isinstance(known[1], MessageMemory)
    return known[1]


def buffer_bytes() -> int:
    """Bytes held for communication by this process, on all devices, those that peers map too."""
    return buffers.buffer_bytes() + sum(memory.num_bytes() for memory in _peer_memories())


def release_buffers() -> None:
    """Give the communication buffers back; the next call allocates them anew.

    CUDA graphs of earlier calls must not be replayed after it. With the transport "copy_engine" every rank of its
    groups must call this, between the same two calls.
    """
    buffers.release_buffers()
    for memory in _peer_memories():
        memory.release()


def _peer_memories() -> list[PeerMemory]:
    return [opened for _, opened in _open.values() if not isinstance(opened, PointToPoint)]
