"""Transports that move K, V and gradients between the ranks of a group.

point_to_point   batches of sends and receives, over gloo or NCCL
peer_memory      memory that all GPUs of a host map, and copies between them ("copy_engine")
exchanges        torch's count of the exchanges that map memory, made equal on all ranks
message_memory   the interface of peer_memory over messages
lanes            CUDA streams and cached views, shared by both kinds of memory
copies           many copies between GPUs with one driver call
buffers          the pool of communication buffers
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringflash.comm.group import HostSplit, backend_of, store_of
from ringflash.comm.timeouts import device_timeout
from ringflash.comm.transport import buffers
from ringflash.comm.transport.buffers import buffer
from ringflash.comm.transport.message_memory import HostMessageMemory, MessageMemory
from ringflash.comm.transport.peer_memory import NoPeerMemory, OutOfReach, PeerMemory, SymmetricMemory
from ringflash.comm.transport.point_to_point import Message, Pending, PointToPoint

TRANSPORTS = ("gloo", "nccl", "copy_engine", "by_host", "ulysses")
HEAD_EXCHANGES = ("by_host", "ulysses")  # over other transports, within each host and between hosts
UNDECIDED = "copy_engine, by_host or nccl"  # "auto" until the ranks of a group have compared their hosts

Transport = PointToPoint | PeerMemory
T = TypeVar("T", bound=Transport)

__all__ = [
    "HEAD_EXCHANGES",
    "TRANSPORTS",
    "UNDECIDED",
    "Message",
    "MessageMemory",
    "PeerMemory",
    "Pending",
    "PointToPoint",
    "Transport",
    "buffer",
    "buffer_bytes",
    "choose_transport",
    "exchange_memory",
    "message_memory",
    "message_transport",
    "open_transport",
    "release_buffers",
    "transport_name",
    "whole_transport",
]

_open: dict[tuple[str, str], tuple[dist.ProcessGroup, Transport]] = {}
_decided: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def choose_transport(name: str, group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Return the transport that `name` selects; None for a single process, which sends nothing.

    For "auto" over NCCL, return UNDECIDED before the first call of the group.

    Raises:
        ValueError: unknown name.
        NotImplementedError: the group or the device does not support it.
    """
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(
            f"transport must be 'auto' or one of {TRANSPORTS}, got {name!r}; 'auto' takes what the GPUs' links allow."
        )
    if group is None:
        return None
    able = message_transport(device)
    if name == "copy_engine" and device.type == "cuda":
        return name
    if name not in ("auto", able, *HEAD_EXCHANGES):
        raise NotImplementedError(
            f"transport must be one for tensors on {device.type} ({able!r}), got {name!r}; use 'auto'."
        )
    backend = backend_of(group, device)
    if backend != able:
        raise NotImplementedError(
            f"group must have backend {able!r} for tensors on {device.type}, got {backend!r}; "
            f"create it with init_process_group or new_group(backend={able!r})."
        )
    if name in HEAD_EXCHANGES:
        return name
    return _decided.get(group, UNDECIDED) if (name, able) == ("auto", "nccl") else able


def message_transport(device: torch.device) -> str:
    """Return the transport that sends tensors on `device` as messages."""
    return "gloo" if device.type == "cpu" else "nccl"


def open_transport(name: str, group: dist.ProcessGroup) -> Transport:
    """Return the transport of a group, which is opened on first use and cached. The first call is collective.

    Args:
        name: "gloo", "nccl", "copy_engine", or UNDECIDED, which tries the copy engine and takes NCCL if any rank cannot
            map the memory of another.
    Raises:
        RuntimeError: on every rank, if "copy_engine" finds several hosts or GPUs without peer access.
    """
    if name == "gloo":  # not cached: a group that outlives destroy_process_group keeps gloo's threads running
        return PointToPoint(name, group)
    if name == UNDECIDED:
        name = _decided[group] = _decide(group)
    return _opened(name, group, lambda: _create_transport(name, group))


