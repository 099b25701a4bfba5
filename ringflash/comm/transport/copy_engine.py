"""Transport between GPUs of one host: each maps the areas of the others, and copies between them need no SM."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from ringflash.comm import cuda_graphs
from ringflash.comm.agreement import gather
from ringflash.comm.communicator import register_members, register_peers
from ringflash.comm.driver import plain_launch
from ringflash.comm.driver_commands import Command
from ringflash.comm.group import HostSplit, this_host
from ringflash.comm.transport.areas import Incoming, Outgoing
from ringflash.comm.transport.copies import Copies
from ringflash.comm.transport.gpu_areas import GpuAreas, T
from ringflash.comm.transport.store_exchanges import StoreExchangeCount

_PAD_BYTES = 16  # torch's smallest allocation; it adds a pad of signals to each


class NoCopyEngine(RuntimeError):
    """Raised on every rank of the group, after the ranks have compared their hosts, GPUs and errors."""


class OutOfReach(NoCopyEngine):
    """Raised for ranks on different hosts, or GPUs without peer access."""


class CopyEngine(GpuAreas):
    """Areas in torch's symmetric memory: all GPUs of a host map them, and copies between them need no SM.

    Args:
        group: creating the memory and growing its areas are collective calls of this group.
        timeout_ms: time after which a kernel that waits in a barrier traps.
        split: hosts of the ranks; only ranks of the same host share memory. Default: all ranks share it.
    Raises:
        OutOfReach: on every rank, if a rank cannot map memory that it is to share.
    """

    num_buffers = 2
    num_posted = 0

    def __init__(self, group: dist.ProcessGroup, timeout_ms: int, split: HostSplit | None = None) -> None:
        # A copy has one destination, so areas need no multicast object. A value that the user has set stays.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        cuda_graphs.check_growth("pad", _PAD_BYTES, self._device)
        self.rank, self.group, self._timeout_ms = group.rank(), group, timeout_ms
        self._handles: dict[str, _SymmetricMemory] = {}
        # Group of the ranks that map one another's areas, kept alive here; torch finds their store by its name.
        self._mapping: tuple[str, dist.ProcessGroup] = group.group_name, group
        locations = gather(group, _location(self._device))
        for members in [tuple(range(len(locations)))] if split is None else split.hosts():
            _check_locations([locations[rank] for rank in members])
        if split is not None and split.num_hosts > 1:
            self.members = split.host_of(group.rank())
            self.rank = self.members.index(group.rank())
            self._mapping = register_members(group, self.members)
        # Barriers use a separate pad: CUDA graphs keep its address, but an area is freed when it grows.
        self._pad = self._map(_PAD_BYTES, self._count_exchanges())
        register_peers(group, self._device)

    def reserve(self, name: str, num_bytes: int) -> None:
        if name in self._areas and self._areas[name].numel() >= num_bytes:
            return
        cuda_graphs.check_growth(name, num_bytes, self._device)
        torch.cuda.synchronize(self._device)
        catch_up = self._count_exchanges()  # all ranks have finished reading the old area
        captured, handle = self._retire(name), self._handles.pop(name, None)
        for memory in [*captured, handle] if captured else []:
            cuda_graphs.keep_alive(memory)
        del captured, handle
        self._areas[name], self._handles[name] = self._map(num_bytes, catch_up)

    def _count_exchanges(self) -> Callable[[], None]:
        """Compare torch's counts of exchanges; return a function that raises this rank's count to the largest."""
        exchanges, problem = _allocate(lambda: StoreExchangeCount(lambda: self._empty(_PAD_BYTES), self._device))
        answers = gather(self.group, [problem, exchanges and exchanges.count])
        _raise_together([said for said, _ in answers])
        assert exchanges is not None
        return functools.partial(exchanges.catch_up, max(count for _, count in answers))

    def _map(self, num_bytes: int, catch_up: Callable[[], None]) -> tuple[Tensor, _SymmetricMemory]:
        """Allocate an area on every rank and map the areas of the other ranks. A collective call."""

        def allocate() -> Tensor:
            catch_up()
            return self._empty(num_bytes)

        area, problem = _allocate(allocate)
        _raise_together(gather(self.group, problem))
        assert area is not None
        handle = None
        try:
            handle = _SymmetricMemory.rendezvous(area, self._mapping[0])
            torch.cuda.synchronize(self._device)  # torch clears the area on a stream that no other stream waits for
        except RuntimeError as error:
            problem = str(error)[:500]
        try:
            problems = gather(self.group, problem)
        except RuntimeError as cause:  # other ranks may still wait in the rendezvous that this rank has left
            if problem:
                raise _no_memory({self.group.rank(): problem}) from cause
            raise
        _raise_together(problems)
        assert handle is not None
        return area, handle

    def _empty(self, num_bytes: int) -> Tensor:
        """Return new memory that other processes can map; not from a pool, whose blocks torch frees and reuses."""
        return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self._device)

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if rank == self.rank:
            return self._areas[name][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return self._handles[name].get_buffer(rank, shape, dtype)

    def make_transfer(
        self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing], what: str
    ) -> Callable[[], None]:
        pairs = [(target, source, rank) for target, rank, source in incoming if source is not None]
        assert len(pairs) == len(incoming)
        # A copy within this GPU needs SMs, which a kernel may hold until it ends, so copies from peers go first.
        here = [(target, source) for target, source, rank in pairs if rank == self.rank]
        peers = [(target, source) for target, source, rank in pairs if rank != self.rank]
        batches = [Copies(batch, self._device) for batch in (peers, here) if batch]

        def move() -> None:
            stream = self.current()
            for batch in batches:
                batch(stream)

        def commands(stream: int, _: object) -> list[Command]:
            return [one for batch in batches for one in batch.commands(stream)]

        return functools.partial(self.run, move, commands=commands)

    def barrier(self, channel: int) -> None:
        self.run(self._pass_barrier, channel, commands=functools.partial(self._barrier_commands, channel))
        self.run_on_host(self._count_barrier)

    def _pass_barrier(self, channel: int) -> None:
        self._pad[1].barrier(channel, self._timeout_ms)

    def _barrier_commands(self, channel: int, stream: int, _: object) -> list[Command] | None:
        def launch(captured: torch.cuda.Stream) -> None:
            with torch.cuda.stream(captured):
                self._pass_barrier(channel)

        made = plain_launch(launch, stream)
        return None if made is None else [made]

    def _count_barrier(self) -> None:
        self.num_posted += 1

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        self._cache.drop()
        self._captured.clear()
        self._handles.clear()
        self._areas.clear()


def _allocate(make: Callable[[], T]) -> tuple[T | None, str]:
    """Return what `make` allocates, or the driver's error if it fails even after torch's cached blocks are freed."""
    problem = ""
    for last in (False, True):
        try:
            return make(), ""
        except RuntimeError as error:
            problem = str(error)[:500]
        if not last:
            torch.cuda.empty_cache()
    return None, problem


def _location(device: torch.device) -> list[object]:
    """Return this rank's host, its GPU, and the visible GPUs without peer access to it."""
    strangers = [
        str(torch.cuda.get_device_properties(other).uuid)
        for other in range(torch.cuda.device_count())
        if other != device.index and not torch.cuda.can_device_access_peer(device, other)
    ]
    return [str(this_host()), str(torch.cuda.get_device_properties(device).uuid), strangers]


def _check_locations(locations: list) -> None:
    """Raise OutOfReach unless the ranks share a host and have peer access; the same on every rank.

    Args:
        locations: `_location` of each rank.
    """
    hosts = sorted({host for host, _, _ in locations})
    devices = [device for _, device, _ in locations]
    isolated = [rank for rank, (_, _, strangers) in enumerate(locations) if set(strangers) & set(devices)]
    if len(hosts) > 1 or len(set(devices)) < len(devices) or isolated:
        raise OutOfReach(
            "transport 'copy_engine' must have each rank on another GPU of one host, with peer access between them, "
            f"got {len(locations)} ranks on {len(set(devices))} GPUs of hosts {hosts}, of which ranks {isolated} have "
            "no peer access; use 'nccl'."
        )


def _raise_together(problems: list) -> None:
    failed = {rank: text for rank, text in enumerate(problems) if text}
    if failed:
        raise _no_memory(failed)


def _no_memory(failed: dict[int, str]) -> NoCopyEngine:
    return NoCopyEngine(
        f"ranks could not allocate or map symmetric memory: {failed}; free memory, or use transport='nccl'."
    )
