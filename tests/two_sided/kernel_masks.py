"""Masks of calls, for tests of kernels: of whole sequences and gathered keys."""

from __future__ import annotations

import torch

from ringflash.attention import schedule
from ringflash.sequence.mask import Documents, SequenceMask
from ringflash_kernels.mask import Mask
from tests.two_sided.forests import Forest, block_diffusion, rollouts


def sequence_mask(forest: Forest) -> SequenceMask:
    return SequenceMask(forest.seqlen, True, (forest.left, -1), *Documents.from_rows(forest.rows))


def mask_of(forest: Forest) -> Mask:
    """Return the mask of the whole sequence."""
    return schedule.plan_own_keys(sequence_mask(forest), "contiguous")


def one_by_one(mask: SequenceMask, cp_size: int, rank: int, layout: str) -> tuple[schedule.KeyBlock, ...]:
    """Return the keys that a rank sees, in a block for each owner."""
    sizes = (1,) * len(schedule.active_distances(mask, cp_size, layout))
    return schedule.plan_blocks(mask, cp_size, rank, layout, sizes)


def keys_of(block: schedule.KeyBlock, positions: list[torch.Tensor]) -> torch.Tensor:
    """Return the positions of the keys of a block, of those of each owner."""
    keys = torch.full((block.num_rows,), -1)
    for owner, start, row, size, _ in block.segments:
        keys[row : row + size] = positions[owner][start : start + size]
    return keys


DEEP = Forest((120, 84, 60, 180, 42, 114), (-1, 0, 1, 1, 0, 4), (False, False, True, False, False, False))
DEEP_WINDOW = Forest(DEEP.lengths, DEEP.parents, DEEP.bidirectional, left=101)
GLOBAL_TOKENS = Forest((70, 380, 50), (-1, -1, 1), (False,) * 3, left=90, global_tokens=(3, 20, 20))
MASKS = {  # all are two-sided
    "rollouts": mask_of(rollouts(200, [70, 130, 33, 64])),
    "deep": mask_of(DEEP),
    "deep, window": mask_of(DEEP_WINDOW),
    "many small documents": mask_of(rollouts(100, [7, 9, 20, 3, 5, 11, 30, 2, 8, 25])),
    "block diffusion": mask_of(block_diffusion(5, 40)),
    "window, global tokens": mask_of(GLOBAL_TOKENS),
    "a gathered shard": schedule.plan_single_block(sequence_mask(DEEP), 2, 1, "zigzag").mask,
}
