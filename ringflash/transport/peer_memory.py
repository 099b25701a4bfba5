"""Memory of a rank that its peers read and write, and who may do so when: what a copy-engine ring stands on.

    reserve      every rank makes an area of the same size, and maps those of the others
    barrier      on the stream: what any rank did before it lies before what any rank does after it
    signal       to one rank, once; `wait_signal` takes it away again
    beside       work on a stream of its own, after what the current stream holds so far

Nothing here blocks the host but `reserve`, and that only where an area grows.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ringflash.agreement import gather


class NoPeerMemory(RuntimeError):
    """Raised on every rank of the group, after they compared what each of them found."""


class OutOfReach(NoPeerMemory):
    """Ranks that do not share a host, or GPUs without peer access."""


class Token(Protocol):
    """Work under way."""

    def wait(self) -> None:
        """Order the current stream after it."""


class PeerMemory(Protocol):
    """One per group and process. Areas have names; all ranks reserve the same ones in the same order.

    `rank` is this process's in the group.
    """

    rank: int

    def reserve(self, name: str, num_bytes: int) -> None:
        """Make the area at least so large; collective where it is not yet."""

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The area of a rank, from its beginning."""

    def barrier(self) -> None:
        """Order the current streams of all ranks."""

    def signal(self, rank: int, channel: int) -> None:
        """Tell a rank that the current stream came here; waits until the last such signal was taken."""

    def wait_signal(self, rank: int, channel: int) -> None:
        """Hold the current stream until that rank's signal, and take it."""

    def beside(self, lane: str, work: Callable[[], None]) -> Token:
        """Run `work` after what the current stream holds, in the order of its lane, beside what comes next."""

    def num_bytes(self) -> int:
        """Bytes this rank gives to its areas."""

    def release(self) -> None:
        """Give the areas back; every rank does so, or the next `reserve` waits for ever."""


class SymmetricMemory:
    """Areas in torch's symmetric memory: every peer of one host maps them; a copy between two takes no SM.

    Args:
        group: its ranks open this together.
        timeout_ms: how long a barrier or a signal may take before the kernel that waits for it traps.
    Raises:
        OutOfReach: on every rank, where one cannot reach another's memory.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_ms: int) -> None:
        # Multicast objects are never used; without this torch makes one for every area.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.rank, self._group, self._timeout_ms = group.rank(), group, timeout_ms
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._areas: dict[str, torch.Tensor] = {}
        self._handles: dict[str, torch.distributed._symmetric_memory._SymmetricMemory] = {}
        self._views: dict[tuple[str, int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._lanes: dict[str, _Lane] = {}
        _check_places(gather(group, _place(self._device)))

    def reserve(self, name: str, num_bytes: int) -> None:
        """As PeerMemory. What peers may still do with the old area is over once this rank's streams are."""
        if name in self._areas and self._areas[name].numel() >= num_bytes:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"buffers must have their size before a CUDA graph is captured, got {name!r} growing to {num_bytes} "
                "bytes; run the call once before."
            )
        import torch.distributed._symmetric_memory as symmetric_memory

        torch.cuda.synchronize(self._device)
        self._views.clear()
        self._handles.pop(name, None)
        self._areas.pop(name, None)
        area, problem = None, ""
        try:
            area = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            problem = str(error)[:500]
        _raise_together(gather(self._group, problem))
        assert area is not None
        try:
            handle = symmetric_memory.rendezvous(area, self._group)
        except RuntimeError as error:
            handle, problem = None, str(error)[:500]
        _raise_together(gather(self._group, problem))
        assert handle is not None
        self._areas[name], self._handles[name] = area, handle

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        key = (name, rank, shape, dtype)
        if key not in self._views:
            if rank == self.rank:
                self._views[key] = self._areas[name][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            else:
                self._views[key] = self._handles[name].get_buffer(rank, shape, dtype)
        return self._views[key]

    def barrier(self) -> None:
        self._pad.barrier(0, self._timeout_ms)

    def signal(self, rank: int, channel: int) -> None:
        self._pad.put_signal(rank, channel, self._timeout_ms)

    def wait_signal(self, rank: int, channel: int) -> None:
        self._pad.wait_signal(rank, channel, self._timeout_ms)

    def beside(self, lane: str, work: Callable[[], None]) -> Token:
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(
                torch.cuda.Stream(self._device, priority=-1), torch.cuda.Event(), torch.cuda.Event()
            )
        stream, begin, end = self._lanes[lane]
        begin.record(torch.cuda.current_stream(self._device))
        stream.wait_event(begin)
        with torch.cuda.stream(stream):
            work()
        end.record(stream)
        return end

    def num_bytes(self) -> int:
        return sum(area.numel() for area in self._areas.values())

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        self._views.clear()
        self._handles.clear()
        self._areas.clear()

    @property
    def _pad(self) -> torch.distributed._symmetric_memory._SymmetricMemory:
        """Signals live beside an area; the K/V of a group are always there."""
        return self._handles["kv"]


class _Lane(NamedTuple):
    """A stream, and its events: of what it waits for, and of its last work. A lane's work ends in order."""

    stream: torch.cuda.Stream
    begin: torch.cuda.Event
    end: torch.cuda.Event


def _place(device: torch.device) -> list[object]:
    """Where this rank's memory lies, and with which visible devices it shares no peer access."""
    strangers = [
        str(torch.cuda.get_device_properties(other).uuid)
        for other in range(torch.cuda.device_count())
        if other != device.index and not torch.cuda.can_device_access_peer(device, other)
    ]
    return [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), strangers]


def _check_places(places: list) -> None:
    """Raise alike on every rank: all of them hold the same list."""
    hosts = sorted({host for host, _, _ in places})
    devices = [device for _, device, _ in places]
    cut = [rank for rank, (_, _, strangers) in enumerate(places) if set(strangers) & set(devices)]
    if len(hosts) > 1 or len(set(devices)) < len(devices) or cut:
        raise OutOfReach(
            "transport 'copy_engine' must have all ranks of the group on one host, on GPUs of their own with peer "
            f"access, got {len(places)} ranks with {len(set(devices))} GPUs on hosts {hosts}, no access from ranks "
            f"{cut}; use 'nccl'."
        )


def _raise_together(problems: list) -> None:
    failed = {rank: text for rank, text in enumerate(problems) if text}
    if failed:
        raise NoPeerMemory(
            f"symmetric memory must be there on every rank, got {failed}; free memory, or use transport='nccl'."
        )
