"""Memory of a rank that its peers read and write, and who may do so when: what a copy-engine ring stands on.

    reserve      every rank makes an area of the same size, and maps those of the others
    barrier      on the stream: what any rank did before it lies before what any rank does after it
    beside       work on a stream of its own

Nothing here blocks the host but `reserve`, and that only where an area grows.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from ringflash import graphs
from ringflash.agreement import gather

T = TypeVar("T")
_MOST_KEPT = 12


class NoPeerMemory(RuntimeError):
    """Raised on every rank of the group, after they compared what each of them found."""


class OutOfReach(NoPeerMemory):
    """Ranks that do not share a host, or GPUs without peer access."""


class Kept:
    """A few things made once and kept until they are dropped: views of areas, which must not outlive these."""

    def __init__(self) -> None:
        self._things: dict[Hashable, tuple[Any, Collection[str]]] = {}

    def get(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        """The one of this key, with views of these areas; the oldest of others gives way to a new one."""
        if key not in self._things:
            made = make()  # may drop others
            if len(self._things) == _MOST_KEPT:
                del self._things[next(iter(self._things))]
            self._things[key] = made, areas
        return cast(T, self._things[key][0])

    def drop(self, area: str | None = None) -> None:
        """Those with views of an area, default all."""
        kept = {} if area is None else {key: both for key, both in self._things.items() if area not in both[1]}
        self._things = kept


class Token(Protocol):
    """Work under way."""

    def query(self) -> bool:
        """Whether it has ended."""


class PeerMemory(Protocol):
    """One per group and process. Areas have names; all ranks reserve the same ones in the same order.

    `rank` is this process's in the group.
    """

    rank: int
    group: dist.ProcessGroup

    def reserve(self, name: str, num_bytes: int) -> None:
        """Make the area at least so large; collective where it is not yet."""

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The area of a rank, from its beginning."""

    def keep(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        """What `make` returned for this key, made again after one of its areas grew or many other keys came."""

    def barrier(self, channel: int) -> None:
        """Order the current streams of all ranks. Barriers of one channel follow one another."""

    def mark(self) -> Token:
        """What the current stream holds so far."""

    def wait(self, *tokens: Token) -> None:
        """Order the current stream after these."""

    def beside(self, lane: str, work: Callable[[], None], after: Sequence[Token], *, urgent: bool = False) -> Token:
        """Run `work` after these tokens, in the order of its lane, beside the current stream.

        Urgent work gets a free SM before work that is not; a lane is one or the other.
        """

    def join(self) -> None:
        """Order the current stream after all lanes, also after work that has no token because it raised."""

    def num_bytes(self) -> int:
        """Bytes this rank gives to its areas."""

    def release(self) -> None:
        """Give the areas back; every rank does so, or the next `reserve` waits for ever."""


class SymmetricMemory:
    """Areas in torch's symmetric memory: every peer of one host maps them; a copy between two takes no SM.

    Args:
        group: its ranks open this together.
        timeout_ms: how long a barrier may take before the kernel that waits in it traps.
    Raises:
        OutOfReach: on every rank, where one cannot reach another's memory.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_ms: int) -> None:
        # Multicast objects are never used; without this torch makes one for every area.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.rank, self.group, self._timeout_ms = group.rank(), group, timeout_ms
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._areas: dict[str, torch.Tensor] = {}
        self._handles: dict[str, torch.distributed._symmetric_memory._SymmetricMemory] = {}
        self._lanes: dict[str, torch.cuda.Stream] = {}
        self._kept = Kept()
        self._captured: set[str] = set()  # areas that a CUDA graph reads and writes
        _check_places(gather(group, _place(self._device)))

    def reserve(self, name: str, num_bytes: int) -> None:
        """As PeerMemory."""
        if name in self._areas and self._areas[name].numel() >= num_bytes:
            return
        graphs.check_growth(name, num_bytes, self._device)
        import torch.distributed._symmetric_memory as symmetric_memory

        torch.cuda.synchronize(self._device)
        gather(self.group, None)  # nor do the streams of the others still read what is given up here
        self._kept.drop(name)
        old = self._areas.pop(name, None), self._handles.pop(name, None)
        if name in self._captured:
            self._captured.remove(name)
            for thing in old:
                graphs.keep(thing)
        del old
        area, problem = None, ""
        try:
            area = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            problem = str(error)[:500]
        _raise_together(gather(self.group, problem))
        assert area is not None
        try:
            handle = symmetric_memory.rendezvous(area, self.group)
        except RuntimeError as error:
            handle, problem = None, str(error)[:500]
        _raise_together(gather(self.group, problem))
        assert handle is not None
        self._areas[name], self._handles[name] = area, handle

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if rank == self.rank:
            return self._areas[name][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return self._handles[name].get_buffer(rank, shape, dtype)

    def keep(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        thing = self._kept.get(key, areas, make)
        if graphs.capturing(self._device):
            graphs.keep(thing)
            self._captured.update(areas)
        return thing

    def barrier(self, channel: int) -> None:
        self._pad.barrier(channel, self._timeout_ms)

    def mark(self) -> Token:
        return self._current().record_event()

    def wait(self, *tokens: Token) -> None:
        stream = self._current()
        for token in tokens:
            token.wait(stream)  # type: ignore[attr-defined]

    def beside(self, lane: str, work: Callable[[], None], after: Sequence[Token], *, urgent: bool = False) -> Token:
        if lane not in self._lanes:
            self._lanes[lane] = torch.cuda.Stream(self._device, priority=-1 if urgent else 0)
        stream, current = self._lanes[lane], self._current()
        torch.cuda.set_stream(stream)  # the context manager takes several times as long
        try:
            for token in after:
                token.wait(stream)  # type: ignore[attr-defined]
            work()
            return stream.record_event()
        finally:
            torch.cuda.set_stream(current)

    def join(self) -> None:
        for lane in self._lanes.values():
            self._current().wait_stream(lane)

    def num_bytes(self) -> int:
        return sum(area.numel() for area in self._areas.values())

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        self._kept.drop()
        self._captured.clear()
        self._handles.clear()
        self._areas.clear()

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device.index)  # of a device or of none it takes several times as long

    @property
    def _pad(self) -> torch.distributed._symmetric_memory._SymmetricMemory:
        """Barriers live beside an area; the K/V of a group are always there."""
        return self._handles["kv"]


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
