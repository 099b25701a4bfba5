"""Messages between the ranks of a recurrent layer, with their names in errors and in the watchdog's reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringflash.comm.agreement import raising_together
from ringflash.comm.transport import Message, PointToPoint, message_transport, open_transport
from ringflash.comm.wait_timer import waiting
from ringflash.comm.watchdog import watching
from ringflash.recurrent.contiguous_shard import ContiguousShard
from ringflash.sequence.mask import Documents


def swap(
    sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup, what: str, pass_name: str
) -> None:
    """Send sent[r] to each other rank r, and receive from it into received[r]. A collective call.

    Args:
        sent, received: contiguous, by rank; empty if there is nothing to send or receive. This rank's own are ignored.
        pass_name: "forward" or "backward".
    Raises:
        RuntimeError: over gloo, a peer has died or stalled; over NCCL the watchdog reports it.
    """
    rank, device = group.rank(), received[0].device
    channel = cast(PointToPoint, open_transport(message_transport(device), group))
    sends, receives = (
        [Message(x, peer, what) for peer, x in enumerate(tensors) if peer != rank and x.numel()]
        for tensors in (sent, received)
    )
    with watching(channel, pass_name, device) as call, waiting(device):
        channel.post(sends, receives).wait()
        call.mark("for {}", what)


@contextmanager
def agreeing(
    group: dist.ProcessGroup | None, tensors: Sequence[Tensor], bounds: tuple[int, ...] | None, **others: object
) -> Iterator[None]:
    """Prepare a call, then raise ValueError on every rank if a rank has an error or makes another call."""
    call: dict[str, object] = {
        "recurrent layer on": [list(x.shape) for x in tensors],
        "dtype": str(tensors[0].dtype),
        "cu_seqlens": None if bounds is None else Documents(bounds).summary,
        **others,
    }
    with raising_together(group, call, tensors[0].device):
        yield


@torch.compiler.disable(reason="ranks compare their calls")
def check_call(shard: ContiguousShard, length: int, *tensors: Tensor, **others: object) -> None:
    """Raise ValueError on every rank unless the ranks make one call, on as many tokens as the shard was made for.

    Args:
        length: number of tokens that this rank holds.
        others: values that all ranks must share.
    """
    with agreeing(shard.group, tensors, shard.bounds, **others):
        if length != (made := shard.pieces[-1][1]):
            raise ValueError(
                f"shard must be made for the {length} tokens of a rank, got one for {made}; call ContiguousShard.of "
                "with the length of each batch."
            )


@torch.compiler.disable(reason="ranks exchange states")
def states_before(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return zeros and the tensors of all previous ranks, stacked: (1 + cp_rank, *shape of x), row r + 1 of rank r.

    Differentiable, if the objective is the sum of the ranks' losses. Every rank must use the result, rank 0 its zeros,
    because the backward is a collective call.
    """
    return torch.zeros_like(x[None]) if group is None else cast(Tensor, _StatesBefore.apply(x, group))


class _StatesBefore(torch.autograd.Function):
    """States of all previous ranks in the forward; in the backward, the sum of the gradients from all later ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group, x = group, x.contiguous()
        rows = x.new_zeros(group.rank() + 1, *x.shape)
        nothing = x.new_empty(0)
        later = group.size() - group.rank() - 1
        swap(
            [nothing] * (group.rank() + 1) + [x] * later, [*rows[1:], *[nothing] * (later + 1)], group,
            "states of a recurrent layer", "forward",
        )  # fmt: skip
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        grad, rank = grad.contiguous(), ctx.group.rank()
        nothing = grad.new_empty(0)
        arriving = grad.new_empty(ctx.group.size() - rank - 1, *grad.shape[1:])
        swap(
            [*grad[1:], *[nothing] * (len(arriving) + 1)], [nothing] * (rank + 1) + list(arriving), ctx.group,
            "gradients of states of a recurrent layer", "backward",
        )  # fmt: skip
        return arriving.sum(0), None
