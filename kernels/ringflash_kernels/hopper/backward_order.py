"""In which order the tiles of a backward launch meet the query blocks, worked out on the host once a mask.

Every tile of keys walks all the query blocks that see it, and any order of them is right. What is not free is where
they come from: if the CTAs that run at one time are at the same block, its Q, dO and dQ move once and wait in L2 for
all of them; if each is somewhere else, they are fetched again and again. A CTA that takes a new tile therefore begins
where the others are, and goes round.
"""

from __future__ import annotations

import heapq
from itertools import cycle, islice
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


def first_blocks(blocks: Blocks, works: Works, group: int, num_ctas: int) -> torch.Tensor:
    """Where each tile begins its round over the query blocks of each head: (tiles of the launch, group), int32.

    Plays the launch through, a block a step, beside a clock that goes round all the blocks: a tile begins each head
    where the clock stands then or, if it does not see that block, at its own first one or where it just was.

    Args:
        group: query heads that a tile walks, one after another.
        num_ctas: of the grid. Fewer than there are tiles: CTA i takes the tiles i, i + num_ctas, ...; otherwise
            one each, on the SM that is free first.
    """
    num_blocks = max(int(blocks.stop.max()), 1)
    num_works = len(blocks.start) * works.num_heads
    strided = num_ctas < num_works
    free = [0] * (num_ctas if strided else SMS)
    begins: list[int] = []
    for index, (start, stop) in enumerate(islice(_in_order(blocks, works), num_works)):
        time = free[index % num_ctas] if strided else heapq.heappop(free)
        block = start
        for _ in range(group):
            block = time % num_blocks if start <= time % num_blocks < stop else block
            begins.append(block)
            time += max(stop - start, 0)
        if strided:
            free[index % num_ctas] = time + STEPS_OF_A_TILE
        else:
            heapq.heappush(free, time + STEPS_OF_A_TILE)
    return torch.tensor(begins, dtype=torch.int32).view(num_works, group)


def _in_order(blocks: Blocks, works: Works) -> cycle[tuple[int, int]]:
    """Start and stop of each tile as `Problem.work` orders them, over and over."""
    pairs = zip(blocks.start.tolist(), blocks.stop.tolist(), strict=True)
    return cycle([pair for pair in pairs for _ in range(works.heads_together)])
