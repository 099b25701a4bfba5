"""Masks of calls, for tests of kernels: of whole sequences, hops and gathered keys."""

from __future__ import annotations

from ringflash.attention import schedule
from ringflash.sequence.mask import Documents, SequenceMask
from ringflash_kernels.mask import Mask
from tests.two_sided.forests import Forest, block_diffusion, rollouts


def sequence_mask(forest: Forest) -> SequenceMask:
    return SequenceMask(forest.seqlen, True, (forest.left, -1), *Documents.from_rows(forest.rows))


def mask_of(forest: Forest, cp_size: int = 1, rank: int = 0, step: int = 0) -> Mask:
    """Return the mask of a hop of zigzag, or of the whole sequence."""
    hops = schedule.plan_hops(sequence_mask(forest), cp_size, rank, "contiguous" if cp_size == 1 else "zigzag").hops
    return hops[step].mask


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
