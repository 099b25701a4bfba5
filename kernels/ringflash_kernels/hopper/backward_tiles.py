"""Tile shapes of the backward kernels by head_dim, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueryTiles:
    """How `backward_queries` is run; a CTA holds 128 queries.

    Args:
        slots: buffers that K and V share.
        schedule: which products are issued together (see the module).
        turns: "none", or when a consumer lets the other issue its products: "before exp" or "after exp".
        block: keys of a step.
        held: columns of Q and dO kept in registers, of the first piece.
    """

    slots: int
    schedule: str
    turns: str
    block: int = 64
    held: int = 0


@dataclass(frozen=True)
class BackwardTiles:
    """How one head_dim is computed.

    Args:
        pieces: columns of the tiles, in one piece or two, since tiles are powers of two.
        block_n: keys of a CTA: 128 in `backward_keys`, 64 in `backward_wide`. A step is 64 queries in both.
        stages: buffers of Q (and, in `backward_keys`, of dO). dout_stages: of dO in `backward_wide`.
        queries: of the kernel that computes dQ apart.
        held: columns of K and V kept in registers in `backward_wide`, of the first piece.
        dq_apart: compute dQ apart also where it need not be deterministic.
        kv_in_registers: K and V are kept as register operands.
    """

    pieces: tuple[int, ...]
    block_n: int
    stages: int
    queries: QueryTiles
    dout_stages: int = 0
    held: int = 0
    dq_apart: bool = False
    kv_in_registers: bool = False

    @property
    def rest(self) -> int:
        """Columns of the second piece."""
        return sum(self.pieces[1:])

    @property
    def wide(self) -> bool:
        """Whether the consumers share the work by product instead of by keys."""
        return self.block_n == 64


_FOUR_SLOTS = QueryTiles(4, "under", "after exp")

BACKWARD_TILES = {
    # Shared-memory bandwidth limits head_dim 64 unless K and V come from registers (375 against 516 TFLOP/s).
    64: BackwardTiles((64,), 128, 2, _FOUR_SLOTS, kv_in_registers=True),
    96: BackwardTiles((64, 32), 128, 2, _FOUR_SLOTS),
    # Two consumers of 64 keys: dK and dV take 128 of a thread's 240 registers; more keys or queries spill.
    128: BackwardTiles((128,), 128, 2, _FOUR_SLOTS),
    # dK and dV of 64 keys take 96 or 128 registers each, so each consumer holds one of them. Every step would add a
    # whole dQ block for half the products of head_dim 128: dQ apart costs two more products and is faster.
    192: BackwardTiles((128, 64), 64, 3, QueryTiles(5, "early", "before exp"), dout_stages=2, dq_apart=True),
    # Q and dO of 128 queries leave room for three blocks of 64 keys.
    256: BackwardTiles((128, 128), 64, 2, QueryTiles(3, "early", "before exp"), dout_stages=2, dq_apart=True),
}
