"""Attention forward for compute capability 9.0.

A persistent program per SM: one producer warp loads tiles by TMA and hands out work, two or three consumer
warpgroups own 64 query rows each and walk the visible key blocks from last to first:

    producer   K(n-1) Q V(n-1) K(n-2) V(n-2) ...            mbarriers full / empty, a ring of stages
    consumer   S(j+1) = Q K(j+1)^T  issued, then  O += P(j) V(j)  issued, and while both run
               P(j+1) = exp2(S(j+1) - m): the softmax of one block hides under the products of its neighbours

m is the row maximum that P is relative to, and l the sum of a row of P, so a row of the result is O / l. O is
rescaled only if m grew by much, which is rare after the first blocks.
That is the schedule "overlap"; tiles.py says which head sizes do better with "sequence". For some, the consumers issue
their products in turns, or both might compute their softmax at the same time, and then leave the tensor cores idle.
Masked blocks are at the two ends of the walk; the loop between them does not test the mask. Under a two-sided mask the
walk is a list of stretches of masked and of other blocks (`hopper.walks`), which the producer hands on with the first
K of each. `acc` and `lse` of earlier calls are merged in the epilogue, loaded by TMA while the main loop runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ringflash_kernels.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    maxima_of_rows,
    mbarrier,
    named_barrier,
    opaque,
    reinterpret,
    scale_unless_one,
    seen_only,
    start_of,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ringflash_kernels.hopper.descriptors import tile_layout
from ringflash_kernels.hopper.forward.tiles import ForwardTiles


@dataclass(frozen=True)
class ForwardVariant:
    """Compile-time choices of the kernel.

    Args:
        mask: "none", "band" (two diagonals), "bounds" (an interval of keys for each row) or "ends" (besides, the end of
            each key: the row after the last one that sees it).
        resume: read and continue the state of earlier calls.
        starts: under "ends", rows see only keys from their first one on, as with a window; otherwise that is implied.
    """

    tiles: ForwardTiles
    mask: str
    resume: bool
    starts: bool = False

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        """Registers that hold S and P of one warpgroup."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.tiles.block_n, 16])

    @property
    def half_layout(self) -> gl.NVMMADistributedLayout:
        """Registers that hold S and P of one warpgroup and half of a block's keys."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.tiles.block_n // 2, 16])

    @property
    def ends_bytes(self) -> int:
        """Bytes of the ends that arrive with a block of K."""
        return 4 * self.tiles.block_n if self.mask == "ends" else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of K and V, and of the ends."""
        return 2 * self.tiles.block_n * (sum(self.tiles.parts) + sum(self.tiles.value_parts)) + self.ends_bytes

    @property
    def state_layout(self) -> gl.NVMMASharedLayout:
        """Shared memory that holds the first part of O of one warpgroup in fp32."""
        return tile_layout(self.tiles.block_m, self.tiles.value_parts[0], torch.float32)

    @property
    def acc_layouts(self) -> tuple[gl.NVMMADistributedLayout, ...]:
        """Registers that hold O of one warpgroup, for each part of the head."""
        return tuple(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]) for columns in self.tiles.value_parts)


class Problem(NamedTuple):
    """Run-time numbers of a launch, the same for every program."""

    seqlen_q: int
    seqlen_k: int
    num_heads: int
    heads_per_kv: int
    heads_per_group: int
    num_row_tiles: int
    num_tiles: int
    lower: int
    upper: int
    lse_stride_b: int
    lse_stride_h: int
    scale: float


class Pointers(NamedTuple):
    """Global memory reached without TMA.

    Args:
        start, stop: the keys that each row sees; under a two-sided mask for the rows of whole tiles.
        table, stretches: tiles and stretches of `hopper.walks`; without stretches see `tile_table`.
    """

    lse: int
    start: int
    stop: int
    table: int
    stretches: int
    counter: int


class Shared(NamedTuple):
    """Shared memory: rings of q, k and v tiles for each part of the head, staging of results, the next ticket.

    Under a two-sided mask also a ring of the ends of keys, and the numbers that describe tickets and stretches.
    """

    q: tuple
    k: tuple
    v: tuple
    stage: object
    ticket: object
    ends: object
    numbers: object


class Barriers(NamedTuple):
    """mbarriers: the warp that fills a buffer signals `full`, the warpgroups that have read it signal `empty`."""

    q_full: object
    q_empty: object
    k_full: object
    k_empty: object
    v_full: object
    v_empty: object
    acc_full: object
    ticket_full: object
    ticket_empty: object


class Tile(NamedTuple):
    """One program's piece of work: its first row and key, and its key blocks, walked from last to first.

    Block j begins at key + j * block_n. Some row of the warpgroup sees the blocks [first_seen, end_seen); every row
    sees all of [first_full, end_full). Under a two-sided mask the blocks are those of `num_stretches` stretches, of
    which `stretch` is the last.
    """

    batch: int
    head: int
    row: int
    key: int
    num_blocks: int
    first_seen: int
    first_full: int
    end_full: int
    end_seen: int
    stretch: int = 0
    num_stretches: int = 0


class QueryRows(NamedTuple):
    """Query rows of a warpgroup: the keys [start, stop) that each row sees, and the scale of exp2.

    Under a two-sided mask start and stop are read only where they are needed, from the first row's on.
    """

    start: object
    stop: object
    scale: float
    first: int


# ---------------------------------------------------------------------------------------------- work and masks


@gluon.jit
def place_of(ticket, problem):
    """Return batch, head and rank of a ticket's tile: by head group, by tile (longest first), by head in the group."""
    per_group = problem.heads_per_group * problem.num_row_tiles
    group = ticket // per_group
    rest = ticket - group * per_group
    rank = rest // problem.heads_per_group
    batch_head = group * problem.heads_per_group + rest - rank * problem.heads_per_group
    batch = batch_head // problem.num_heads
    return batch, batch_head - batch * problem.num_heads, rank


