"""Tile shapes of the backward kernels by head_dim, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackwardTiles:
    """How one head_dim is computed.

    Args:
        pieces: columns of the tiles, in one piece or two, since tiles are powers of two.
        block_n: keys of a CTA: 128 in `backward_keys`, 64 in `backward_wide`. A step is 64 queries in both.
        stages: buffers of Q (and, in `backward_keys`, of dO).
        kv_in_registers: K and V are kept as register operands.
        query_dim: columns of the tiles of `backward_queries`; those past head_dim are read as zeros.
        query_stages: buffers of K and V there.
    """

    pieces: tuple[int, ...]
    block_n: int
    stages: int
    query_dim: int
    query_stages: int
    kv_in_registers: bool = False

    @property
    def rest(self) -> int:
        """Columns of the second piece."""
        return sum(self.pieces[1:])

    @property
    def wide(self) -> bool:
        """Whether the consumers share the work by product instead of by keys."""
        return self.block_n == 64


BACKWARD_TILES = {
    # Shared-memory bandwidth limits head_dim 64 unless K and V come from registers (375 against 516 TFLOP/s).
    64: BackwardTiles((64,), 128, 2, 64, 2, kv_in_registers=True),
    96: BackwardTiles((64, 32), 128, 2, 128, 2),
    # Two consumers of 64 keys: dK and dV take 128 of a thread's 240 registers; more keys or queries spill.
    128: BackwardTiles((128,), 128, 2, 128, 2),
    # dK and dV of 64 keys take 96 or 128 registers each, so each consumer holds one of them.
    192: BackwardTiles((128, 64), 64, 2, 256, 1),
    256: BackwardTiles((128, 128), 64, 2, 256, 1),
}
