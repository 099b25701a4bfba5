"""Areas whose contents travel between ranks as messages, within a host or between hosts.

Messages are ordered among each other and with the work of their stream, so no barrier is needed: a rank sends data that
it wrote earlier, receives into memory that is no longer read, and the caller's stream waits for the messages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ringflash.comm import cuda_graphs
from ringflash.comm.transport.areas import Incoming, Outgoing
from ringflash.comm.transport.buffers import synchronize
from ringflash.comm.transport.gpu_areas import GpuAreas, Marker, T
from ringflash.comm.transport.point_to_point import Message, PointToPoint
from ringflash.comm.wait_timer import waiting


class NcclGather(GpuAreas):
    """Areas over messages of NCCL.

    Messages need SMs, which a forward kernel holds until it ends. With a third buffer, a message may take as long as
    the kernels of two sections.
    """

    num_buffers = 3

    def __init__(self, channel: PointToPoint, device: torch.device) -> None:
        super().__init__(device)
        self.channel, self.name, self.rank, self.group = channel, channel.name, channel.rank, channel.group
        self.members = channel.members

    def reserve(self, name: str, num_bytes: int) -> None:
        if name in self._areas and self._areas[name].numel() >= num_bytes:
            return
        cuda_graphs.check_growth(name, num_bytes, self._device)
        if name in self._areas:
            synchronize(self._device)
        for thing in self._retire(name):
            cuda_graphs.keep_alive(thing)
        self._areas[name] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        if rank != self.rank:
            return None
        return self._areas[name][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def make_transfer(
        self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing], what: str
    ) -> Callable[[], None]:
        sends = [Message(tensor, rank, what) for tensor, rank in outgoing]
        receives = [Message(target, rank, what) for target, rank, source in incoming if source is None]
        own = [(target, source) for target, _, source in incoming if source is not None]

        def move() -> None:
            pending = self.channel.post(sends, receives)
            for target, source in own:
                target.copy_(source, non_blocking=True)
            pending.wait()

        return functools.partial(self.run, move)

    def barrier(self, channel: int) -> None:
        """Do nothing, since messages order the ranks."""

    @property
    def num_posted(self) -> int:
        return self.channel.group_channel.num_posted

    def release(self) -> None:
        synchronize(self._device)
        self._cache.drop()
        self._captured.clear()
        self._areas.clear()


class _Done:
    """Marker of finished work."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing."""


class GlooGather(NcclGather):
    """Areas over messages of gloo: the host itself does all work, in the order of issue."""

    def cached(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        return make()  # areas last for one call: cached views would keep them until the next garbage collection

    def on_one_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def make_transfer(self, *arguments: Any) -> Callable[[], None]:
        transfer = super().make_transfer(*arguments)

        def move() -> None:
            with waiting(self._device):
                transfer()

        return move

    def mark(self) -> Marker:
        return _Done()

    def wait(self, *markers: Marker) -> None:
        for marker in markers:
            marker.wait()  # type: ignore[attr-defined]

    def run_on_stream(
        self, name: str, work: Callable[[], None], after: Sequence[Marker], *, urgent: bool = False
    ) -> Marker:
        self.wait(*after)
        work()
        return _Done()

    def join(self) -> None:
        """Do nothing: no work is still running after an error."""
