"""All-to-all between the shards of a layout and contiguous shards.

Positions increase within a shard, so a rank sends one slice of its rows to each other rank.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringflash.comm.group import Group, resolve
from ringflash.recurrent.messages import agreeing, swap
from ringflash.sequence.layout import DOCUMENT_LAYOUTS, chunks
from ringflash.sequence.paths import MASKS_KEPT

Bounds = tuple[int, ...] | None


def to_sequence_order(x: Tensor, group: Group, layout: str = "zigzag", bounds: Bounds = None) -> Tensor:
    """Return this rank's contiguous shard, given its shard of a layout. Differentiable; a collective call.

    Args:
        x: (batch, seqlen_local, ...), as `shard_sequence` cuts it.
        bounds: document bounds (0, ..., seqlen), which the layouts "balanced" and "documents" need.
    Returns:
        shard: as x; rank r holds the positions [r * seqlen_local, (r + 1) * seqlen_local).
    Raises:
        ValueError: on every rank, if shapes, layouts or bounds differ between ranks, or if the layout does not fit.
    """
    return _exchange(x, group, layout, bounds, False)


def from_sequence_order(x: Tensor, group: Group, layout: str = "zigzag", bounds: Bounds = None) -> Tensor:
    """Return this rank's shard of a layout, given its contiguous shard: the inverse of `to_sequence_order`."""
    return _exchange(x, group, layout, bounds, True)


@torch.compiler.disable(reason="ranks exchange tokens")
def _exchange(x: Tensor, group: Group, layout: str, bounds: Bounds, back: bool) -> Tensor:
    """Bring the tokens of x, (batch, tokens, ...), into the sequence's order, or `back` into the layout's order."""
    group = resolve(group)
    if group is None:
        return x
    bounds = bounds if layout in DOCUMENT_LAYOUTS else None
    with agreeing(group, [x], bounds, layout=layout):
        plan = _plan(x.shape[1] * group.size(), group.size(), group.rank(), layout, bounds, x.device)
    if layout == "contiguous":
        return x
    return cast(Tensor, _Exchange.apply(x, group, plan, back))


class _Plan(NamedTuple):
    """Numbers of rows to send to and receive from each rank, the order that sorts received rows, and its inverse."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor
    inverse: Tensor


@lru_cache(MASKS_KEPT)
def _plan(seqlen: int, cp_size: int, cp_rank: int, layout: str, bounds: Bounds, device: torch.device) -> _Plan:
    """Plan the all-to-all from a layout to contiguous shards of equal length."""
    length = seqlen // cp_size
    of_ranks = [chunks(seqlen, cp_size, rank, layout, bounds) for rank in range(cp_size)]
    shards = [torch.cat([torch.arange(c.start, c.stop) for c in of_rank]) for of_rank in of_ranks]
    arriving = [shard[shard // length == cp_rank] for shard in shards]
    sent = torch.bincount(shards[cp_rank] // length, minlength=cp_size)
    order = torch.cat(arriving).argsort()
    return _Plan(tuple(sent.tolist()), tuple(map(len, arriving)), order.to(device), order.argsort().to(device))


class _Exchange(torch.autograd.Function):
    """All-to-all of tokens; its gradient is the all-to-all in the other direction."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, plan: _Plan, back: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.call = group, plan, back
        return _move(x, group, plan, back, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        group, plan, back = ctx.call
        return _move(grad, group, plan, not back, "backward"), None, None, None


def _move(x: Tensor, group: dist.ProcessGroup, plan: _Plan, back: bool, pass_name: str) -> Tensor:
    """Run the all-to-all of a plan, or `back` its inverse, with the rows sorted after it or before it."""
    rows = x.transpose(0, 1)
    if back:
        rows = rows.index_select(0, plan.inverse)
    rows, moved = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
    arriving, leaving = (plan.sent, plan.received) if back else (plan.received, plan.sent)
    received, sent = moved.split(arriving), rows.split(leaving)
    received[group.rank()].copy_(sent[group.rank()])
    swap(sent, received, group, "tokens of a recurrent layer", pass_name)
    if not back:
        moved = moved.index_select(0, plan.order)
    return moved.transpose(0, 1)
