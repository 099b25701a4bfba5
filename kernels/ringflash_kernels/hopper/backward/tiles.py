"""Tile shapes of the backward kernels by head_dim, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

SMS = 132  # multiprocessors of an H100 or H200
STEPS_OF_A_TILE = 10  # cost of entering and leaving a tile, in blocks of queries; 9 to 14 measured


@dataclass(frozen=True)
class QueryTiles:
    """Tile shapes of `backward_queries`, which computes dQ of wide heads; a CTA holds 128 queries, a step is 64 keys.

    Args:
        slots: buffers that K and V share.
        exp_under_dp: exp runs while dP is in flight, instead of after both products.
        turns: a consumer issues its products only after the other consumer's have finished.
        held: columns of the first piece of Q and dO that are kept in registers.
        stores_result: dQ of an only hop is stored scaled and cast.
    """

    slots: int
    exp_under_dp: bool = False
    turns: bool = True
    held: int = 0
    stores_result: bool = False


@dataclass(frozen=True)
class BackwardTiles:
    """Tile shapes of the backward kernels for one head_dim.

    Args:
        pieces: columns of the tiles, in one piece or two, since tiles are powers of two.
        block_n: keys of a CTA: 64 in `backward_wide`, else 128. A step is 64 queries.
        queries: tiles of the separate kernel for dQ, which only wide heads have.
        stages: buffers of Q and of dO.
        kv_in_registers: the first pieces of K and V are kept as register operands (`backward_keys`; at 96 with triton
            3.9 only V's).
        turn_after: exponentials of 32 a thread that a consumer computes before the other one may start a step
            (`backward_keys`; 4 if the additions to dQ have a fixed order).
        dq_buffers: buffers of dQ if the additions to dQ have a fixed order (`backward_keys`).
        held: columns of the first piece of K and V that are kept in registers (`backward_wide`).
        narrow: columns of V, dO and dV, a power of two, if they are fewer than those of Q and K.
    """

    pieces: tuple[int, ...]
    block_n: int
    queries: QueryTiles | None = None
    stages: int = 2
    kv_in_registers: bool = False
    turn_after: int = 4
    dq_buffers: int = 3
    held: int = 0
    narrow: int = 0

    @cached_property
    def value_pieces(self) -> tuple[int, ...]:
        """Columns of V, dO and dV."""
        return (self.narrow,) if self.narrow else self.pieces

    @cached_property
    def value_rest(self) -> int:
        """Columns of the second piece of V, dO and dV."""
        return sum(self.value_pieces[1:])

    @cached_property
    def columns(self) -> int:
        """Columns of a row of K and V together."""
        return sum(self.pieces) + sum(self.value_pieces)

    @cached_property
    def rest(self) -> int:
        """Columns of the second piece."""
        return sum(self.pieces[1:])

    @cached_property
    def wide(self) -> bool:
        """True if the consumers divide the work by product instead of by keys, and dQ has a separate kernel."""
        return self.block_n == 64

    @cached_property
    def latent(self) -> bool:
        """True for `backward_latent`."""
        return bool(self.narrow) and not self.wide

    @cached_property
    def dq_pieces(self) -> tuple[int, ...]:
        """Columns of the tiles in which a consumer adds to dQ."""
        if self.wide:
            return ()
        if self.latent:
            return tuple(n // 2 for n in self.pieces)
        return self.pieces if self.rest else (self.pieces[0] // 2,)


BACKWARD_TILES = {
    # Shared-memory bandwidth limits head_dim 64 unless K and V come from registers (375 against 516 TFLOP/s).
    64: BackwardTiles((64,), 128, kv_in_registers=True),
    96: BackwardTiles((64, 32), 128, kv_in_registers=True, turn_after=12),
    # Two consumers of 64 keys: dK and dV take 128 of a thread's 240 registers; more keys or queries spill.
    128: BackwardTiles((128,), 128, dq_buffers=2),  # a third does not fit into shared memory
    # dK and dV of 64 keys take 96 or 128 registers each, so each consumer holds one of them. Every step would add a
    # whole dQ block for half the products of head_dim 128: a separate kernel costs two more products and is faster.
    192: BackwardTiles((128, 64), 64, QueryTiles(5, exp_under_dp=True, held=64, stores_result=True), held=128),
    # Q and dO of 128 queries leave room for three blocks of 64 keys.
    256: BackwardTiles((128, 128), 64, QueryTiles(3, turns=False), held=64),
}

# Values narrower than keys: latent attention.
NARROW_BACKWARD_TILES = {
    # dK and dV of 64 keys leave a thread 80 registers, enough if P waits for dP in 16 bits.
    (192, 128): BackwardTiles((128, 64), 128, narrow=128),
}

ORDERED_NARROW_BACKWARD_TILES = {
    # The products of each consumer of `backward_wide` have 320 columns.
    (192, 128): BackwardTiles(
        (128, 64),
        64,
        QueryTiles(5, exp_under_dp=True, turns=False, held=64, stores_result=True),
        stages=3,
        held=128,
        narrow=128,
    ),
}


def backward_tiles(head_dim: int, value_dim: int, deterministic: bool = False) -> BackwardTiles:
    """Return the tiles for q and k of `head_dim` columns and v of `value_dim`."""
    if head_dim == value_dim:
        return BACKWARD_TILES[head_dim]
    return (ORDERED_NARROW_BACKWARD_TILES if deterministic else NARROW_BACKWARD_TILES)[head_dim, value_dim]
