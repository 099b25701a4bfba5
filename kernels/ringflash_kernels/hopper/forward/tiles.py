"""Tile shapes of the forward kernel, by head_dim.

One warpgroup owns 64 query rows (the height of one wgmma); the numbers follow from 232,448 bytes of shared
memory and the 160 (three consumer warpgroups) or 240 (two) registers of a consumer thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringflash_kernels.hopper.compat import MANY_ADDRESSES


@dataclass(frozen=True)
class ForwardTiles:
    """Shape of one program's work.

    Args:
        parts: columns of a head of q and k, as powers of two (Gluon has no others): 96 is 64 + 32.
        num_warpgroups: consumer warpgroups, each with `block_m` query rows.
        block_n: keys of one K/V stage.
        num_stages: K/V stages in shared memory.
        stages_of_16_bits: the same for results of 16 bits that continue no state; they leave more room.
        schedule: what runs under the softmax of a key block.
            "overlap"  the warpgroup's own products of the previous and the next block
            "sequence" products of other warpgroups, in no fixed order; takes the fewest registers
        aligned: a walk begins at a multiple of block_n, because keys are stored in such blocks.
        rescale_late: with "overlap", O is rescaled under the next block's Q K^T, not before it is issued.
        joint: S of a block and P V of the previous one are issued together, and both are complete before the block's
            exponentials; K of a block and V of the previous one share a stage. Not under every mask: see `host`.
        turns: with "overlap" or `joint`, a warpgroup issues the products of a step when the previous one has issued its
            own. If softmax and products take equally long, both might otherwise compute exponentials at the same time.
        ahead: under a two-sided mask, the producer reads which tile is next before it ends the present one, and loads K
            of a block before V of the previous block.
        halves: with "sequence", the exponentials of half of the keys run under P V of the other half, and K and V of a
            block arrive together.
        stage_in_q: results leave through the buffer of Q, because shared memory has no room for another.
        narrow: columns of a head of v and out, a power of two, if they are fewer than those of q and k.
    """

    parts: tuple[int, ...]
    num_warpgroups: int
    block_n: int
    num_stages: int
    schedule: str = "overlap"
    stage_in_q: bool = False
    block_m: int = 64
    rescale_late: bool = False
    joint: bool = False
    turns: bool = False
    ahead: bool = False
    halves: bool = False
    aligned: bool = False
    narrow: int = 0
    stages_of_16_bits: int | None = None

    @property
    def value_parts(self) -> tuple[int, ...]:
        """Columns of a head of v and out."""
        return (self.narrow,) if self.narrow else self.parts

    @property
    def rows(self) -> int:
        """Query rows of one program."""
        return self.num_warpgroups * self.block_m

    @property
    def skips(self) -> bool:
        """True if a warpgroup skips blocks that none of its rows sees: with three, a tile has up to two of them."""
        return self.joint or self.schedule == "sequence"

    @property
    def consumer_registers(self) -> int:
        """setmaxnreg of the consumers: what remains of 65,536 registers next to the producer's."""
        return 240 if self.num_warpgroups == 2 else 160

    @property
    def producer_registers(self) -> int:
        """setmaxnreg of the producer warp (its warpgroup is padded to four warps)."""
        return 24 if self.num_warpgroups == 2 else 32


FORWARD_TILES = {
    # Softmax and products cost the same: three warpgroups hide each other better than a second tile of registers.
    64: ForwardTiles((64,), num_warpgroups=3, block_n=128, num_stages=4, schedule="sequence", joint=True, turns=True),
    # wgmma of 32 columns is slow, but less so than 32 columns of padding.
    96: ForwardTiles((64, 32), num_warpgroups=3, block_n=128, num_stages=2, schedule="sequence", halves=True),
    128: ForwardTiles((128,), num_warpgroups=2, block_n=128, num_stages=2, rescale_late=True, turns=True, ahead=True),
    # 128 keys would need 240 KB. Of two blocks of 64, V arrives late.
    192: ForwardTiles(
        (128, 64),
        num_warpgroups=2,
        block_n=64,
        num_stages=2,
        stages_of_16_bits=3,
        joint=not MANY_ADDRESSES,  # not measured with triton 3.9
        turns=True,
    ),
    # Q 64 KB and two stages of 64 KB leave no room: results leave through Q.
    256: ForwardTiles((128, 128), num_warpgroups=2, block_n=64, num_stages=2, rescale_late=True, stage_in_q=True),
}

NARROW_FORWARD_TILES = {
    # Latent attention: as head_dim 128, with a longer Q K^T. Two stages of 80 KB leave no room for results.
    (192, 128): ForwardTiles(
        (128, 64),
        num_warpgroups=2,
        block_n=128,
        num_stages=2,
        stage_in_q=True,
        narrow=128,
        rescale_late=bool(MANY_ADDRESSES),
        turns=bool(MANY_ADDRESSES),
    ),
}


def forward_tiles(head_dim: int, value_dim: int) -> ForwardTiles | None:
    """Return the tiles for q and k of `head_dim` columns and v of `value_dim`; None if there are none."""
    return FORWARD_TILES.get(head_dim) if head_dim == value_dim else NARROW_FORWARD_TILES.get((head_dim, value_dim))
