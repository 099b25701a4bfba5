"""Messages between ranks as batches of sends and receives: gloo on CPU, NCCL on GPUs and between hosts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from ringflash.comm.communicator import communicator
from ringflash.comm.cuda_graphs import capturing
from ringflash.comm.timeouts import device_timeout, timeout

_TAG = 0


class Message(NamedTuple):
    """One tensor to or from a rank of the group; nothing where the rank is None. `what` names it in errors."""

    tensor: torch.Tensor
    rank: int | None
    what: str


class Pending:
    """Messages on their way.

    Args:
        works: each with what it does, for the error if it fails.
        timeout: None leaves it to the work itself, and does not block the host.
    """

    def __init__(self, works: list[tuple[dist.Work, str]], timeout: timedelta | None = None) -> None:
        self._works, self._timeout = works, timeout

    def wait(self) -> None:
        """Order the current stream (gloo: the host) after every message of the batch.

        Raises:
            RuntimeError: a peer died, or did not answer in time; names the message and both ranks.
        """
        works, self._works = self._works, []
        for work, what in works:
            try:
                work.wait() if self._timeout is None else work.wait(self._timeout)
            except RuntimeError as cause:
                limit = f" within {self._timeout.total_seconds():.0f} s" if self._timeout else ""
                raise RuntimeError(
                    f"{what} must end{limit}, got {cause}; that rank died or stalls, its log says why "
                    "(ringflash.set_timeout waits longer)."
                ) from cause


def check_capture() -> None:
    """Refuse what makes a replayed CUDA graph wrong without a word.

    NCCL registers the buffers of captured messages with its peers, as whole allocations; expandable segments are many.
    Gradients of a replay on 4 H200s were off by their own size (torch 2.11, NCCL 2.28.9).

    Raises:
        RuntimeError: with the remedy.
    """
    segments = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" in segments and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        raise RuntimeError(
            "NCCL_GRAPH_REGISTER must be 0 to capture messages over NCCL with expandable segments, got "
            f"{os.environ.get('NCCL_GRAPH_REGISTER', 'nothing, which is 1')}; export NCCL_GRAPH_REGISTER=0 before the "
            "processes start, or use transport='copy_engine'."
        )


class PointToPoint:
    """Exchanges over one process group; on NCCL over a communicator of their own.

    There the messages queue behind nobody else's, on a high-priority stream.

    Args:
        name: "gloo" or "nccl".
        group: the ranks of the ring.
    """

    num_posted = 0  # batches, also those without a message: the same number on every rank that made the same calls

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name, self.rank, self.group = name, group.rank(), group
        self._channel = communicator(group, "ring", "nccl", device_timeout(group)) if name == "nccl" else group
        if name == "nccl":  # every rank must take part in a communicator's first operation; hops may leave some out
            self._channel.allreduce([torch.zeros(1, device="cuda")]).wait()

    def is_broken(self) -> bool:
        """Whether NCCL found that a peer is gone, or its connection. Over gloo the call itself raises."""
        if self.name != "nccl":
            return False
        error = self._channel._get_backend(torch.device("cuda")).get_error()
        return error in (ErrorType.COMM_ERROR, ErrorType.REMOTE_ERROR)

    def post(self, sends: list[Message], recvs: list[Message]) -> Pending:
        """Start a batch of messages; the peers must post its counterparts in the same order.

        The tensors must be contiguous and stay untouched until `wait`.
        """
        todo = [self._start("to", self._channel.send, m.tensor, m.rank, m.what) for m in sends if m.rank is not None]
        todo += [self._start("from", self._channel.recv, m.tensor, m.rank, m.what) for m in recvs if m.rank is not None]
        self.num_posted += 1  # also where it fails: by then a part of it may be on its way
        return self._post(todo, sends + recvs)

    def _post(self, todo: list[tuple[Callable[[], dist.Work], str]], messages: list[Message]) -> Pending:
        if self.name == "gloo":
            return Pending([(start(), what) for start, what in todo], timeout(self.group))
        if not todo:
            return Pending([])
        device = messages[0].tensor.device
        if capturing(device):
            check_capture()
        self._channel._start_coalescing(device)
        for start, _ in todo:
            start()
        return Pending([(self._channel._end_coalescing(device), "; ".join(what for _, what in todo))])

    def _start(
        self, way: str, operation: Callable[..., dist.Work], tensor: torch.Tensor, rank: int, what: str
    ) -> tuple[Callable[[], dist.Work], str]:
        """What starts a message, and how an error calls it."""
        name = f"{what} of rank {self.rank} {way} rank {rank} over {self.name}"
        return functools.partial(operation, [tensor], rank, _TAG), name
