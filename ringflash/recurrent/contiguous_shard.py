"""Contiguous shards of the sequence, in which recurrences run."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch.distributed as dist

from ringflash.comm.group import Group, resolve
from ringflash.sequence.mask import check_cu_seqlens


class ContiguousShard(NamedTuple):
    """Contiguous tokens of one rank, cut into pieces where documents begin.

    Args:
        group: ranks that share the sequence, in its order; None is one process.
        pieces: rows [start, stop) of each document. Only the first may continue a document of previous ranks.
        before: number of tokens that the first piece's document has on previous ranks.
        bounds: document bounds (0, ..., seqlen) in the whole sequence; None is one document.
    """

    group: dist.ProcessGroup | None
    pieces: tuple[tuple[int, int], ...]
    before: int
    bounds: tuple[int, ...] | None = None

    @classmethod
    def of(cls, length: int, group: Group = None, bounds: tuple[int, ...] | None = None) -> ContiguousShard:
        """Return the shard of this rank.

        Args:
            length: tokens of each rank.
            bounds: as in the class.
        Raises:
            ValueError: bounds that do not fit the whole sequence.
        """
        group = resolve(group)
        if bounds is not None:
            check_cu_seqlens(bounds, length * (1 if group is None else group.size()))
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
