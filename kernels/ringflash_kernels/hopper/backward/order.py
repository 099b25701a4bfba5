"""How a backward launch shares its tiles among CTAs, worked out on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

SMS = 132
STEPS_OF_A_TILE = 10  # what entering and leaving a tile costs, in blocks of queries; measured between 9 and 14


class Works(NamedTuple):
    """The tiles of a launch.

    Args:
        num_heads: heads (or groups of heads) of all batches, `heads_together` of them side by side.
        tile, step: keys of a tile, queries of a block; by queries, the other way round.
        from_last: the last tile of a head comes first.
    """

    num_heads: int
    heads_together: int
    tile: int
    step: int
    from_last: bool = False


class Blocks(NamedTuple):
    """The query blocks [start, stop) that each tile of a head visits, in the order of the launch."""

    start: torch.Tensor
    stop: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """Steps of each tile and head."""
        return (self.stop - self.start).clamp(min=0)


def balanced(blocks: Blocks, works: Works, num_sms: int) -> int:
    """How many CTAs, up to num_sms, finish first when CTA i of n takes the tiles i, i + n, i + 2n, ...

    A causal head of 128 tiles gives 124 CTAs the same part of every head; 121 finish 1.3 times sooner.
    """
    # Entering and leaving a tile costs about a step and a half.
    steps = (blocks.lengths + 1.5).repeat_interleave(works.heads_together)
    steps = steps.repeat(works.num_heads // works.heads_together)
    order = torch.arange(len(steps))
    candidates = range(num_sms, num_sms - max(1, num_sms // 8), -1)
    return min(candidates, key=lambda n: torch.bincount(order % n, weights=steps).max().item())
