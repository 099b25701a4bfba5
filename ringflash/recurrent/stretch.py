"""The contiguous tokens of a rank, and the exchange of small tensors with all ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringflash.comm.group import Group, resolve


class Stretch(NamedTuple):
    """The contiguous tokens of one rank, cut where documents begin.

    Args:
        group: ranks that share the sequence, in its order; None is one process.
        pieces: rows [start, stop) of each document's part. Only the first may continue a document.
        before: number of tokens that the first piece's document has on previous ranks.
        bounds: document bounds (0, ..., seqlen) in the whole sequence; None is one document.
    """

    group: dist.ProcessGroup | None
    pieces: tuple[tuple[int, int], ...]
    before: int
    bounds: tuple[int, ...] | None = None

    @classmethod
    def of(cls, length: int, group: Group = None, bounds: tuple[int, ...] | None = None) -> Stretch:
        """Return the stretch of this rank.

        Args:
            length: tokens of each rank.
            bounds: as the attribute.
        """
        group = resolve(group)
        start = 0 if group is None else group.rank() * length
        inner = [b - start for b in bounds or () if start < b < start + length]
        document = max((b for b in bounds or () if b <= start), default=0)
        return cls(group, tuple(pairwise([0, *inner, length])), start - document, bounds)

    @property
    def previous(self) -> range:
        """Ranks before this one that hold tokens of the first piece's document."""
        if self.group is None:
            return range(0)
        rank, length = self.group.rank(), self.pieces[-1][1]
        return range(rank - -(-self.before // length), rank)


def gather_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the tensors of all ranks, stacked, behind a zero: row r + 1 is that of rank r.

    Differentiable, if the objective is the sum of the ranks' losses. Every rank must use the result, if only the zero,
    because the backward is a collective call.
    """
    rows = x[None] if group is None else cast(Tensor, _GatherRanks.apply(x, group))
    return torch.cat([torch.zeros_like(rows[:1]), rows])


class _GatherRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        x = x.contiguous()
        rows = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(rows, x, group=group)
        return torch.stack(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        grad = grad.contiguous()
        received = torch.empty_like(grad)
        dist.all_to_all_single(received, grad, group=ctx.group)
        return received.sum(0), None