def _opened(name: str, group: dist.ProcessGroup, make: Callable[[], T]) -> T:
    """Return the transport or memory of a group by name, which `make` opens on first use."""
    key = (name, group.group_name)
    known = _open.get(key)
    if known is None or known[0] is not group:  # a group that was destroyed may have had the same name
        _close_destroyed()
        known = _open[key] = (group, make())
    if isinstance(messages := whole_transport(known[1]), PointToPoint):
        messages.capture_checked = False
    return cast(T, known[1])


def _close_destroyed() -> None:
    """Free the memory of groups that have been destroyed."""
    for key, (group, transport) in list(_open.items()):
        if store_of(group) is None:
            del _open[key]
            if not isinstance(transport, PointToPoint):
                transport.release()


def _create_transport(name: str, group: dist.ProcessGroup) -> Transport:
    return PointToPoint(name, group) if name != "copy_engine" else _create_memory(group)


def _create_memory(group: dist.ProcessGroup, split: HostSplit | None = None) -> PeerMemory:
    return SymmetricMemory(group, int(device_timeout(group).total_seconds() * 1000), split)


def _decide(group: dist.ProcessGroup) -> str:
    """Return "copy_engine" or "nccl", the same on every rank, because all ranks raise the same errors."""
    try:
        open_transport("copy_engine", group)
    except NoPeerMemory as problem:
        _explain("transport 'auto' takes 'nccl'", problem)
        return "nccl"
    return "copy_engine"


def exchange_memory(group: dist.ProcessGroup, split: HostSplit, device: torch.device) -> PeerMemory:
    """Return memory over which the ranks of each host exchange heads. The first call is collective over the group.

    It is memory of the copy engine. On CPUs, or if any host has GPUs without peer access, it is memory of messages.
    """
    if device.type == "cpu":  # not cached, as in `open_transport`
        return HostMessageMemory(PointToPoint("gloo", group).among(split.host_of(group.rank())), device)
    return _opened(f"heads in {split}", group, lambda: _exchange_memory(group, split, device))


def _exchange_memory(group: dist.ProcessGroup, split: HostSplit, device: torch.device) -> PeerMemory:
    try:
        return _create_memory(group, split)
    except NoPeerMemory as problem:
        _explain("heads are exchanged by messages of NCCL", problem)
        channel = open_transport("nccl", group)
        assert isinstance(channel, PointToPoint)
        return MessageMemory(channel.among(split.host_of(group.rank())), device)


def _explain(choice: str, problem: NoPeerMemory) -> None:
    """Warn of a failure of the copy engine, unless GPUs merely have no peer access."""
    if not isinstance(problem, OutOfReach):
        warnings.warn(f"{choice}, since 'copy_engine' failed: {problem}", stacklevel=3)


def transport_name(transport: Transport | None) -> str | None:
    """Return one of TRANSPORTS; None for a single process."""
    if transport is None:
        return None
    return transport.name if isinstance(transport, PointToPoint | MessageMemory) else "copy_engine"


def whole_transport(transport: Transport) -> Transport:
    """Return the transport that orders calls of this one: messages of the whole group, or the memory itself."""
    if isinstance(transport, MessageMemory):
        transport = transport.channel
    return transport.whole if isinstance(transport, PointToPoint) else transport


def message_memory(channel: PointToPoint, device: torch.device) -> MessageMemory:
    """Return the memory that all-gathers K/V by heads over this channel; cached with the channel."""
    name = f"{channel.name} by heads among {channel.members}"
    return _opened(name, channel.group, lambda: MessageMemory(channel, device))


def buffer_bytes() -> int:
    """Return the bytes that this process holds for communication on all devices, including memory mapped by peers."""
    return buffers.buffer_bytes() + sum(memory.num_bytes() for memory in _peer_memories())


def release_buffers() -> None:
    """Free the communication buffers; the next call allocates them again.

    CUDA graphs of earlier calls must not be replayed afterwards. With the transport "copy_engine", every rank of its
    groups must call this between the same two ring calls.
    """
    buffers.release_buffers()
    for memory in _peer_memories():
        memory.release()


def _peer_memories() -> list[PeerMemory]:
    return [opened for _, opened in _open.values() if not isinstance(opened, PointToPoint)]
