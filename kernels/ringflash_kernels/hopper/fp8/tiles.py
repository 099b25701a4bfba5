"""Tile shapes of the FP8 forward kernel, by head_dim."""

from __future__ import annotations

from dataclasses import dataclass

from ringflash_kernels.hopper.forward.tiles import ForwardTiles


@dataclass(frozen=True)
class Fp8Tiles(ForwardTiles):
    """Shape of one program's work; keys are stored in records of 128.

    Args:
        turns: warpgroups issue their products one after another: P' V of a block and S of the next.
        max_of_three: row maxima by integer instructions of three operands: faster with three warpgroups.
    """

    schedule: str = "sequence"
    aligned: bool = True
    turns: bool = False
    max_of_three: bool = True


FP8_TILES = {
    # Softmax limits both head_dims: three warpgroups hide each other's products.
    64: Fp8Tiles((64,), num_warpgroups=3, block_n=128, num_stages=4),
    128: Fp8Tiles((128,), num_warpgroups=3, block_n=128, num_stages=3),
    # O and half of a block's product take 192 of 240 registers. Turns bring 2 to 7% here, and nothing with three.
    256: Fp8Tiles((128, 128), num_warpgroups=2, block_n=128, num_stages=2, turns=True, max_of_three=False),
}
