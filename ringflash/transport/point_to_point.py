"""Messages between ranks as batches of isend and irecv: gloo on CPU, NCCL on GPUs and between hosts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


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
    """Exchanges over one process group, all on one communicator of their own.

    Args:
        name: "gloo" or "nccl".
        group: the ranks of the ring.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name = name
        self.group = _own_communicator(group) if name == "nccl" else group
        self._ranks = dist.get_process_group_ranks(group)

    def post(self, sends: list[Message], recvs: list[Message]) -> Pending:
        """Start a batch of messages; the peers must post its counterparts in the same order.

        The tensors must be contiguous and stay untouched until `wait`.
        """
        ops = [self._op(dist.isend, message) for message in sends if message.rank is not None]
        ops += [self._op(dist.irecv, message) for message in recvs if message.rank is not None]
        return Pending(dist.batch_isend_irecv(ops) if ops else [])

    def _op(self, operation, message: Message) -> dist.P2POp:  # type: ignore[no-untyped-def]
        assert message.rank is not None
        return dist.P2POp(operation, message.tensor, self._ranks[message.rank], self.group)


def _own_communicator(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A NCCL communicator for the ring alone: its messages queue behind nobody else's, on a high-priority stream."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(ranks, backend="nccl", pg_options=options, use_local_synchronization=True)
    # Every rank must take part in the first operation of a communicator, and hops may leave some out.
    dist.barrier(group=own, device_ids=[torch.cuda.current_device()])
    return own
