"""Tile shapes of the backward kernels by head_dim, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackwardTiles:
    """How one head_dim is computed.

    Args:
        block_n: keys of a CTA: 128 in `backward_keys`, 64 in `backward_wide`. A step is 64 queries in both.
        stages: buffers of Q (and, in `backward_keys`, of dO).
        padded_dim: columns of the tiles; the copy engine reads those past head_dim as zeros.
        kv_in_registers: K and V are kept as register operands.
        query_stages: buffers of K and V in `backward_queries`; query_dim: columns of its tiles.
    """

    block_n: int
    stages: int
    padded_dim: int
    kv_in_registers: bool
    query_stages: int
    query_dim: int

    @property
    def wide(self) -> bool:
        """Whether the consumers share the work by product instead of by keys."""
        return self.block_n == 64


BACKWARD_TILES = {
    # Shared-memory bandwidth limits head_dim 64 unless K and V come from registers (375 against 516 TFLOP/s).
    64: BackwardTiles(128, 2, 64, True, 2, 64),
    # Tiles are powers of two: a quarter of the products is wasted on zeros.
    96: BackwardTiles(128, 2, 128, False, 2, 128),
    # Two consumers of 64 keys: dK and dV take 128 of a thread's 240 registers; more keys or queries spill.
    128: BackwardTiles(128, 2, 128, False, 2, 128),
    # dK and dV of 64 keys take 96 registers each, so each consumer holds one of them.
    192: BackwardTiles(64, 2, 192, False, 1, 256),
    256: BackwardTiles(64, 2, 256, False, 1, 256),
}
