"""Tile shapes of the backward kernels by head_dim, and why."""

from __future__ import annotations

from dataclasses import dataclass

SMS = 132  # of an H100 or H200
STEPS_OF_A_TILE = 10  # cost of entering and leaving a tile, in blocks of queries; measured between 9 and 14


@dataclass(frozen=True)
class QueryTiles:
    """How `backward_queries` computes dQ; a CTA holds 128 queries.

    Args:
        slots: buffers that K and V share.
        block: keys of a step.
        exp_under_dp: exp runs while dP is on its way, instead of after both products.
        turns: a consumer waits with its products until those of the other are done.
        held: columns of Q and dO kept in registers, of the first piece.
    """

    slots: int
    block: int
    exp_under_dp: bool = False
    turns: bool = True
    held: int = 0


@dataclass(frozen=True)
class BackwardTiles:
    """How one head_dim is computed.

    Args:
        pieces: columns of the tiles, in one piece or two, since tiles are powers of two.
        block_n: keys of a CTA: 128 in `backward_keys`, 64 in `backward_wide`. A step is 64 queries in both.
        queries: where dQ is computed apart.
        stages: buffers of Q and of dO.
        kv_in_registers: K and V are kept as register operands (`backward_keys`).
        turn_before_exp: the other consumer may start a step before this one's exp, not after it (`backward_keys`).
        held: columns of K and V kept in registers, of the first piece (`backward_wide`).
    """

    pieces: tuple[int, ...]
    block_n: int
    queries: QueryTiles
    stages: int = 2
    kv_in_registers: bool = False
    turn_before_exp: bool = False
    held: int = 0

    @property
    def rest(self) -> int:
        """Columns of the second piece."""
        return sum(self.pieces[1:])

    @property
    def wide(self) -> bool:
        """Whether the consumers share the work by product instead of by keys, and dQ is always computed apart."""
        return self.block_n == 64


BACKWARD_TILES = {
    # Shared-memory bandwidth limits head_dim 64 unless K and V come from registers (375 against 516 TFLOP/s).
    64: BackwardTiles((64,), 128, QueryTiles(4, 128), kv_in_registers=True, turn_before_exp=True),
    96: BackwardTiles((64, 32), 128, QueryTiles(4, 128)),
    # Two consumers of 64 keys: dK and dV take 128 of a thread's 240 registers; more keys or queries spill.
    128: BackwardTiles((128,), 128, QueryTiles(4, 128)),
    # dK and dV of 64 keys take 96 or 128 registers each, so each consumer holds one of them. Every step would add a
    # whole dQ block for half the products of head_dim 128: dQ apart costs two more products and is faster.
    192: BackwardTiles((128, 64), 64, QueryTiles(5, 64, exp_under_dp=True, held=64), held=128),
    # Q and dO of 128 queries leave room for three blocks of 64 keys.
    256: BackwardTiles((128, 128), 64, QueryTiles(3, 64, turns=False), held=64),
}
