"""Choice of the transport of a group, opened on first use and kept until the group is destroyed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import Enum
from typing import Final, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringflash.comm.group import HostSplit, backend_of, store_of
from ringflash.comm.timeouts import device_timeout
from ringflash.comm.transport import buffers
from ringflash.comm.transport.areas import GroupAreas
from ringflash.comm.transport.copy_engine import CopyEngine, NoCopyEngine, OutOfReach
from ringflash.comm.transport.message_gather import GlooGather, NcclGather
from ringflash.comm.transport.point_to_point import PointToPoint

TRANSPORTS = ("gloo", "nccl", "copy_engine")


class Undecided(Enum):
    """State of "auto" over NCCL until the ranks of a group have compared their hosts."""

    UNDECIDED = "copy_engine or nccl"  # the value is only what `explain` shows; code compares the member itself


UNDECIDED: Final = Undecided.UNDECIDED
Transport = PointToPoint | GroupAreas
T = TypeVar("T", bound=Transport)

_open: dict[tuple[str, str], tuple[dist.ProcessGroup, Transport]] = {}
_decided: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def choose_transport(name: str, group: dist.ProcessGroup | None, device: torch.device) -> str | Undecided | None:
    """Return the transport that `name` selects; None for a single process, which sends nothing.

    For "auto" over NCCL, return UNDECIDED before the first call of the group.

    Args:
        name: "auto" or one of TRANSPORTS.
    Raises:
        NotImplementedError: the group or the device does not support it.
    """
    if group is None:
        return None
    messages = message_transport(device)
    if name == "copy_engine" and device.type == "cuda":
        return name
    if name not in ("auto", messages):
        raise NotImplementedError(
            f"transport must be one for tensors on {device.type} ({messages!r}), got {name!r}; use 'auto'."
        )
    backend = backend_of(group, device)
    if backend != messages:
        raise NotImplementedError(
            f"group must have backend {messages!r} for tensors on {device.type}, got {backend!r}; "
            f"create it with init_process_group or new_group(backend={messages!r})."
        )
    return _decided.get(group, UNDECIDED) if (name, messages) == ("auto", "nccl") else messages


def message_transport(device: torch.device) -> str:
    """Return the transport that sends tensors on `device` as messages."""
    return "gloo" if device.type == "cpu" else "nccl"


def open_transport(name: str | Undecided, group: dist.ProcessGroup) -> Transport:
    """Return the transport of a group, which is opened on first use and cached. The first call is collective.

    Args:
        name: "gloo", "nccl", "copy_engine", or UNDECIDED, which tries the copy engine and takes NCCL if any rank cannot
            map the memory of another.
    Raises:
        RuntimeError: on every rank, if "copy_engine" finds several hosts or GPUs without peer access.
    """
    if name == "gloo":  # not cached: a group that outlives destroy_process_group keeps gloo's threads running
        return PointToPoint(name, group)
    if name is UNDECIDED:
        name = _decided[group] = _decide(group)
    chosen: str = name
    return _opened(chosen, group, lambda: _create_transport(chosen, group))


def _opened(name: str, group: dist.ProcessGroup, make: Callable[[], T]) -> T:
    """Return a group's transport or memory by name; `make` opens it on first use."""
    key = (name, group.group_name)
    entry = _open.get(key)
    if entry is None or entry[0] is not group:  # a group that was destroyed may have had the same name
        _close_destroyed()
        entry = _open[key] = (group, make())
    if isinstance(messages := group_transport(entry[1]), PointToPoint):
        messages.capture_checked = False
    return cast(T, entry[1])


def _close_destroyed() -> None:
    """Free the memory of groups that have been destroyed."""
    for key, (group, transport) in list(_open.items()):
        if store_of(group) is None:
            del _open[key]
            if not isinstance(transport, PointToPoint):
                transport.release()


def _create_transport(name: str, group: dist.ProcessGroup) -> Transport:
    return PointToPoint(name, group) if name != "copy_engine" else _create_copy_engine(group)


def _create_copy_engine(group: dist.ProcessGroup, split: HostSplit | None = None) -> GroupAreas:
    return CopyEngine(group, int(device_timeout(group).total_seconds() * 1000), split)


def _decide(group: dist.ProcessGroup) -> str:
    """Return "copy_engine" or "nccl", the same on every rank, because all ranks raise the same errors."""
    try:
        open_transport("copy_engine", group)
    except NoCopyEngine as problem:
        _explain("transport 'auto' takes 'nccl'", problem)
        return "nccl"
    return "copy_engine"


def open_exchange_areas(group: dist.ProcessGroup, split: HostSplit, device: torch.device) -> GroupAreas:
    """Return the areas over which the ranks of each host exchange heads. The first call is collective over the group.

    The copy engine moves their contents. Messages do so on CPUs, or if the copy engine fails on any host.
    """
    if device.type == "cpu":  # not cached, as in `open_transport`
        return GlooGather(PointToPoint("gloo", group).among(split.host_of(group.rank())), device)
    return _opened(f"heads in {split}", group, lambda: _new_exchange_areas(group, split, device))


def _new_exchange_areas(group: dist.ProcessGroup, split: HostSplit, device: torch.device) -> GroupAreas:
    """Open the areas of `open_exchange_areas` on GPUs; all ranks fall back to messages together."""
    try:
        return _create_copy_engine(group, split)
    except NoCopyEngine as problem:
        _explain("heads are exchanged by messages of NCCL", problem)
        channel = open_transport("nccl", group)
        assert isinstance(channel, PointToPoint)
        return NcclGather(channel.among(split.host_of(group.rank())), device)


def _explain(choice: str, problem: NoCopyEngine) -> None:
    """Warn of a failure of the copy engine, unless GPUs merely have no peer access."""
    if not isinstance(problem, OutOfReach):
        warnings.warn(f"{choice}, since 'copy_engine' failed: {problem}", stacklevel=3)


def transport_name(transport: Transport | None) -> str | None:
    """Return one of TRANSPORTS; None for a single process."""
    if transport is None:
        return None
    return transport.name if isinstance(transport, (PointToPoint, NcclGather)) else "copy_engine"


def group_transport(transport: Transport) -> Transport:
    """Return the transport that orders calls of this one: messages of the whole group, or the copy engine itself."""
    if isinstance(transport, NcclGather):
        transport = transport.channel
    return transport.group_channel if isinstance(transport, PointToPoint) else transport


def open_gather_areas(channel: PointToPoint, device: torch.device) -> NcclGather:
    """Return the areas for an all-gather of K/V by heads over this channel; cached with the channel on GPUs."""
    if channel.name == "gloo":  # not cached, as in `open_transport`
        return GlooGather(channel, device)
    name = f"{channel.name} by heads among {channel.members}"
    return _opened(name, channel.group, lambda: NcclGather(channel, device))


def buffer_bytes() -> int:
    """Return the bytes that this process holds for communication on all devices, including memory mapped by peers."""
    return buffers.buffer_bytes() + sum(areas.num_bytes() for areas in _open_areas())


def release_buffers() -> None:
    """Free the communication buffers; the next call allocates them again.

    CUDA graphs of earlier calls must not be replayed afterwards. With the transport "copy_engine", every rank of its
    groups must call this between the same two ring calls.
    """
    buffers.release_buffers()
    for areas in _open_areas():
        areas.release()


def _open_areas() -> list[GroupAreas]:
    return [opened for _, opened in _open.values() if not isinstance(opened, PointToPoint)]
