"""Batches of sends and receives between ranks: gloo on CPUs, NCCL on GPUs and between hosts."""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from ringflash.comm.communicator import communicator
from ringflash.comm.cuda_graphs import capturing
from ringflash.comm.timeouts import describe_timeout, device_timeout, timeout

TAG = int.from_bytes(b"ring")  # not torch's default 0, which messages of the user in the same group may have


# Batches over gloo that nobody has waited for, as after an error. They are kept, since a receive that is freed while
# its message arrives blocks all later messages between the two ranks (torch 2.13).
_unawaited: list[list[tuple[dist.Work, str]]] = []


class Message(NamedTuple):
    """A tensor sent to or received from a rank of the group. `what` names it in errors."""

    tensor: Tensor
    rank: int
    what: str


class Pending:
    """Batch of messages in flight.

    Args:
        timeout: limit of a wait over gloo. None, over NCCL: the work has its own limit, and the host does not block.
    """

    def __init__(self, works: list[tuple[dist.Work, str]], timeout: timedelta | None = None) -> None:
        self._works, self._timeout = works, timeout

    def wait(self) -> None:
        """Order the current stream (gloo: the host) after every message of the batch.

        Raises:
            RuntimeError: a peer has died or stalled; names the message and both ranks.
        """
        works = self._works.copy()
        self._works.clear()
        for work, what in works:
            begun = time.monotonic()
            try:
                work.wait() if self._timeout is None else work.wait(self._timeout)
            except RuntimeError as cause:
                raise _peer_error(f"{what} did not finish{describe_timeout(self._timeout, begun)}", cause) from cause


def _peer_error(event: str, cause: RuntimeError) -> RuntimeError:
    return RuntimeError(
        f"{event} ({cause}); the peer has died or stalled, see its log (ringflash.set_timeout raises the limit)."
    )


def check_capture() -> None:
    """Raise RuntimeError for expandable segments with NCCL_GRAPH_REGISTER: replayed graphs would give wrong results.

    NCCL registers the buffers of captured messages with its peers as whole allocations, but an expandable segment
    consists of many. Gradients of a replay on 4 H200s had errors of 100% (torch 2.11, NCCL 2.28.9).
    """
    if os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return
    memory = torch.cuda.memory._snapshot()  # programs change the setting at run time
    if memory["allocator_settings"]["expandable_segments"] or any(x["is_expandable"] for x in memory["segments"]):
        raise RuntimeError(
            "NCCL_GRAPH_REGISTER must be 0 to capture messages over NCCL with expandable segments, got "
            f"{os.environ.get('NCCL_GRAPH_REGISTER', 'nothing, which is 1')}; export NCCL_GRAPH_REGISTER=0 before the "
            "processes start, or use transport='copy_engine'."
        )


class PointToPoint:
    """Messages over one process group.

    Over NCCL they use a separate communicator on a high-priority stream, so they do not queue behind other traffic.

    Args:
        name: "gloo" or "nccl".
    """

    num_posted = 0  # batches, empty ones included: equal on all ranks after the same calls
    members: tuple[int, ...] = ()  # ranks of the group that exchange messages; empty: all
    capture_checked = False  # once per call, because reading the allocator's state takes milliseconds
    _group_channel: PointToPoint | None = None

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name, self.rank, self.group = name, group.rank(), group
        self._channel = communicator(group, "ring", "nccl", device_timeout(group)) if name == "nccl" else group
        if name == "nccl":  # all ranks must join a communicator's first operation, but a call may skip some
            self._channel.allreduce([torch.zeros(1, device="cuda")]).wait()

    def among(self, members: Sequence[int]) -> PointToPoint:
        """Return a view for messages among some ranks of the group, which are numbered in this order.

        It uses the communicator of the group, so that all messages of a group have one order.

        Args:
            members: ranks of the group, this one among them.
        """
        view = copy.copy(self.group_channel)
        view.members, view.rank, view._group_channel = (
            tuple(members),
            members.index(self.group_channel.rank),
            self.group_channel,
        )
        return view

    @property
    def group_channel(self) -> PointToPoint:
        """Messages between all ranks of the group."""
        return self._group_channel or self

    def rank_in_group(self, rank: int) -> int:
        """Return the group rank of a member."""
        return self.members[rank] if self.members else rank

    def is_broken(self) -> bool:
        """Return True if NCCL has lost a peer or the connection to it. Over gloo the call itself raises."""
        if self.name != "nccl":
            return False
        error = self._channel._get_backend(torch.device("cuda")).get_error()
        return error in (ErrorType.COMM_ERROR, ErrorType.REMOTE_ERROR)

    def post(self, sends: list[Message], recvs: list[Message]) -> Pending:
        """Start a batch of messages; the peers must post the matching ones in the same order.

        The tensors must be contiguous, and must not be used until `wait`.
        """
        todo = [self._start("to", self._channel.send, *message) for message in sends]
        todo += [self._start("from", self._channel.recv, *message) for message in recvs]
        self.group_channel.num_posted += 1  # before posting: if it fails, part of the batch may be in flight
        return self._post(todo, sends + recvs)

    def _post(self, todo: list[tuple[Callable[[], dist.Work], str]], messages: list[Message]) -> Pending:
        """Start a batch: over gloo message by message, over NCCL as one group call.

        Args:
            todo: for each message, the function that starts it, and its name for errors.
            messages: all messages of the batch; the first one's tensor tells the device.
        """
        if self.name == "gloo":
            works: list[tuple[dist.Work, str]] = []
            _unawaited[:] = [*filter(None, _unawaited), works]
            works += ((_started(start, what), what) for start, what in todo)
            return Pending(works, timeout(self.group))
        if not todo:
            return Pending([])
        device = messages[0].tensor.device
        if capturing(device) and not self.group_channel.capture_checked:
            check_capture()
            self.group_channel.capture_checked = True
        self._channel._start_coalescing(device)
        for start, _ in todo:
            start()
        return Pending([(self._channel._end_coalescing(device), "; ".join(what for _, what in todo))])

    def _start(
        self, direction: str, operation: Callable[..., dist.Work], tensor: Tensor, rank: int, what: str
    ) -> tuple[Callable[[], dist.Work], str]:
        """Return a function that starts a message, and the name of the message for errors."""
        own, peer = self.rank_in_group(self.rank), self.rank_in_group(rank)
        name = f"{what} of rank {own} {direction} rank {peer} over {self.name}"
        return functools.partial(operation, [tensor], peer, TAG), name


def _started(start: Callable[[], dist.Work], what: str) -> dist.Work:
    try:
        return start()
    except RuntimeError as cause:  # the peer has closed the connection
        raise _peer_error(f"{what} did not begin", cause) from cause