@gluon.jit
def decode(ticket, problem, pointers, FIRST: gl.constexpr, COUNT: gl.constexpr, V: gl.constexpr):
    """Return the tile of a ticket, with its blocks as seen by its rows [FIRST, FIRST + COUNT).

    Of the rows [FIRST, FIRST + COUNT), every one has started to see keys at `last_start`, and none has stopped before
    `first_stop`; the blocks in between are full.
    """
    ROWS: gl.constexpr = V.tiles.rows
    BN: gl.constexpr = V.tiles.block_n
    batch, head, rank = place_of(ticket, problem)
    row = (problem.num_row_tiles - 1 - rank) * ROWS
    if V.mask == "ends":
        entry = pointers.table + rank * 4
        row = gl.load(entry) * ROWS
        num_stretches = gl.load(entry + 2)
        stretch = gl.load(entry + 1) + num_stretches - 1
        num_blocks = gl.load(entry + 3)
        return Tile(batch, head, row, 0, num_blocks, 0, 0, num_blocks, num_blocks, stretch, num_stretches)
    if V.mask == "none":
        first_key = batch * 0
        last_start = first_key
        first_stop = problem.seqlen_k
        end_key = problem.seqlen_k
    elif V.mask == "band":
        last_row = gl.minimum(row + ROWS, problem.seqlen_q) - 1
        first_key = gl.maximum(row + problem.lower, 0)
        end_key = gl.minimum(last_row + problem.upper + 1, problem.seqlen_k)
        last_start = gl.minimum(row + FIRST + COUNT - 1, last_row) + problem.lower
        first_stop = gl.minimum(row + FIRST + problem.upper + 1, problem.seqlen_k)
    else:
        entry = pointers.table + rank * 8
        row = gl.load(entry) * ROWS
        first_key = gl.load(entry + 1)
        last_start = gl.load(entry + 2)
        first_stop = gl.load(entry + 3)
        end_key = gl.load(entry + 4)
    if V.tiles.aligned:
        first_key = first_key // BN * BN
    num_blocks = (gl.maximum(end_key - first_key, 0) + BN - 1) // BN
    first_seen = num_blocks * 0
    end_seen = num_blocks
    if V.mask == "band" and V.tiles.skips:
        own_last_row = gl.minimum(row + FIRST + COUNT - 1, last_row)
        own_end_key = gl.where(row + FIRST <= last_row, own_last_row + problem.upper + 1, 0)
        end_seen = gl.minimum((gl.maximum(own_end_key - first_key, 0) + BN - 1) // BN, num_blocks)
        first_seen = gl.minimum(gl.maximum(row + FIRST + problem.lower - first_key, 0) // BN, end_seen)
    first_full = gl.minimum((gl.maximum(last_start - first_key, 0) + BN - 1) // BN, end_seen)
    end_full = gl.minimum(gl.maximum(gl.maximum(first_stop - first_key, 0) // BN, first_full), end_seen)
    return Tile(batch, head, row, first_key, num_blocks, first_seen, first_full, end_full, end_seen, 0, 0)


@gluon.jit
def visible_keys(rows, problem, pointers, V: gl.constexpr):
    """Return start, stop: each row sees the keys [start, stop)."""
    if V.mask == "none":
        start = rows * 0
        stop = start + problem.seqlen_k
    elif V.mask == "band":
        start = rows + problem.lower
        stop = gl.minimum(rows + problem.upper + 1, problem.seqlen_k)
    elif V.mask == "ends":  # see `hide`
        start = 0
        stop = 0
    else:
        inside = rows < problem.seqlen_q
        start = gl.load(pointers.start + rows, mask=inside, other=0)
        stop = gl.load(pointers.stop + rows, mask=inside, other=0)
    return start, stop


@gluon.jit
def slot(count, SIZE: gl.constexpr):
    """Return index and phase of the count-th use of a ring of SIZE buffers."""
    if SIZE == 2:
        index = count & 1
    else:
        index = count % SIZE
    return index, (count // SIZE) & 1


@gluon.jit
def tiles_at(ring, index, V: gl.constexpr):
    """Return slot `index` of a ring: a (1, rows, 1, columns) buffer, as TMA moves it, for each part of the head."""
    if len(ring) == 2:
        tiles = (ring[0].index(index), ring[1].index(index))
    else:
        tiles = (ring[0].index(index),)
    return tiles


@gluon.jit
def q_tiles(shared, W, V: gl.constexpr):
    """Return Q of warpgroup W. If results are staged in Q, both parts are in that warpgroup's half of the buffer."""
    if V.tiles.stage_in_q:
        RATIO: gl.constexpr = V.tiles.parts[0] // V.tiles.parts[1]
        tiles = (shared.q[0].index(2 * W), shared.q[1].index((2 * W + 1) * RATIO))
    else:
        tiles = tiles_at(shared.q, W, V)
    return tiles


# ------------------------------------------------------------------------------------------------------ producer


@gluon.jit
def load_tile(desc, tiles, full, batch, row, head, OTHERS: gl.constexpr, V: gl.constexpr):
    """Load all parts of one tile; `full` counts their bytes and the OTHERS."""
    if len(desc) == 2:
        mbarrier.expect(full, desc[0].block_type.nbytes + desc[1].block_type.nbytes + OTHERS)
    else:
        mbarrier.expect(full, desc[0].block_type.nbytes + OTHERS)
    load_parts(desc, tiles, full, batch, row, head, V)


@gluon.jit
def load_parts(desc, tiles, full, batch, row, head, V: gl.constexpr):
    """Load all parts of one tile, whose bytes `full` expects."""
    tma_load(desc[0], [batch, row, head, 0], full, tiles[0])
    if len(desc) == 2:
        tma_load(desc[1], [batch, row, head, V.tiles.parts[0]], full, tiles[1])


@gluon.jit
def store_number(buffer, number):
    """Store a number in shared memory, by the producer warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    buffer.store(gl.full([1], number, gl.int32, layout))


@gluon.jit
def load_number(buffer):
    """Load a number from shared memory, by a consumer."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(buffer.load(layout), 0)


@gluon.jit
def publish(ticket, row, num_blocks, count, shared, barriers, V: gl.constexpr):
    """Tell the consumers which tile is next; under a two-sided mask also its first row and its number of blocks."""
    index, phase = slot(count, 2)
    mbarrier.wait(barriers.ticket_empty.index(index), phase ^ 1)
    store_number(shared.ticket.index(index), ticket)
    if V.mask == "ends":
        store_number(shared.numbers.index(2 * index), row)
        store_number(shared.numbers.index(2 * index + 1), num_blocks)
    mbarrier.arrive(barriers.ticket_full.index(index), count=1)


@gluon.jit
def load_q(q_desc, shared, barriers, tile, count, V: gl.constexpr):
    """Load the rows of each warpgroup once it has finished with those of the previous tile."""
    WARPGROUPS: gl.constexpr = V.tiles.num_warpgroups
    for w in gl.static_range(WARPGROUPS):
        mbarrier.wait(barriers.q_empty.index(w), (count & 1) ^ 1)
        load_tile(q_desc, q_tiles(shared, w, V), barriers.q_full.index(w), tile.batch,
                  tile.row + w * V.tiles.block_m, tile.head, 0, V)  # fmt: skip


@gluon.jit
def load_keys(q_desc, k_desc, v_desc, ends_desc, shared, barriers, tile, head_kv, key, kv, count, is_first,
              V: gl.constexpr):  # fmt: skip
    """Load K and V of the next block, and Q after the first K, which need not wait for the previous tile's use of Q."""
    index, phase = slot(kv, V.tiles.num_stages)
    full = barriers.k_full.index(index)
    if V.tiles.halves:
        mbarrier.expect(full, V.block_bytes)
        load_parts(k_desc, tiles_at(shared.k, index, V), full, tile.batch, key, head_kv, V)
        load_parts(v_desc, tiles_at(shared.v, index, V), full, tile.batch, key, head_kv, V)
    else:
        load_tile(k_desc, tiles_at(shared.k, index, V), full, tile.batch, key, head_kv, V.ends_bytes, V)
    if V.mask == "ends":
        tma_load(ends_desc, [0, key], full, shared.ends.index(index))
    if is_first:
        load_q(q_desc, shared, barriers, tile, count, V)
    if not V.tiles.halves:
        mbarrier.wait(barriers.v_empty.index(index), phase ^ 1)
        full = barriers.v_full.index(index)
        load_tile(v_desc, tiles_at(shared.v, index, V), full, tile.batch, key, head_kv, 0, V)


@gluon.jit
def walk_stretches(q_desc, k_desc, v_desc, ends_desc, shared, barriers, pointers, tile, head_kv, kv, count,
                   V: gl.constexpr):  # fmt: skip
    """Load the blocks of a tile's stretches, last to first; with the first block of each say what the stretch is."""
    BN: gl.constexpr = V.tiles.block_n
    for i in range(tile.num_stretches):
        entry = pointers.stretches + (tile.stretch - i) * 4
        begin = gl.load(entry)
        end = gl.load(entry + 1)
        masked = gl.load(entry + 2)
        for j in range(end - begin):
            index, phase = slot(kv, V.tiles.num_stages)
            mbarrier.wait(barriers.k_empty.index(index), phase ^ 1)
            if j == 0:
                store_number(shared.numbers.index(4 + 2 * index), end)
                store_number(shared.numbers.index(4 + 2 * index + 1), (end - begin) * 2 + masked)
            load_keys(q_desc, k_desc, v_desc, ends_desc, shared, barriers, tile, head_kv, (end - 1 - j) * BN, kv,
                      count, i + j == 0, V)  # fmt: skip
            kv += 1
    return kv


@gluon.jit
def produce(q_desc, k_desc, v_desc, ends_desc, shared, barriers, problem, pointers, V: gl.constexpr):
    """Producer warp: draw tiles from a counter that all programs share, load Q and fill the ring of K and V."""
    BN: gl.constexpr = V.tiles.block_n
    STAGES: gl.constexpr = V.tiles.num_stages
    count = 0
    kv = 0
    ticket = gl.program_id(0)
    while ticket < problem.num_tiles:
        tile = decode(ticket, problem, pointers, 0, V.tiles.rows, V)
        publish(ticket, tile.row, tile.num_blocks, count, shared, barriers, V)
        head_kv = tile.head // problem.heads_per_kv
        if V.mask == "ends":
            kv = walk_stretches(
                q_desc, k_desc, v_desc, ends_desc, shared, barriers, pointers, tile, head_kv, kv, count, V
            )
        else:
            for i in range(tile.num_blocks):
                index, phase = slot(kv, STAGES)
                key = tile.key + (tile.num_blocks - 1 - i) * BN
                mbarrier.wait(barriers.k_empty.index(index), phase ^ 1)
                load_keys(q_desc, k_desc, v_desc, ends_desc, shared, barriers, tile, head_kv, key, kv, count, i == 0, V)
                kv += 1
        if tile.num_blocks == 0:
            load_q(q_desc, shared, barriers, tile, count, V)
        count += 1
        ticket = gl.atomic_add(pointers.counter, 1) + gl.num_programs(0)
    publish(ticket, 0, 0, count, shared, barriers, V)
    if gl.atomic_add(pointers.counter + 1, 1) == gl.num_programs(0) - 1:  # the last program resets the counters
        gl.store(pointers.counter, 0)
        gl.store(pointers.counter + 1, 0)


# ----------------------------------------------------------------------------------------------------- consumers


@gluon.jit
def matrices(tiles, V: gl.constexpr):
    """View the (1, rows, 1, columns) buffer of each part as the (rows, columns) matrix that wgmma reads."""
    first = tiles[0].reshape([tiles[0].shape[1], tiles[0].shape[3]])
    if len(tiles) == 2:
        parts = (first, tiles[1].reshape([tiles[1].shape[1], tiles[1].shape[3]]))
    else:
        parts = (first,)
    return parts


@gluon.jit
def own_q(shared, W: gl.constexpr, V: gl.constexpr):
    """Return Q of warpgroup W as matrices."""
    return matrices(q_tiles(shared, opaque(W), V), V)


@gluon.jit
def scores(q, k, V: gl.constexpr):
    """Issue S = Q K^T."""
    S_LAYOUT: gl.constexpr = V.score_layout
    BM: gl.constexpr = V.tiles.block_m
    BN: gl.constexpr = V.tiles.block_n
    zeros = gl.zeros([BM, BN], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q[0], k[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    if len(q) == 2:
        s = warpgroup_mma(q[1], k[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def add_values(acc, p, v, V: gl.constexpr):
    """Issue O += P V. P is converted only here, because each 16-bit value carried in a loop costs a PRMT."""
    p = p.to(v[0].dtype)
    layout: gl.constexpr = gl.DotOperandLayout(0, V.acc_layouts[0], 2)
    first = warpgroup_mma(gl.convert_layout(p, layout), v[0], acc[0], is_async=True)
    if len(v) == 2:
        layout1: gl.constexpr = gl.DotOperandLayout(0, V.acc_layouts[1], 2)
        parts = (first, warpgroup_mma(gl.convert_layout(p, layout1), v[1], acc[1], is_async=True))
    else:
        parts = (first,)
    return parts


@gluon.jit
def wait_values(acc, V: gl.constexpr):
    """Wait until no product is in flight and return O."""
    if len(acc) == 2:
        parts = warpgroup_mma_wait(0, deps=(acc[0], acc[1]))
    else:
        parts = (warpgroup_mma_wait(0, deps=(acc[0],)),)
    return parts


@gluon.jit
def scaled(acc, factor, V: gl.constexpr):
    """Return O with every row multiplied by its factor."""
    O_LAYOUT: gl.constexpr = V.acc_layouts[0]
    first = acc[0] * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]
    if len(acc) == 2:
        O_LAYOUT1: gl.constexpr = V.acc_layouts[1]
        parts = (first, acc[1] * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT1))[:, None])
    else:
        parts = (first,)
    return parts


@gluon.jit
def rescaled_part(acc, factor, PART: gl.constexpr, V: gl.constexpr):
    """Return one part of O, rows multiplied by their factors, which are mostly 1."""
    layout: gl.constexpr = V.acc_layouts[PART]
    columns: gl.constexpr = V.tiles.value_parts[PART]
    factor = gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None].broadcast_to([V.tiles.block_m, columns])
    return scale_unless_one(acc, factor, V.tiles.block_m * columns // 128)


@gluon.jit
def rescaled(acc, factor, V: gl.constexpr):
    """Return O rescaled by exp(old m - m), which is mostly 1; see `scaled`."""
    if len(acc) == 2:
        parts = (rescaled_part(acc[0], factor, 0, V), rescaled_part(acc[1], factor, 1, V))
    else:
        parts = (rescaled_part(acc[0], factor, 0, V),)
    return parts


@gluon.jit
def zero_acc(V: gl.constexpr):
    """Return O of no keys: zeros."""
    O_LAYOUT: gl.constexpr = V.acc_layouts[0]
    BM: gl.constexpr = V.tiles.block_m
    columns: gl.constexpr = V.tiles.value_parts[0]
    first = gl.zeros([BM, columns], gl.float32, O_LAYOUT)
    if len(V.tiles.value_parts) == 2:
        O_LAYOUT1: gl.constexpr = V.acc_layouts[1]
        columns1: gl.constexpr = V.tiles.value_parts[1]
        parts = (first, gl.zeros([BM, columns1], gl.float32, O_LAYOUT1))
    else:
        parts = (first,)
    return parts


@gluon.jit
def hide(s, index, key, rows, shared, pointers, V: gl.constexpr):
    """Return S with -inf for keys that the row does not see; their ends are in slot `index` of the ring."""
    S_LAYOUT: gl.constexpr = V.score_layout
    keys = key + gl.arange(0, V.tiles.block_n, layout=gl.SliceLayout(0, S_LAYOUT))
    if V.mask == "ends":  # all is read again in each masked block, since the others need the registers
        own = rows.first + gl.arange(0, V.tiles.block_m, layout=gl.SliceLayout(1, S_LAYOUT))
        stop = gl.load(pointers.stop + own)
        ends = shared.ends.index(index).reshape([V.tiles.block_n]).load(gl.SliceLayout(0, S_LAYOUT))
        SHAPE: gl.constexpr = s.shape
        own, ends = own[:, None].broadcast_to(SHAPE), ends[None, :].broadcast_to(SHAPE)
        s = seen_only(s, own, ends, keys[None, :].broadcast_to(SHAPE), stop[:, None].broadcast_to(SHAPE))
        if V.starts:
            start = gl.load(pointers.start + rows.first + gl.arange(0, V.tiles.block_m, layout=stop.type.layout))
            s = gl.where(keys[None, :] >= start[:, None], s, float("-inf"))
    else:
        visible = keys[None, :] < rows.stop[:, None]
        if V.mask != "none":
            visible = visible & (keys[None, :] >= rows.start[:, None])
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def seen_scores(s, index, key, rows, shared, barriers, pointers, MASKED: gl.constexpr, V: gl.constexpr):
    """Release slot `index` of the ring of K, and return S with -inf for keys that the row does not see."""
    if MASKED and V.mask == "ends":  # the ends are in the slot
        s = hide(s, index, key, rows, shared, pointers, V)
    mbarrier.arrive(barriers.k_empty.index(index), count=1)
    if MASKED and V.mask != "ends":
        s = hide(s, index, key, rows, shared, pointers, V)
    return s


@gluon.jit
def lane_sums(p, V: gl.constexpr):
    """Return row sums within a thread; the four lanes that share a row add theirs once, at the end."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def over_lanes(x, V: gl.constexpr):
    """Return the largest number of each row, of which the four lanes that share a row have one in a first register."""
    BM: gl.constexpr = V.tiles.block_m
    EIGHTS: gl.constexpr = V.tiles.block_n // 8
    x = x.reshape([BM, EIGHTS, 4, 2]).permute([0, 2, 1, 3]).reshape([BM, 4, 2 * EIGHTS])
    for _ in gl.static_range(EIGHTS.bit_length()):  # the first of a lane's registers
        x = x.reshape([BM, 4, x.shape[2] // 2, 2]).split()[0]
    return gl.convert_layout(gl.max(x.reshape([BM, 4]), 1), gl.SliceLayout(1, V.score_layout), assert_trivial=True)


@gluon.jit
def subtrahend(s, row_max, rows, MASKED: gl.constexpr, V: gl.constexpr):
    """Return the new m (of scaled S, base 2), what is subtracted for it, and exp(old m - m).

    m may lag behind a row's maximum by SLACK. So it rarely changes after the first blocks, and O is rarely rescaled.
    """
    SLACK: gl.constexpr = 8.0  # m may lag behind the maximum by 2^8, far from where P or l would lose bits
    if V.tiles.schedule == "sequence":
        block_max = over_lanes(maxima_of_rows(s, V.tiles.block_n // 2), V)
    else:
        block_max = gl.max(s, 1)
    new_max = gl.maximum(row_max, block_max * rows.scale)
    new_max = gl.where(new_max - row_max > SLACK, new_max, row_max)
    if MASKED:
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        finite_max = new_max
    return new_max, finite_max, gl.exp2(row_max - finite_max)


@gluon.jit
def softmax(s, row_max, row_sum, rows, MASKED: gl.constexpr, V: gl.constexpr):
    """Return P = exp(S - m), the new m, the lanes' sums, and exp(old m - m)."""
    row_max, subtracted, alpha = subtrahend(s, row_max, rows, MASKED, V)
    p = gl.exp2(s * rows.scale - subtracted[:, None])
    row_sum = times_rows(row_sum, alpha) + lane_sums(p, V)
    return p, row_max, row_sum, alpha


@gluon.jit
def times_rows(lanes, factor):
    """Return the lanes' sums times the factor of each row."""
    layout: gl.constexpr = gl.SliceLayout(1, lanes.type.layout)
    return lanes * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def normalizer(row_sum, row_max, rows, V: gl.constexpr):
    """Return 1 / l and lse of every row, from the lanes' sums; NaN stays NaN."""
    S_LAYOUT: gl.constexpr = V.score_layout
    LN2: gl.constexpr = 0.6931471805599453
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, S_LAYOUT))
    inverse = gl.where(row_sum == 0, 0.0, 1.0 / row_sum)
    return inverse, gl.where(row_sum == 0, float("-inf"), row_max * LN2 + gl.log(row_sum))


@gluon.jit
def nothing_yet(V: gl.constexpr):
    """Return O, row maxima and lanes' sums before the first block."""
    BM: gl.constexpr = V.tiles.block_m
    BN: gl.constexpr = V.tiles.block_n
    S_LAYOUT: gl.constexpr = V.score_layout
    row_max = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    return zero_acc(V), row_max, lane_sums(gl.zeros([BM, BN], gl.float32, S_LAYOUT), V)


@gluon.jit
def stretch_at(index, shared):
    """Return the stretch that begins in slot `index`: the block after its last one, its masked and its other blocks."""
    end = load_number(shared.numbers.index(4 + 2 * index))
    number = load_number(shared.numbers.index(4 + 2 * index + 1))
    masked = (number & 1) * (number >> 1)
    return end, masked, (number >> 1) - masked


@gluon.jit
def key_of(tile, i, V: gl.constexpr):
    """Return the first key of the i-th block of the walk."""
    return tile.key + (tile.num_blocks - 1 - i) * V.tiles.block_n


@gluon.jit
def take_turn(token, W: gl.constexpr, V: gl.constexpr):
    """Wait until the previous consumer has passed the turn to consumer W."""
    if V.tiles.turns:
        named_barrier(token, 8 + W, 256, False)


@gluon.jit
def pass_turn(token, W: gl.constexpr, V: gl.constexpr):
    """Let the next consumer issue its products."""
    if V.tiles.turns:
        named_barrier(token, 8 + (W + 1) % V.tiles.num_warpgroups, 256, True)


@gluon.jit
def step_overlapped(
    acc, p, alpha, row_max, row_sum, kv, i, key, tile, rows, shared, barriers, pointers,
    MASKED: gl.constexpr, W: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Issue S of block i, at `key`, and O += P V of the previous one together, then compute the softmax of block i."""
    STAGES: gl.constexpr = V.tiles.num_stages
    index, phase = slot(kv, STAGES)
    next_index, _ = slot(kv + 1, STAGES)
    take_turn(kv, W, V)
    s = scores(own_q(shared, W, V), matrices(tiles_at(shared.k, next_index, V), V), V)
    if V.tiles.rescale_late:
        acc = rescaled(acc, alpha, V)
    mbarrier.wait(barriers.v_full.index(index), phase)
    acc = add_values(acc, p, matrices(tiles_at(shared.v, index, V), V), V)
    s = warpgroup_mma_wait(len(V.tiles.value_parts), deps=(s,))
    pass_turn(kv, W, V)
    s = seen_scores(s, next_index, key, rows, shared, barriers, pointers, MASKED, V)
    p, row_max, row_sum, alpha = softmax(s, row_max, row_sum, rows, MASKED, V)
    # This wait ends the basic block, or ptxas would hoist the wait for P V above the softmax.
    after_index, after_phase = slot(kv + 2, STAGES)
    mbarrier.wait(barriers.k_full.index(after_index), after_phase, pred=i + 1 < tile.num_blocks)
    acc = wait_values(acc, V)
    mbarrier.arrive(barriers.v_empty.index(index), count=1)
    if not V.tiles.rescale_late:
        acc = rescaled(acc, alpha, V)
    return acc, p, alpha, row_max, row_sum, kv + 1


@gluon.jit
def attend_overlapped(rows, q_empty, tile, kv, shared, barriers, pointers, W: gl.constexpr, V: gl.constexpr):
    """Return O (not yet divided), 1 / l and lse of a tile, and the next use of the ring; softmax under products."""
    STAGES: gl.constexpr = V.tiles.num_stages
    n = tile.num_blocks
    acc, row_max, row_sum = nothing_yet(V)
    index, phase = slot(kv, STAGES)
    mbarrier.wait(barriers.k_full.index(index), phase)
    s = warpgroup_mma_wait(0, deps=(scores(own_q(shared, W, V), matrices(tiles_at(shared.k, index, V), V), V),))
    if V.mask == "ends":
        end, num_masked, num_full = stretch_at(index, shared)
        key = (end - 1) * V.tiles.block_n
    else:
        key = key_of(tile, 0, V)
    s = seen_scores(s, index, key, rows, shared, barriers, pointers, V.mask != "none", V)
    if V.mask == "none":
        if tile.end_full < n:
            s = hide(s, index, key, rows, shared, pointers, V)
    p, row_max, row_sum, alpha = softmax(s, row_max, row_sum, rows, V.mask != "none", V)
    index, phase = slot(kv + 1, STAGES)
    mbarrier.wait(barriers.k_full.index(index), phase, pred=n > 1)
    if V.mask == "ends":
        i = 1
        end -= 1  # the first block is done
        num_full = gl.where(num_masked == 0, num_full - 1, num_full)
        num_masked = gl.maximum(num_masked - 1, 0)
        while i < n:
            for j in range(num_masked):
                key = (end - 1 - j) * V.tiles.block_n
                acc, p, alpha, row_max, row_sum, kv = step_overlapped(
                    acc, p, alpha, row_max, row_sum, kv, i, key, tile, rows, shared, barriers, pointers, True, W, V
                )
                i += 1
            for _ in range(num_full):
                acc, p, alpha, row_max, row_sum, kv = step_overlapped(
                    acc, p, alpha, row_max, row_sum, kv, i, 0, tile, rows, shared, barriers, pointers, False, W, V
                )
                i += 1
            if i < n:
                index, _ = slot(kv + 1, STAGES)
                end, num_masked, num_full = stretch_at(index, shared)
    else:
        first = gl.maximum(n - tile.end_full, 1)
        last = gl.maximum(n - tile.first_full, first)
        if V.mask != "none":
            for i in range(1, first):
                acc, p, alpha, row_max, row_sum, kv = step_overlapped(
                    acc, p, alpha, row_max, row_sum, kv, i, key_of(tile, i, V), tile, rows, shared, barriers, pointers,
                    True, W, V,
                )  # fmt: skip
        for i in range(first, last):
            acc, p, alpha, row_max, row_sum, kv = step_overlapped(
                acc, p, alpha, row_max, row_sum, kv, i, key_of(tile, i, V), tile, rows, shared, barriers, pointers,
                False, W, V,
            )  # fmt: skip
        if V.mask != "none":
            for i in range(last, n):
                acc, p, alpha, row_max, row_sum, kv = step_overlapped(
                    acc, p, alpha, row_max, row_sum, kv, i, key_of(tile, i, V), tile, rows, shared, barriers, pointers,
                    True, W, V,
                )  # fmt: skip
    if not V.tiles.stage_in_q:
        mbarrier.arrive(q_empty, count=1)
    index, phase = slot(kv, STAGES)
    if V.tiles.rescale_late:
        acc = rescaled(acc, alpha, V)
    mbarrier.wait(barriers.v_full.index(index), phase)
    acc = add_values(acc, p, matrices(tiles_at(shared.v, index, V), V), V)
    inverse, lse = normalizer(row_sum, row_max, rows, V)
    acc = wait_values(acc, V)
    mbarrier.arrive(barriers.v_empty.index(index), count=1)
    return acc, inverse, lse, kv + 1


@gluon.jit
def step_in_sequence(
    acc, row_max, row_sum, kv, key, rows, shared, barriers, pointers,
    MASKED: gl.constexpr, W: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Process the block at `key` from S to O += P V, while the other warpgroups' products run."""
    if V.tiles.halves:
        return step_in_halves(acc, row_max, row_sum, kv, key, rows, shared, barriers, pointers, MASKED, W, V)
    index, phase = slot(kv, V.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(index), phase)
    s = warpgroup_mma_wait(0, deps=(scores(own_q(shared, W, V), matrices(tiles_at(shared.k, index, V), V), V),))
    s = seen_scores(s, index, key, rows, shared, barriers, pointers, MASKED, V)
    p, row_max, row_sum, alpha = softmax(s, row_max, row_sum, rows, MASKED, V)
    acc = rescaled(acc, alpha, V)
    mbarrier.wait(barriers.v_full.index(index), phase)
    acc = wait_values(add_values(acc, p, matrices(tiles_at(shared.v, index, V), V), V), V)
    mbarrier.arrive(barriers.v_empty.index(index), count=1)
    return acc, row_max, row_sum, kv + 1


@gluon.jit
def step_in_halves(
    acc, row_max, row_sum, kv, key, rows, shared, barriers, pointers,
    MASKED: gl.constexpr, W: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Process the block at `key` from S to O += P V, the left keys' part under the exponentials of the right keys."""
    index, phase = slot(kv, V.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(index), phase)
    s = warpgroup_mma_wait(0, deps=(scores(own_q(shared, W, V), matrices(tiles_at(shared.k, index, V), V), V),))
    if MASKED:
        s = hide(s, index, key, rows, shared, pointers, V)
    row_max, subtracted, alpha = subtrahend(s, row_max, rows, MASKED, V)
    subtracted = gl.convert_layout(subtracted, gl.SliceLayout(1, V.half_layout), assert_trivial=True)[:, None]
    acc = rescaled(acc, alpha, V)
    row_sum = times_rows(row_sum, alpha)
    v = matrices(tiles_at(shared.v, index, V), V)
    halves = s.reshape([V.tiles.block_m, 2, V.tiles.block_n // 2]).permute([0, 2, 1]).split()
    for half in gl.static_range(2):
        p = gl.convert_layout(halves[half], V.half_layout, assert_trivial=True)
        p = gl.exp2(p * rows.scale - subtracted)
        row_sum += gl.convert_layout(lane_sums(p, V), row_sum.type.layout, assert_trivial=True)
        acc = add_values(acc, p, half_of_keys(v, half, V), V)
    acc = wait_values(acc, V)
    mbarrier.arrive(barriers.v_empty.index(index), count=1)
    return acc, row_max, row_sum, kv + 1


@gluon.jit
def half_of_keys(v, HALF: gl.constexpr, V: gl.constexpr):
    """Return the rows of V of the left or right half of a block's keys."""
    N: gl.constexpr = V.tiles.block_n // 2
    first = v[0].slice(HALF * N, N, dim=0)
    if len(v) == 2:
        parts = (first, v[1].slice(HALF * N, N, dim=0))
    else:
        parts = (first,)
    return parts


@gluon.jit
def pass_block(kv, shared, barriers, V: gl.constexpr):
    """Release a block that none of the warpgroup's rows sees, so that all warpgroups count the ring's uses alike."""
    index, phase = slot(kv, V.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(index), phase)
    mbarrier.arrive(barriers.k_empty.index(index), count=1)
    if not V.tiles.halves:
        mbarrier.wait(barriers.v_full.index(index), phase)
        mbarrier.arrive(barriers.v_empty.index(index), count=1)
    return kv + 1


@gluon.jit
def attend_in_sequence(rows, q_empty, tile, kv, shared, barriers, pointers, W: gl.constexpr, V: gl.constexpr):
    """Like `attend_overlapped`, without overlap inside the warpgroup: takes the fewest registers."""
    n = tile.num_blocks
    acc, row_max, row_sum = nothing_yet(V)
    if V.mask == "ends":
        i = 0
        while i < n:
            index, phase = slot(kv, V.tiles.num_stages)
            mbarrier.wait(barriers.k_full.index(index), phase)
            end, num_masked, num_full = stretch_at(index, shared)
            i += num_masked + num_full
            for j in range(num_masked):
                key = (end - 1 - j) * V.tiles.block_n
                acc, row_max, row_sum, kv = step_in_sequence(acc, row_max, row_sum, kv, key, rows, shared, barriers,
                                                             pointers, True, W, V)  # fmt: skip
            for _ in range(num_full):
                acc, row_max, row_sum, kv = step_in_sequence(acc, row_max, row_sum, kv, 0, rows, shared, barriers,
                                                             pointers, False, W, V)  # fmt: skip
    else:
        if V.mask == "band":
            for _ in range(n - tile.end_seen):
                kv = pass_block(kv, shared, barriers, V)
        for i in range(n - tile.end_seen, n - tile.end_full):
            acc, row_max, row_sum, kv = step_in_sequence(acc, row_max, row_sum, kv, key_of(tile, i, V), rows, shared,
                                                         barriers, pointers, True, W, V)  # fmt: skip
        for i in range(n - tile.end_full, n - tile.first_full):
            acc, row_max, row_sum, kv = step_in_sequence(acc, row_max, row_sum, kv, key_of(tile, i, V), rows, shared,
                                                         barriers, pointers, False, W, V)  # fmt: skip
        if V.mask != "none":
            for i in range(n - tile.first_full, n - tile.first_seen):
                acc, row_max, row_sum, kv = step_in_sequence(acc, row_max, row_sum, kv, key_of(tile, i, V), rows,
                                                             shared, barriers, pointers, True, W, V)  # fmt: skip
        if V.mask == "band":
            for _ in range(tile.first_seen):
                kv = pass_block(kv, shared, barriers, V)
    if not V.tiles.stage_in_q:
        mbarrier.arrive(q_empty, count=1)
    inverse, lse = normalizer(row_sum, row_max, rows, V)
    return acc, inverse, lse, kv


@gluon.jit
def attend_nothing(q_empty, kv, V: gl.constexpr):
    """Return the results of `attend_overlapped` for a tile that sees no key."""
    if not V.tiles.stage_in_q:
        mbarrier.arrive(q_empty, count=1)
    BM: gl.constexpr = V.tiles.block_m
    rows: gl.constexpr = gl.SliceLayout(1, V.score_layout)
    inverse = gl.full([BM], 0.0, gl.float32, rows)
    return zero_acc(V), inverse, gl.full([BM], float("-inf"), gl.float32, rows), kv


@gluon.jit
def merge_weights(lse, old_lse):
    """Return lse of both, and the outputs' factors exp(lse - both), exp(old_lse - both); two empties give an empty."""
    LOG2E: gl.constexpr = 1.4426950408889634
    top = gl.maximum(lse, old_lse)
    top = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp2((lse - top) * LOG2E)
    old_weight = gl.exp2((old_lse - top) * LOG2E)
    total = weight + old_weight
    inverse = gl.where(total == 0, 0.0, 1.0 / total)
    return gl.where(total == 0, float("-inf"), top + gl.log(total)), weight * inverse, old_weight * inverse


@gluon.jit
def stage_of(shared, desc, W: gl.constexpr):
    """Return the staging buffer of a warpgroup's results as a tile of this descriptor."""
    return start_of(shared.stage.index(W), desc)


@gluon.jit
def load_state(acc_desc, shared, full, tile, row, W: gl.constexpr, PART: gl.constexpr, V: gl.constexpr):
    """Load part of the earlier output into the staging buffer, once the previous store from there has been read."""
    column: gl.constexpr = PART * V.tiles.value_parts[0]
    buffer = stage_of(shared, acc_desc[PART], W)
    tma_store_wait(0)
    mbarrier.expect(full, acc_desc[PART].block_type.nbytes)
    tma_load(acc_desc[PART], [tile.batch, row, tile.head, column], full, buffer)


@gluon.jit
def store_part(
    acc,
    o_desc,
    acc_desc,
    shared,
    barriers,
    tile,
    row,
    loads,
    old_weight,
    W: gl.constexpr,
    PART: gl.constexpr,
    V: gl.constexpr,
):
    """Merge part of the earlier output into this one and store it. Returns the number of state loads so far."""
    BM: gl.constexpr = V.tiles.block_m
    column: gl.constexpr = PART * V.tiles.value_parts[0]
    layout: gl.constexpr = V.acc_layouts[PART]
    columns: gl.constexpr = V.tiles.value_parts[PART]
    if V.resume:
        if PART == 1 or V.tiles.stage_in_q:
            load_state(acc_desc, shared, barriers.acc_full.index(W), tile, row, W, PART, V)
        mbarrier.wait(barriers.acc_full.index(W), loads & 1)
        loads += 1
        old = stage_of(shared, acc_desc[PART], W).reshape([BM, columns]).load(layout)
        old_weight = gl.convert_layout(old_weight, gl.SliceLayout(1, layout))[:, None]
        # Written out: of the two products in this sum the compiler might fuse another one for each output dtype.
        acc = gl.fma(old, old_weight.broadcast_to(old.shape), acc)
    elif PART == 1 or not V.tiles.stage_in_q:
        tma_store_wait(0)
    buffer = stage_of(shared, o_desc[PART], W)
    buffer.reshape([BM, columns]).store(acc.to(o_desc[PART].dtype))
    fence_async_shared()
    tma_store(o_desc[PART], [tile.batch, row, tile.head, column], buffer)
    return loads


@gluon.jit
def receive(count, shared, barriers, V: gl.constexpr):
    """Return the next ticket from the producer; under a two-sided mask also the tile's row and number of blocks."""
    index, phase = slot(count, 2)
    mbarrier.wait(barriers.ticket_full.index(index), phase)
    ticket = load_number(shared.ticket.index(index))
    if V.mask == "ends":
        row = load_number(shared.numbers.index(2 * index))
        num_blocks = load_number(shared.numbers.index(2 * index + 1))
    else:
        row = 0
        num_blocks = 0
    mbarrier.arrive(barriers.ticket_empty.index(index), count=1)
    return ticket, row, num_blocks


@gluon.jit
def consume(o_desc, acc_desc, shared, barriers, problem, pointers, W: gl.constexpr, V: gl.constexpr):
    """Consumer warpgroup W: attend for rows [W * block_m, (W + 1) * block_m) of every tile."""
    row_layout: gl.constexpr = gl.SliceLayout(1, V.score_layout)
    count = 0
    kv = 0
    loads = 0
    if W == 1:
        pass_turn(kv, W, V)
    ticket, row, num_blocks = receive(count, shared, barriers, V)
    while ticket < problem.num_tiles:
        if V.mask == "ends":
            batch, head, _rank = place_of(ticket, problem)
            tile = Tile(batch, head, row, 0, num_blocks, 0, 0, num_blocks, num_blocks, 0, 0)
        else:
            tile = decode(ticket, problem, pointers, W * V.tiles.block_m, V.tiles.block_m, V)
        row = tile.row + W * V.tiles.block_m
        row_index = row + gl.arange(0, V.tiles.block_m, layout=row_layout)
        lse_of_head = pointers.lse + tile.batch.to(gl.int64) * problem.lse_stride_b \
            + tile.head.to(gl.int64) * problem.lse_stride_h  # fmt: skip
        start, stop = visible_keys(row_index, problem, pointers, V)
        if V.resume:
            old_lse = gl.load(lse_of_head + row_index, mask=row_index < problem.seqlen_q, other=float("-inf"))
            if not V.tiles.stage_in_q:
                load_state(acc_desc, shared, barriers.acc_full.index(W), tile, row, W, 0, V)
        q_empty = barriers.q_empty.index(W)
        rows = QueryRows(start, stop, problem.scale, row)
        mbarrier.wait(barriers.q_full.index(W), count & 1)
        if tile.num_blocks == 0:
            acc, factor, lse, kv = attend_nothing(q_empty, kv, V)
        elif V.tiles.schedule == "overlap":
            acc, factor, lse, kv = attend_overlapped(rows, q_empty, tile, kv, shared, barriers, pointers, W, V)
        else:
            acc, factor, lse, kv = attend_in_sequence(rows, q_empty, tile, kv, shared, barriers, pointers, W, V)
        if V.resume:
            lse, weight, old_weight = merge_weights(lse, old_lse)
            factor = factor * weight
        else:
            old_weight = factor
        acc = scaled(acc, factor, V)
        # Computed again: a short live range saves registers.
        row_index = row + gl.arange(0, V.tiles.block_m, layout=row_layout)
        gl.store(lse_of_head + row_index, lse, mask=row_index < problem.seqlen_q)
        loads = store_part(acc[0], o_desc, acc_desc, shared, barriers, tile, row, loads, old_weight, W, 0, V)
        if len(V.tiles.value_parts) == 2:
            loads = store_part(acc[1], o_desc, acc_desc, shared, barriers, tile, row, loads, old_weight, W, 1, V)
        if V.tiles.stage_in_q:
            tma_store_wait(0)
            mbarrier.arrive(q_empty, count=1)
        count += 1
        ticket, row, num_blocks = receive(count, shared, barriers, V)
    if W == 0:
        take_turn(kv, W, V)  # so that no barrier is left half full
    tma_store_wait(0)


# -------------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def pair(first, second, V: gl.constexpr):
    """Return the descriptors of both parts of the head; parts of equal width share one."""
    if len(V.tiles.parts) == 1:
        parts = (first,)
    elif V.tiles.parts[0] == V.tiles.parts[1]:
        parts = (first, first)
    else:
        parts = (first, second)
    return parts


@gluon.jit
def value_pair(first, second, V: gl.constexpr):
    """Return the descriptors of the parts of a head of v, out or acc."""
    if V.tiles.narrow:
        parts = (first,)
    else:
        parts = pair(first, second, V)
    return parts


@gluon.jit
def ring_of(desc, COUNT: gl.constexpr, V: gl.constexpr):
    """Allocate COUNT tiles of shared memory for each part of the head."""
    first = gl.allocate_shared_memory(desc[0].dtype, [COUNT] + desc[0].block_shape, desc[0].layout)
    if len(desc) == 2:
        ring = (first, gl.allocate_shared_memory(desc[1].dtype, [COUNT] + desc[1].block_shape, desc[1].layout))
    else:
        ring = (first,)
    return ring


@gluon.jit
def barrier_ring(SIZE: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate SIZE mbarriers, each complete after ARRIVALS arrivals."""
    ring = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(ring.index(i), count=ARRIVALS)
    return ring


@gluon.jit
def allocate(q_desc, k_desc, v_desc, o_desc, acc_desc, ends_desc, V: gl.constexpr):
    """Allocate the shared memory of a program."""
    WARPGROUPS: gl.constexpr = V.tiles.num_warpgroups
    box: gl.constexpr = [WARPGROUPS] + acc_desc[0].block_shape
    if V.tiles.stage_in_q:
        STATE_LAYOUT: gl.constexpr = V.state_layout
        stage = gl.allocate_shared_memory(gl.float32, box, STATE_LAYOUT)
        q = reinterpret(stage, q_desc[0].dtype, [2 * WARPGROUPS] + q_desc[0].block_shape, q_desc[0].layout)
        if V.tiles.parts[0] == V.tiles.parts[1]:
            q_ring = (q, q)
        else:
            RATIO: gl.constexpr = V.tiles.parts[0] // V.tiles.parts[1]
            box1: gl.constexpr = [2 * WARPGROUPS * RATIO] + q_desc[1].block_shape
            q_ring = (q, reinterpret(stage, q_desc[1].dtype, box1, q_desc[1].layout))
    else:
        stage_dtype: gl.constexpr = gl.float32 if V.resume else o_desc[0].dtype
        stage = gl.allocate_shared_memory(stage_dtype, box, acc_desc[0].layout)
        q_ring = ring_of(q_desc, WARPGROUPS, V)
    k_ring = ring_of(k_desc, V.tiles.num_stages, V)
    v_ring = ring_of(v_desc, V.tiles.num_stages, V)
    NUMBER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ticket = gl.allocate_shared_memory(gl.int32, [2, 1], NUMBER)
    if V.mask == "ends":
        ends = gl.allocate_shared_memory(gl.int32, [V.tiles.num_stages] + ends_desc.block_shape, ends_desc.layout)
        numbers = gl.allocate_shared_memory(gl.int32, [4 + 2 * V.tiles.num_stages, 1], NUMBER)
    else:
        ends = 0
        numbers = 0
    return Shared(q_ring, k_ring, v_ring, stage, ticket, ends, numbers)


@gluon.jit
def make_barriers(V: gl.constexpr):
    """Allocate and initialise the mbarriers of a program."""
    WARPGROUPS: gl.constexpr = V.tiles.num_warpgroups
    STAGES: gl.constexpr = V.tiles.num_stages
    q_full = barrier_ring(WARPGROUPS, 1)
    if V.resume:
        acc_full = barrier_ring(WARPGROUPS, 1)
    else:
        acc_full = q_full  # not a new, unused one: its memory would be reused, see backward_keys
    k_full = barrier_ring(STAGES, 1)
    k_empty = barrier_ring(STAGES, WARPGROUPS)
    if V.tiles.halves:
        v_full = k_full
        v_empty = k_empty
    else:
        v_full = barrier_ring(STAGES, 1)
        v_empty = barrier_ring(STAGES, WARPGROUPS)
    barriers = Barriers(
        q_full,
        barrier_ring(WARPGROUPS, 1),
        k_full,
        k_empty,
        v_full,
        v_empty,
        acc_full,
        barrier_ring(2, 1),
        barrier_ring(2, WARPGROUPS),
    )
    fence_async_shared()
    return barriers


@gluon.jit(
    do_not_specialize=[
        "lse", "start", "stop", "table", "stretches", "counter", "seqlen_q", "seqlen_k", "num_heads", "heads_per_kv",
        "heads_per_group", "num_row_tiles", "num_tiles", "lower", "upper", "lse_stride_b", "lse_stride_h",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, acc_desc,  # first part of the head
    q_desc1, k_desc1, v_desc1, o_desc1, acc_desc1,  # second part, if its width differs
    ends_desc, lse, start, stop, table, stretches, counter,
    seqlen_q, seqlen_k, num_heads, heads_per_kv, heads_per_group, num_row_tiles, num_tiles, lower, upper,
    lse_stride_b, lse_stride_h, scale,
    V: gl.constexpr,
):  # fmt: skip
    """Attention forward; see the module docstring."""
    problem = Problem(seqlen_q, seqlen_k, num_heads, heads_per_kv, heads_per_group, num_row_tiles, num_tiles, lower,
                      upper, lse_stride_b, lse_stride_h, scale)  # fmt: skip
    pointers = Pointers(lse, start, stop, table, stretches, counter)
    q = pair(q_desc, q_desc1, V)
    k = pair(k_desc, k_desc1, V)
    v = value_pair(v_desc, v_desc1, V)
    o = value_pair(o_desc, o_desc1, V)
    acc = value_pair(acc_desc, acc_desc1, V)
    shared = allocate(q, k, v, o, acc, ends_desc, V)
    barriers = make_barriers(V)
    if V.tiles.num_warpgroups == 2:
        gl.warp_specialize([
            (consume, (o, acc, shared, barriers, problem, pointers, 0, V)),
            (consume, (o, acc, shared, barriers, problem, pointers, 1, V)),
            (produce, (q, k, v, ends_desc, shared, barriers, problem, pointers, V)),
        ], [4, 1], [V.tiles.consumer_registers, V.tiles.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (o, acc, shared, barriers, problem, pointers, 0, V)),
            (consume, (o, acc, shared, barriers, problem, pointers, 1, V)),
            (consume, (o, acc, shared, barriers, problem, pointers, 2, V)),
            (produce, (q, k, v, ends_desc, shared, barriers, problem, pointers, V)),
        ], [4, 4, 1], [V.tiles.consumer_registers, V.tiles.consumer_registers, V.tiles.producer_registers])  # fmt: skip
