"""Messages between ranks as batches of sends and receives: gloo on CPU, NCCL on GPUs and between hosts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringflash.communicator import communicator

TIMEOUT = timedelta(minutes=10)  # torch's default for NCCL
_TAG = 0


class Message(NamedTuple):
    """One tensor to or from a rank of the group; nothing where the rank is None."""

    tensor: torch.Tensor
    rank: int | None


class Pending:
    """Messages on their way."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Order the current stream (gloo: the host) after every message of the batch."""
        for work in self._works:
            work.wait()
        self._works = []


class PointToPoint:
    """Exchanges over one process group; on NCCL over a communicator of their own.

    There the messages queue behind nobody else's, on a high-priority stream.

    Args:
        name: "gloo" or "nccl".
        group: the ranks of the ring.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name = name
        self._channel = communicator(group, "ring", "nccl", TIMEOUT) if name == "nccl" else group
        if name == "nccl":  # every rank must take part in a communicator's first operation; hops may leave some out
            self._channel.allreduce([torch.zeros(1, device="cuda")]).wait()

    def post(self, sends: list[Message], recvs: list[Message]) -> Pending:
        """Start a batch of messages; the peers must post its counterparts in the same order.

        The tensors must be contiguous and stay untouched until `wait`.
        """
        messages: list[tuple[Callable[[list[torch.Tensor], int, int], dist.Work], torch.Tensor, int]] = []
        messages += [(self._channel.send, tensor, rank) for tensor, rank in sends if rank is not None]
        messages += [(self._channel.recv, tensor, rank) for tensor, rank in recvs if rank is not None]
        if not messages:
            return Pending([])
        if self.name == "gloo":
            return Pending([start([tensor], rank, _TAG) for start, tensor, rank in messages])
        self._channel._start_coalescing(messages[0][1].device)
        for start, tensor, rank in messages:
            start([tensor], rank, _TAG)
        return Pending([self._channel._end_coalescing(messages[0][1].device)])
