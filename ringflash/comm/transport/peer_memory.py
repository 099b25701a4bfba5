"""Memory of a rank that its peers read and write, and who may do so when: what a copy-engine ring stands on.

    reserve      every rank makes an area of the same size, and maps those of the others
    barrier      on the stream: what any rank did before it lies before what any rank does after it
    beside       work on a stream of its own

Nothing here blocks the host but `reserve`, and that only where an area grows.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ringflash.comm import cuda_graphs
from ringflash.comm.agreement import gather
from ringflash.comm.host import this_host
from ringflash.comm.transport.copies import Copies
from ringflash.comm.transport.lanes import Lanes, T, Token


class NoPeerMemory(RuntimeError):
    """Raised on every rank of the group, after they compared what each of them found."""


class OutOfReach(NoPeerMemory):
    """Ranks that do not share a host, or GPUs without peer access."""


class Incoming(NamedTuple):
    """What comes here. `source`: where it is, where that is in reach; or on this very rank."""

    target: torch.Tensor
    rank: int
    source: torch.Tensor | None


class Outgoing(NamedTuple):
    """What another rank has come to it, where memory is out of reach."""

    tensor: torch.Tensor
    rank: int


class PeerMemory(Protocol):
    """One per group and process. Areas have names; all ranks reserve the same ones in the same order.

    `rank` is this process's in the group; `turns`: buffers that take turns, so that what comes is not late.
    """

    rank: int
    group: dist.ProcessGroup
    turns: int

    @property
    def num_posted(self) -> int:
        """Barriers, or batches of messages, that this rank issued: as many on every rank after the same calls."""

    def reserve(self, name: str, num_bytes: int) -> None:
        """Make the area at least so large; collective where it is not yet."""

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The area of a rank, from its beginning; None where it is out of reach."""

    def moving(self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing], what: str) -> Callable[[], None]:
        """What brings here what others have, on the stream that is then current.

        Both of a pair of ranks name its moves in one order.
        """

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
        """Order the current stream and every lane after all lanes, also after work that raised and has no token.

        Memory that one lane allocated and another still uses may then be freed.
        """

    def num_bytes(self) -> int:
        """Bytes this rank gives to its areas."""

    def release(self) -> None:
        """Give the areas back; every rank does so, or the next `reserve` waits for ever."""


class SymmetricMemory(Lanes):
    """Areas in torch's symmetric memory: every peer of one host maps them; a copy between two takes no SM.

    Args:
        group: its ranks open this together.
        timeout_ms: how long a barrier may take before the kernel that waits in it traps.
    Raises:
        OutOfReach: on every rank, where one cannot reach another's memory.
    """

    turns = 2
    num_posted = 0

    def __init__(self, group: dist.ProcessGroup, timeout_ms: int) -> None:
        # Multicast objects are never used; without this torch makes one for every area.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.rank, self.group, self._timeout_ms = group.rank(), group, timeout_ms
        self._handles: dict[str, torch.distributed._symmetric_memory._SymmetricMemory] = {}
        _check_places(gather(group, _place(self._device)))

    def reserve(self, name: str, num_bytes: int) -> None:
        """As PeerMemory."""
        if name in self._areas and self._areas[name].numel() >= num_bytes:
            return
        cuda_graphs.check_growth(name, num_bytes, self._device)
        import torch.distributed._symmetric_memory as symmetric_memory

        torch.cuda.synchronize(self._device)
        gather(self.group, None)  # nor do the streams of the others still read what is given up here
        captured, handle = self._retire(name), self._handles.pop(name, None)
        for thing in captured and [*captured, handle]:
            cuda_graphs.keep(thing)
        del captured, handle
        make = functools.partial(symmetric_memory.empty, num_bytes, dtype=torch.uint8, device=self._device)
        area, problem = _made(make)
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

    def moving(self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing], what: str) -> Callable[[], None]:
        pairs = [(target, source, rank) for target, rank, source in incoming if source is not None]
        assert len(pairs) == len(incoming)
        # A copy within this GPU waits for SMs, which a kernel may keep to its end: behind those that need none.
        from_peers, from_here = (
            Copies([(target, source) for target, source, rank in pairs if (rank == self.rank) is here], self._device)
            for here in (False, True)
        )

        def move() -> None:
            from_peers()
            from_here()

        return move

    def barrier(self, channel: int) -> None:
        self._pad.barrier(channel, self._timeout_ms)
        self.num_posted += 1

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        self._kept.drop()
        self._captured.clear()
        self._handles.clear()
        self._areas.clear()

    @property
    def _pad(self) -> torch.distributed._symmetric_memory._SymmetricMemory:
        """Barriers live beside an area; the K/V of a group are always there."""
        return self._handles["kv"]


def _made(make: Callable[[], torch.Tensor]) -> tuple[torch.Tensor | None, str]:
    """An area, or the error of the driver, which is asked again once torch has given it back its cached blocks."""
    problem = ""
    for last in (False, True):
        try:
            return make(), ""
        except RuntimeError as error:
            problem = str(error)[:500]
        if not last:
            torch.cuda.empty_cache()
    return None, problem


def _place(device: torch.device) -> list[object]:
    """Where this rank's memory lies, and with which visible devices it shares no peer access."""
    strangers = [
        str(torch.cuda.get_device_properties(other).uuid)
        for other in range(torch.cuda.device_count())
        if other != device.index and not torch.cuda.can_device_access_peer(device, other)
    ]
    return [str(this_host()), str(torch.cuda.get_device_properties(device).uuid), strangers]


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
