"""Tile shapes of the FP8 forward kernel, by head_dim."""

from __future__ import annotations

from dataclasses import dataclass

from ringflash_kernels.hopper.forward.tiles import ForwardTiles


@dataclass(frozen=True)
class Fp8Tiles(ForwardTiles):
    """Shape of one program's work; keys lie in records of 128.

    Args:
        promote: blocks of keys that the tensor cores add up before their sum is added to O in fp32. Their own sums
            lose everything below 2^-13 of the largest term. 1: O stays in registers. More: O waits in shared memory.
    """

    schedule: str = "sequence"
    aligned: bool = True
    promote: int = 1

    @property
    def loads_state_late(self) -> bool:
        """Always: a load under a walk of half the length would save little."""
        return True


FP8_TILES = {
    # Softmax bounds both: three warpgroups hide each other's products. Fewer registers are left than O takes twice.
    64: Fp8Tiles((64,), num_warpgroups=3, block_n=128, num_stages=4, promote=8),
    128: Fp8Tiles((128,), num_warpgroups=3, block_n=128, num_stages=3, promote=8),
    # No room in shared memory for O; 240 registers hold it and half of a block's sum.
    256: Fp8Tiles((128, 128), num_warpgroups=2, block_n=128, num_stages=2, promote=1),
}
