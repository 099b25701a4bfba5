"""Attention forward for compute capability 9.0.

A persistent program per SM: one producer warp loads tiles by TMA and hands out work, two or three consumer
warpgroups own 64 query rows each and walk the visible key blocks from last to first:

    producer   K(n-1) Q V(n-1) K(n-2) V(n-2) ...            mbarriers full / empty, a ring of stages
    consumer   S(j+1) = Q K(j+1)^T  issued, then  O += P(j) V(j)  issued, and while both run
               P(j+1) = exp2(S(j+1) - m): the softmax of one block hides under the products of its neighbours

m is the row maximum that P is relative to, and l the sum of a row of P, so a row of the result is O / l. O is
rescaled only if m grew by much, which is rare after the first blocks.
That is the schedule "overlap"; tiles.py says which head sizes do better with "sequence". For some head sizes, the
consumers issue their products in turns (FlashAttention-3's ping-pong). Both might otherwise compute their softmax at
the same time, and leave the tensor cores idle. In "joint" steps, both products of a step read one stage, which holds K
of a block and V of the previous one.
Masked blocks are at the two ends of the walk; the loop between them does not test the mask. Under a two-sided mask the
walk is a list of stretches of masked and of other blocks (`hopper.walks`), which the producer hands on with the first
K of each. `acc` and `lse` of earlier calls are merged in the epilogue, loaded by TMA while the main loop runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ringflash_kernels.hopper.compat import (
    columns_of,
    draw_later,
    gl,
    gluon,
    hidden,
    load_lanes,
    maxima_of_rows,
    mbarrier,
    of_lane,
    pairs_of,
    reinterpret,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ringflash_kernels.hopper.descriptors import tile_layout
from ringflash_kernels.hopper.forward.tiles import ForwardTiles
from ringflash_kernels.hopper.pipeline import (
    Pointers,
    Problem,
    QueryRows,
    Tile,
    announce_stretch,
    attend_nothing,
    decode,
    hide,
    key_of,
    lane_sums,
    load_parts,
    load_q,
    load_state,
    load_tile,
    make_barriers,
    matrices,
    merge_weights,
    nothing_yet,
    over_lanes,
    own_q,
    own_row,
    pair,
    pass_block,
    pass_turn,
    place_of,
    publish,
    receive,
    received_tile,
    rescaled,
    ring_of,
    scaled,
    scores,
    slot,
    store_part,
    stretch_at,
    take_turn,
    tickets,
    tiles_at,
    visible_keys,
)


@dataclass(frozen=True)
class ForwardVariant:
    """Compile-time choices of the kernel.

    Args:
        mask: "none", "band" (two diagonals), "bands" (of two causal chunks of rows), "bounds" (an interval of keys for
            each row) or "ends" (besides, the end of each key: the row after the last one that sees it).
        resume: read and continue the state of earlier calls.
        starts: under "ends", rows see only keys from their first one on, as with a window; otherwise that is implied.
        heads: query heads of a tile, of one KV head. With two, both warpgroups have the same rows, so a tile has fewer
            rows, and visits and masks fewer blocks where documents begin or end.
    """

    tiles: ForwardTiles
    mask: str
    resume: bool
    starts: bool = False
    heads: int = 1

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.tiles.rows // self.heads

    @property
    def is_band(self) -> bool:
        """True if diagonals say which keys a row sees."""
        return self.mask in ("band", "bands")

    @property
    def ahead(self) -> bool:
        """True if the next tile is read before a tile ends: under two-sided masks without a window."""
        return self.mask == "ends" and not self.starts and self.tiles.ahead

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


class Shared(NamedTuple):
    """Shared memory: rings of q, k and v tiles for each part of the head, staging of results, the next ticket.

    Under a two-sided mask also a ring of the ends of keys.
    """

    q: tuple
    k: tuple
    v: tuple
    stage: object
    ticket: object
    ends: object


# ------------------------------------------------------------------------------------------------------ producer


@gluon.jit
def load_keys(k_desc, v_desc, ends_desc, shared, barriers, block, kv, CFG: gl.constexpr):
    """Load K of a block, (batch, head, first key); with it V if `tiles.halves`, and the ends of its keys if used."""
    batch, head_kv, key = block
    index, _phase = slot(kv, CFG.tiles.num_stages)
    full = barriers.k_full.index(index)
    if CFG.tiles.halves:
        mbarrier.expect(full, CFG.block_bytes)
        load_parts(k_desc, tiles_at(shared.k, index, CFG), full, batch, key, head_kv, CFG)
        load_parts(v_desc, tiles_at(shared.v, index, CFG), full, batch, key, head_kv, CFG)
    else:
        load_tile(k_desc, tiles_at(shared.k, index, CFG), full, batch, key, head_kv, CFG.ends_bytes, CFG)
    if CFG.mask == "ends":
        tma_load(ends_desc, [0, key], full, shared.ends.index(index))


@gluon.jit
def load_values(v_desc, shared, barriers, block, kv, CFG: gl.constexpr):
    """Load V of a block, unless it arrives with K."""
    if not CFG.tiles.halves:
        batch, head_kv, key = block
        index, phase = slot(kv, CFG.tiles.num_stages)
        mbarrier.wait(barriers.v_empty.index(index), phase ^ 1)
        load_tile(v_desc, tiles_at(shared.v, index, CFG), barriers.v_full.index(index), batch, key, head_kv, 0, CFG)


@gluon.jit
def load_block(
    q_desc, k_desc, v_desc, ends_desc, shared, barriers, tile, block, kv, count, is_first, CFG: gl.constexpr
):
    """Load K and V of the next block. Q follows the tile's first K, which need not wait until Q's place is free."""
    load_keys(k_desc, v_desc, ends_desc, shared, barriers, block, kv, CFG)
    if is_first:
        load_q(q_desc, shared, barriers, tile, count, CFG)
    load_values(v_desc, shared, barriers, block, kv, CFG)


@gluon.jit
def load_joint(q_desc, k_desc, v_desc, shared, barriers, tile, head_kv, kv, count, CFG: gl.constexpr):
    """Load a tile's n blocks, last to first, into n + 1 stages: each holds K of a block and V of the previous one."""
    n = tile.num_blocks
    for i in range(n + 1):
        index, phase = slot(kv, CFG.tiles.num_stages)
        full = barriers.k_full.index(index)
        key = tile.key + (n - 1 - i) * CFG.tiles.block_n
        mbarrier.wait(barriers.k_empty.index(index), phase ^ 1)
        if i == 0:
            load_tile(k_desc, tiles_at(shared.k, index, CFG), full, tile.batch, key, head_kv, 0, CFG)
            load_q(q_desc, shared, barriers, tile, count, CFG)
        elif i == n:
            load_tile(
                v_desc, tiles_at(shared.v, index, CFG), full, tile.batch, key + CFG.tiles.block_n, head_kv, 0, CFG
            )
        else:
            mbarrier.expect(full, CFG.block_bytes)
            load_parts(k_desc, tiles_at(shared.k, index, CFG), full, tile.batch, key, head_kv, CFG)
            load_parts(v_desc, tiles_at(shared.v, index, CFG), full, tile.batch, key + CFG.tiles.block_n, head_kv, CFG)
        kv += 1
    return kv


@gluon.jit
def walk_stretches(q_desc, k_desc, v_desc, ends_desc, shared, barriers, pointers, tile, head_kv, kv, count,
                   CFG: gl.constexpr):  # fmt: skip
    """Load the blocks of a tile's stretches, last to first; with the first block of each say what the stretch is."""
    BN: gl.constexpr = CFG.tiles.block_n
    for i in range(tile.num_stretches):
        entry = pointers.stretches + (tile.stretch - i) * 4
        begin = gl.load(entry)
        end = gl.load(entry + 1)
        masked = gl.load(entry + 2)
        shift = gl.load(entry + 3)
        for j in range(end - begin):
            index, phase = slot(kv, CFG.tiles.num_stages)
            mbarrier.wait(barriers.k_empty.index(index), phase ^ 1)
            if j == 0:
                announce_stretch(index, end * BN + shift, end - begin, masked, shared)
            block = (tile.batch, head_kv, (end - 1 - j) * BN + shift)
            load_block(q_desc, k_desc, v_desc, ends_desc, shared, barriers, tile, block, kv, count, i + j == 0, CFG)
            kv += 1
    return kv


@gluon.jit
def look_ahead(left, num_blocks, ticket, drawn, entry, stretch, problem, pointers, CFG: gl.constexpr):
    """Take the next ticket when 6 blocks of a tile are left, read its tile when 4 are, and its last stretch when 2 are.

    In a short tile each of these reads is one block after the previous one. So a read has at least a block's time
    before the next one needs its result.
    """
    if left == gl.minimum(6, gl.maximum(num_blocks - 1, 0)):
        drawn = draw_later(pointers.counter)
    if left == gl.minimum(4, gl.maximum(num_blocks - 2, 0)):
        ticket = of_lane(drawn, 0) + gl.num_programs(0)
        entry = entry_of(ticket, problem, pointers)
    if left == gl.minimum(2, gl.maximum(num_blocks - 3, 0)):
        stretch = stretch_of(last_of(entry), pointers)
    return ticket, drawn, entry, stretch


@gluon.jit
def entry_of(ticket, problem, pointers):
    """Return the row of `Walks.tiles` of a ticket's tile, a number in each lane; past the last one, the last row."""
    _batch, _head, rank = place_of(gl.minimum(ticket, problem.num_tiles - 1), problem)
    return load_lanes(pointers.table + rank * 4)


@gluon.jit
def last_of(entry):
    """Return the number of a tile's last stretch."""
    return of_lane(entry, 1) + of_lane(entry, 2) - 1


@gluon.jit
def stretch_of(number, pointers):
    """Return a row of `Walks.stretches`, a number in each lane; any row if the number is below 0."""
    return load_lanes(pointers.stretches + gl.maximum(number, 0) * 4)


@gluon.jit
def load_previous(v_desc, shared, barriers, block, kv, CFG: gl.constexpr):
    """Load V of the previous block into slot `kv - 1` of the ring; `block` is (-1, -1, -1) if there is none."""
    if block[0] >= 0:
        load_values(v_desc, shared, barriers, block, kv - 1, CFG)


@gluon.jit
def produce_ahead(q_desc, k_desc, v_desc, ends_desc, shared, barriers, problem, pointers, CFG: gl.constexpr):
    """Load the tiles of this program under a two-sided mask, and read what comes next before a tile ends.

    K of a block is asked for before V of the previous one, also of the previous tile's, because its slot is free first.

    Returns:
        ticket, count: the ticket after the last tile, and the number of tiles.
    """
    BN: gl.constexpr = CFG.tiles.block_n
    count = 0
    kv = 0
    ticket = gl.program_id(0)
    drawn = ticket
    entry = entry_of(ticket, problem, pointers)
    next_stretch = stretch_of(last_of(entry), pointers)
    none = ticket * 0 - 1
    previous = (none, none, none)
    while ticket < problem.num_tiles:
        row, num_blocks = of_lane(entry, 0) * CFG.rows, of_lane(entry, 3)
        num_stretches, last = of_lane(entry, 2), last_of(entry)
        batch, head, _rank = place_of(ticket, problem)
        tile = Tile(batch, head, row, 0, num_blocks, 0, 0, num_blocks, num_blocks, last, num_stretches)
        publish(ticket, row, num_blocks, count, shared, barriers, CFG)
        head_kv = head // problem.heads_per_kv
        left = num_blocks
        stretch = next_stretch
        for i in range(num_stretches):
            begin, end = of_lane(stretch, 0), of_lane(stretch, 1)
            masked, shift = of_lane(stretch, 2), of_lane(stretch, 3)
            stretch = stretch_of(last - i - 1, pointers)
            for j in range(end - begin):
                index, phase = slot(kv, CFG.tiles.num_stages)
                mbarrier.wait(barriers.k_empty.index(index), phase ^ 1)
                if j == 0:
                    announce_stretch(index, end * BN + shift, end - begin, masked, shared)
                block = (batch, head_kv, (end - 1 - j) * BN + shift)
                load_keys(k_desc, v_desc, ends_desc, shared, barriers, block, kv, CFG)
                load_previous(v_desc, shared, barriers, previous, kv, CFG)
                if i + j == 0:
                    load_q(q_desc, shared, barriers, tile, count, CFG)
                previous = block
                kv += 1
                left -= 1
                ticket, drawn, entry, next_stretch = look_ahead(
                    left, num_blocks, ticket, drawn, entry, next_stretch, problem, pointers, CFG
                )
        if num_blocks == 0:
            load_previous(v_desc, shared, barriers, previous, kv, CFG)  # Q waits for the end of the previous tile
            previous = (none, none, none)
            load_q(q_desc, shared, barriers, tile, count, CFG)
            ticket, drawn, entry, next_stretch = look_ahead(
                0, 0, ticket, drawn, entry, next_stretch, problem, pointers, CFG
            )
        count += 1
    load_previous(v_desc, shared, barriers, previous, kv, CFG)
    return ticket, count


@gluon.jit
def produce_tiles(q_desc, k_desc, v_desc, ends_desc, shared, barriers, problem, pointers, CFG: gl.constexpr):
    """Load the tiles of this program; see `produce_ahead`."""
    BN: gl.constexpr = CFG.tiles.block_n
    STAGES: gl.constexpr = CFG.tiles.num_stages
    count = 0
    kv = 0
    ticket = gl.program_id(0)
    while ticket < problem.num_tiles:
        tile = decode(ticket, problem, pointers, 0, CFG.tiles.rows, CFG)
        publish(ticket, tile.row, tile.num_blocks, count, shared, barriers, CFG)
        head_kv = tile.head // problem.heads_per_kv
        if CFG.mask == "ends":
            kv = walk_stretches(
                q_desc, k_desc, v_desc, ends_desc, shared, barriers, pointers, tile, head_kv, kv, count, CFG
            )
        elif CFG.tiles.joint:
            if tile.num_blocks > 0:
                kv = load_joint(q_desc, k_desc, v_desc, shared, barriers, tile, head_kv, kv, count, CFG)
        else:
            for i in range(tile.num_blocks):
                index, phase = slot(kv, STAGES)
                block = (tile.batch, head_kv, tile.key + (tile.num_blocks - 1 - i) * BN)
                mbarrier.wait(barriers.k_empty.index(index), phase ^ 1)
                load_block(q_desc, k_desc, v_desc, ends_desc, shared, barriers, tile, block, kv, count, i == 0, CFG)
                kv += 1
        if tile.num_blocks == 0:
            load_q(q_desc, shared, barriers, tile, count, CFG)
        count += 1
        ticket = gl.atomic_add(pointers.counter, 1) + gl.num_programs(0)
    return ticket, count


@gluon.jit
def produce(q_desc, k_desc, v_desc, ends_desc, shared, barriers, problem, pointers, CFG: gl.constexpr):
    """Producer warp: draw tiles from a counter that all programs share, load Q and fill the ring of K and V."""
    if CFG.ahead:
        ticket, count = produce_ahead(q_desc, k_desc, v_desc, ends_desc, shared, barriers, problem, pointers, CFG)
    else:
        ticket, count = produce_tiles(q_desc, k_desc, v_desc, ends_desc, shared, barriers, problem, pointers, CFG)
    publish(ticket, 0, 0, count, shared, barriers, CFG)
    if gl.atomic_add(pointers.counter + 1, 1) == gl.num_programs(0) - 1:  # the last program resets the counters
        gl.store(pointers.counter, 0)
        gl.store(pointers.counter + 1, 0)


# ----------------------------------------------------------------------------------------------------- consumers


@gluon.jit
def add_values(acc, p, v, CFG: gl.constexpr):
    """Issue O += P V. P is converted only here, because each 16-bit value carried in a loop costs a PRMT."""
    if p.dtype == gl.int32:
        p = columns_of(p, v[0].dtype)
    else:
        p = p.to(v[0].dtype)
    layout: gl.constexpr = gl.DotOperandLayout(0, CFG.acc_layouts[0], 2)
    first = warpgroup_mma(gl.convert_layout(p, layout), v[0], acc[0], is_async=True)
    if len(v) == 2:
        layout1: gl.constexpr = gl.DotOperandLayout(0, CFG.acc_layouts[1], 2)
        parts = (first, warpgroup_mma(gl.convert_layout(p, layout1), v[1], acc[1], is_async=True))
    else:
        parts = (first,)
    return parts


@gluon.jit
def wait_values(acc, CFG: gl.constexpr):
    """Wait until no product is in flight and return O."""
    if len(acc) == 2:
        parts = warpgroup_mma_wait(0, deps=(acc[0], acc[1]))
    else:
        parts = (warpgroup_mma_wait(0, deps=(acc[0],)),)
    return parts


@gluon.jit
def seen_scores(s, index, key, rows, shared, barriers, pointers, MASKED: gl.constexpr, CFG: gl.constexpr):
    """Release slot `index` of the ring of K, and return S with -inf for keys that the row does not see."""
    if MASKED and CFG.mask == "ends":  # the ends are in the slot
        s = hide(s, index, key, rows, shared, pointers, CFG)
    mbarrier.arrive(barriers.k_empty.index(index), count=1)
    if MASKED and CFG.mask != "ends":
        s = hide(s, index, key, rows, shared, pointers, CFG)
    return s


@gluon.jit
def subtrahend(s, row_max, rows, MASKED: gl.constexpr, CFG: gl.constexpr):
    """Return three numbers for each row, in units of scaled S to base 2.

    new_max: the new m. It is at most SLACK below the row's maximum, and rarely changes after the first blocks. So O is
        rarely rescaled.
    finite_max: m, or 0 if m is -inf: subtracted from S.
    alpha: 2^(old m - finite_max), by which O and l are multiplied.
    """
    SLACK: gl.constexpr = 8.0  # P is then at most 2^8, at which neither P nor l loses bits
    if CFG.tiles.block_n == 128:
        block_max = over_lanes(maxima_of_rows(s, CFG.tiles.block_n // 2), CFG)
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
def softmax(s, row_max, row_sum, rows, MASKED: gl.constexpr, CFG: gl.constexpr):
    """Return P = exp(S - m), the new m, the sums of P that each lane has, and the factor of O (`subtrahend`)."""
    row_max, subtracted, alpha = subtrahend(s, row_max, rows, MASKED, CFG)
    p, row_sum = exponentials(s, subtracted, alpha, row_sum, rows, CFG)
    return p, row_max, row_sum, alpha


@gluon.jit
def exponentials(s, subtracted, alpha, row_sum, rows, CFG: gl.constexpr):
    """Return P and the lanes' sums, from the results of `subtrahend`."""
    p = gl.exp2(s * rows.scale - subtracted[:, None])
    return p, times_rows(row_sum, alpha) + lane_sums(p, CFG)


@gluon.jit
def times_rows(lanes, factor):
    """Return the lanes' sums times the factor of each row."""
    layout: gl.constexpr = gl.SliceLayout(1, lanes.type.layout)
    return lanes * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def normalizer(row_sum, row_max, rows, CFG: gl.constexpr):
    """Return 1 / l and lse of every row, from the lanes' sums; NaN stays NaN."""
    S_LAYOUT: gl.constexpr = CFG.score_layout
    LN2: gl.constexpr = 0.6931471805599453
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, S_LAYOUT))
    inverse = gl.where(row_sum == 0, 0.0, 1.0 / row_sum)
    return inverse, gl.where(row_sum == 0, float("-inf"), row_max * LN2 + gl.log(row_sum))


@gluon.jit
def step_overlapped(
    acc, p, alpha, row_max, row_sum, kv, i, key, tile, rows, shared, barriers, pointers,
    MASKED: gl.constexpr, W: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Issue S of block i, at `key`, and O += P V of the previous one together, then compute the softmax of block i."""
    STAGES: gl.constexpr = CFG.tiles.num_stages
    index, phase = slot(kv, STAGES)
    next_index, _ = slot(kv + 1, STAGES)
    take_turn(kv, W, CFG)
    s = scores(own_q(shared, W, CFG), matrices(tiles_at(shared.k, next_index, CFG), CFG), CFG)
    if CFG.tiles.rescale_late:
        acc = rescaled(acc, alpha, CFG)
    mbarrier.wait(barriers.v_full.index(index), phase)
    acc = add_values(acc, p, matrices(tiles_at(shared.v, index, CFG), CFG), CFG)
    s = warpgroup_mma_wait(len(CFG.tiles.value_parts), deps=(s,))
    pass_turn(kv, W, CFG)
    s = seen_scores(s, next_index, key, rows, shared, barriers, pointers, MASKED, CFG)
    p, row_max, row_sum, alpha = softmax(s, row_max, row_sum, rows, MASKED, CFG)
    # This wait ends the basic block, or ptxas would hoist the wait for P V above the softmax.
    after_index, after_phase = slot(kv + 2, STAGES)
    mbarrier.wait(barriers.k_full.index(after_index), after_phase, pred=i + 1 < tile.num_blocks)
    acc = wait_values(acc, CFG)
    mbarrier.arrive(barriers.v_empty.index(index), count=1)
    if not CFG.tiles.rescale_late:
        acc = rescaled(acc, alpha, CFG)
    return acc, p, alpha, row_max, row_sum, kv + 1


@gluon.jit
def attend_overlapped(rows, q_empty, tile, kv, shared, barriers, pointers, W: gl.constexpr, CFG: gl.constexpr):
    """Return O (not yet divided), 1 / l and lse of a tile, and the next use of the ring; softmax under products."""
    STAGES: gl.constexpr = CFG.tiles.num_stages
    n = tile.num_blocks
    acc, row_max, row_sum = nothing_yet(CFG)
    index, phase = slot(kv, STAGES)
    mbarrier.wait(barriers.k_full.index(index), phase)
    s = warpgroup_mma_wait(0, deps=(scores(own_q(shared, W, CFG), matrices(tiles_at(shared.k, index, CFG), CFG), CFG),))
    if CFG.mask == "ends":
        end, num_masked, num_full = stretch_at(index, shared)
        key = end - CFG.tiles.block_n
    else:
        key = key_of(tile, 0, CFG)
    s = seen_scores(s, index, key, rows, shared, barriers, pointers, CFG.mask != "none", CFG)
    if CFG.mask == "none":
        if tile.end_full < n:
            s = hide(s, index, key, rows, shared, pointers, CFG)
    p, row_max, row_sum, alpha = softmax(s, row_max, row_sum, rows, CFG.mask != "none", CFG)
    index, phase = slot(kv + 1, STAGES)
    mbarrier.wait(barriers.k_full.index(index), phase, pred=n > 1)
    if CFG.mask == "ends":
        i = 1
        end -= CFG.tiles.block_n  # the first block is done
        num_full = gl.where(num_masked == 0, num_full - 1, num_full)
        num_masked = gl.maximum(num_masked - 1, 0)
        while i < n:
            for j in range(num_masked):
                key = end - (1 + j) * CFG.tiles.block_n
                acc, p, alpha, row_max, row_sum, kv = step_overlapped(
                    acc, p, alpha, row_max, row_sum, kv, i, key, tile, rows, shared, barriers, pointers, True, W, CFG
                )
                i += 1
            for _ in range(num_full):
                acc, p, alpha, row_max, row_sum, kv = step_overlapped(
                    acc, p, alpha, row_max, row_sum, kv, i, 0, tile, rows, shared, barriers, pointers, False, W, CFG
                )
                i += 1
            if i < n:
                index, _ = slot(kv + 1, STAGES)
                end, num_masked, num_full = stretch_at(index, shared)
    else:
        first = gl.maximum(n - tile.end_full, 1)
        last = gl.maximum(n - tile.first_full, first)
        if CFG.mask != "none":
            for i in range(1, first):
                acc, p, alpha, row_max, row_sum, kv = step_overlapped(
                    acc, p, alpha, row_max, row_sum, kv, i, key_of(tile, i, CFG), tile, rows, shared, barriers,
                    pointers,
                    True, W, CFG,
                )  # fmt: skip
        for i in range(first, last):
            acc, p, alpha, row_max, row_sum, kv = step_overlapped(
                acc, p, alpha, row_max, row_sum, kv, i, key_of(tile, i, CFG), tile, rows, shared, barriers, pointers,
                False, W, CFG,
            )  # fmt: skip
        if CFG.mask != "none":
            for i in range(last, n):
                acc, p, alpha, row_max, row_sum, kv = step_overlapped(
                    acc, p, alpha, row_max, row_sum, kv, i, key_of(tile, i, CFG), tile, rows, shared, barriers,
                    pointers,
                    True, W, CFG,
                )  # fmt: skip
    if not CFG.tiles.stage_in_q:
        mbarrier.arrive(q_empty, count=1)
    index, phase = slot(kv, STAGES)
    if CFG.tiles.rescale_late:
        acc = rescaled(acc, alpha, CFG)
    mbarrier.wait(barriers.v_full.index(index), phase)
    acc = add_values(acc, p, matrices(tiles_at(shared.v, index, CFG), CFG), CFG)
    inverse, lse = normalizer(row_sum, row_max, rows, CFG)
    acc = wait_values(acc, CFG)
    mbarrier.arrive(barriers.v_empty.index(index), count=1)
    return acc, inverse, lse, kv + 1


@gluon.jit
def step_in_sequence(
    acc, row_max, row_sum, kv, key, rows, shared, barriers, pointers,
    MASKED: gl.constexpr, W: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Process the block at `key` from S to O += P V, while the other warpgroups' products run."""
    if CFG.tiles.halves:
        return step_in_halves(acc, row_max, row_sum, kv, key, rows, shared, barriers, pointers, MASKED, W, CFG)
    index, phase = slot(kv, CFG.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(index), phase)
    s = warpgroup_mma_wait(0, deps=(scores(own_q(shared, W, CFG), matrices(tiles_at(shared.k, index, CFG), CFG), CFG),))
    s = seen_scores(s, index, key, rows, shared, barriers, pointers, MASKED, CFG)
    p, row_max, row_sum, alpha = softmax(s, row_max, row_sum, rows, MASKED, CFG)
    acc = rescaled(acc, alpha, CFG)
    mbarrier.wait(barriers.v_full.index(index), phase)
    acc = wait_values(add_values(acc, p, matrices(tiles_at(shared.v, index, CFG), CFG), CFG), CFG)
    mbarrier.arrive(barriers.v_empty.index(index), count=1)
    return acc, row_max, row_sum, kv + 1


@gluon.jit
def step_in_halves(
    acc, row_max, row_sum, kv, key, rows, shared, barriers, pointers,
    MASKED: gl.constexpr, W: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Process the block at `key` from S to O += P V, the left keys' part under the exponentials of the right keys."""
    index, phase = slot(kv, CFG.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(index), phase)
    s = warpgroup_mma_wait(0, deps=(scores(own_q(shared, W, CFG), matrices(tiles_at(shared.k, index, CFG), CFG), CFG),))
    if MASKED:
        s = hide(s, index, key, rows, shared, pointers, CFG)
    row_max, subtracted, alpha = subtrahend(s, row_max, rows, MASKED, CFG)
    subtracted = gl.convert_layout(subtracted, gl.SliceLayout(1, CFG.half_layout), assert_trivial=True)[:, None]
    acc = rescaled(acc, alpha, CFG)
    row_sum = times_rows(row_sum, alpha)
    v = matrices(tiles_at(shared.v, index, CFG), CFG)
    halves = s.reshape([CFG.tiles.block_m, 2, CFG.tiles.block_n // 2]).permute([0, 2, 1]).split()
    for half in gl.static_range(2):
        p = gl.convert_layout(halves[half], CFG.half_layout, assert_trivial=True)
        p = gl.exp2(p * rows.scale - subtracted)
        row_sum += gl.convert_layout(lane_sums(p, CFG), row_sum.type.layout, assert_trivial=True)
        acc = add_values(acc, p, half_of_keys(v, half, CFG), CFG)
    acc = wait_values(acc, CFG)
    mbarrier.arrive(barriers.v_empty.index(index), count=1)
    return acc, row_max, row_sum, kv + 1


@gluon.jit
def half_of_keys(v, HALF: gl.constexpr, CFG: gl.constexpr):
    """Return the rows of V of the left or right half of a block's keys."""
    N: gl.constexpr = CFG.tiles.block_n // 2
    first = v[0].slice(HALF * N, N, dim=0)
    if len(v) == 2:
        parts = (first, v[1].slice(HALF * N, N, dim=0))
    else:
        parts = (first,)
    return parts


@gluon.jit
def attend_in_sequence(rows, q_empty, tile, kv, shared, barriers, pointers, W: gl.constexpr, CFG: gl.constexpr):
    """Like `attend_overlapped`, without overlap inside the warpgroup: takes the fewest registers."""
    n = tile.num_blocks
    acc, row_max, row_sum = nothing_yet(CFG)
    if CFG.mask == "ends":
        left = n
        while left > 0:
            index, phase = slot(kv, CFG.tiles.num_stages)
            mbarrier.wait(barriers.k_full.index(index), phase)
            end, num_masked, num_full = stretch_at(index, shared)
            left -= num_masked + num_full
            for j in range(num_masked):
                key = end - (1 + j) * CFG.tiles.block_n
                acc, row_max, row_sum, kv = step_in_sequence(acc, row_max, row_sum, kv, key, rows, shared, barriers,
                                                             pointers, True, W, CFG)  # fmt: skip
            for _ in range(num_full):
                acc, row_max, row_sum, kv = step_in_sequence(acc, row_max, row_sum, kv, 0, rows, shared, barriers,
                                                             pointers, False, W, CFG)  # fmt: skip
    else:
        if CFG.is_band:
            for _ in range(n - tile.end_seen):
                kv = pass_block(kv, shared, barriers, CFG)
        for i in range(n - tile.end_seen, n - tile.end_full):
            acc, row_max, row_sum, kv = step_in_sequence(acc, row_max, row_sum, kv, key_of(tile, i, CFG), rows, shared,
                                                         barriers, pointers, True, W, CFG)  # fmt: skip
        for i in range(n - tile.end_full, n - tile.first_full):
            acc, row_max, row_sum, kv = step_in_sequence(acc, row_max, row_sum, kv, key_of(tile, i, CFG), rows, shared,
                                                         barriers, pointers, False, W, CFG)  # fmt: skip
        if CFG.mask != "none":
            for i in range(n - tile.first_full, n - tile.first_seen):
                acc, row_max, row_sum, kv = step_in_sequence(acc, row_max, row_sum, kv, key_of(tile, i, CFG), rows,
                                                             shared, barriers, pointers, True, W, CFG)  # fmt: skip
        if CFG.is_band:
            for _ in range(tile.first_seen):
                kv = pass_block(kv, shared, barriers, CFG)
    if not CFG.tiles.stage_in_q:
        mbarrier.arrive(q_empty, count=1)
    inverse, lse = normalizer(row_sum, row_max, rows, CFG)
    return acc, inverse, lse, kv


@gluon.jit
def lse_of(tile, problem, pointers):
    """Return where lse of a tile's head begins."""
    batch, head = tile.batch.to(gl.int64), tile.head.to(gl.int64)
    return pointers.lse + batch * problem.lse_stride_b + head * problem.lse_stride_h


@gluon.jit
def tile_again(ticket, problem, pointers, W: gl.constexpr, CFG: gl.constexpr):
    """Return tile and rows of a ticket, computed again here, so that they need no registers before."""
    tile = received_tile(hidden(ticket), 0, 0, problem, pointers, W, CFG)
    row = own_row(tile.row, W, CFG)
    row_index = row + gl.arange(0, CFG.tiles.block_m, layout=gl.SliceLayout(1, CFG.score_layout))
    start, stop = visible_keys(row_index, problem, pointers, CFG)
    return tile, QueryRows(start, stop, problem.scale, row)


@gluon.jit
def pass_stage(kv, shared, barriers, CFG: gl.constexpr):
    """Release stage `kv`, of which the warpgroup reads nothing more."""
    index, phase = slot(kv, CFG.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(index), phase)
    mbarrier.arrive(barriers.k_empty.index(index), count=1)
    return kv + 1


@gluon.jit
def leave_block(kv, shared, barriers, W: gl.constexpr, CFG: gl.constexpr):
    """Pass the stage with K of a block that none of the warpgroup's rows sees, and a turn."""
    take_turn(kv, W, CFG)
    pass_turn(kv, W, CFG)
    return pass_stage(kv, shared, barriers, CFG)


@gluon.jit
def weights_alone(
    kv, row_max, row_sum, key, rows, shared, barriers, pointers,
    MASKED: gl.constexpr, W: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Return the softmax of the block at `key`, whose K is in stage `kv`, and release the stage."""
    index, phase = slot(kv, CFG.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(index), phase)
    take_turn(kv, W, CFG)
    s = scores(own_q(shared, W, CFG), matrices(tiles_at(shared.k, index, CFG), CFG), CFG)
    pass_turn(kv, W, CFG)
    s = seen_scores(warpgroup_mma_wait(0, deps=(s,)), index, key, rows, shared, barriers, pointers, MASKED, CFG)
    return softmax(s, row_max, row_sum, rows, MASKED, CFG)


@gluon.jit
def values_alone(acc, p, kv, shared, barriers, CFG: gl.constexpr):
    """Return O + P V of the block whose V is in stage `kv`. The stage also holds K of the next block, so it is kept."""
    index, phase = slot(kv, CFG.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(index), phase)
    return wait_values(add_values(acc, p, matrices(tiles_at(shared.v, index, CFG), CFG), CFG), CFG)


@gluon.jit
def masked_blocks(
    acc, row_max, row_sum, kv, tile, first, stop, rows, shared, barriers, pointers, W: gl.constexpr, CFG: gl.constexpr
):  # fmt: skip
    """Process the blocks [first, stop) of the walk, one product at a time."""
    for i in range(first, stop):
        p, row_max, row_sum, alpha = weights_alone(kv, row_max, row_sum, key_of(tile, i, CFG), rows, shared, barriers,
                                                   pointers, True, W, CFG)  # fmt: skip
        kv += 1
        acc = values_alone(rescaled(acc, alpha, CFG), p, kv, shared, barriers, CFG)
    return acc, row_max, row_sum, kv


@gluon.jit
def step_joint(acc, p, row_max, row_sum, kv, rows, shared, barriers, W: gl.constexpr, CFG: gl.constexpr):
    """Issue O += P V of a block and S of the next one together, whose operands are in stage `kv`; return the next P.

    The exponentials need not run under the warpgroup's own products: those of the others run at that time.

    Args:
        p: P as pairs of columns, because each 16-bit value that a loop carries costs a PRMT.
    """
    index, _ = slot(kv, CFG.tiles.num_stages)
    take_turn(kv, W, CFG)
    s = scores(own_q(shared, W, CFG), matrices(tiles_at(shared.k, index, CFG), CFG), CFG)
    acc = add_values(acc, p, matrices(tiles_at(shared.v, index, CFG), CFG), CFG)
    pass_turn(kv, W, CFG)
    s = warpgroup_mma_wait(len(CFG.tiles.value_parts), deps=(s,))
    row_max, subtracted, alpha = subtrahend(s, row_max, rows, False, CFG)
    # This wait ends the basic block, or ptxas would hoist the wait for P V above the maxima.
    next_index, next_phase = slot(kv + 1, CFG.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(next_index), next_phase)
    acc = wait_values(acc, CFG)
    mbarrier.arrive(barriers.k_empty.index(index), count=1)
    p, row_sum = exponentials(s, subtracted, alpha, row_sum, rows, CFG)
    return rescaled(acc, alpha, CFG), pairs_of(p, shared.v[0].dtype), row_max, row_sum, kv + 1


@gluon.jit
def attend_joint(
    rows, q_empty, tile, ticket, kv, shared, barriers, problem, pointers, W: gl.constexpr, CFG: gl.constexpr
):  # fmt: skip
    """Like `attend_overlapped`, by `step_joint` where nothing is masked. Returns the tile as well.

    Every consumer takes a turn for each block of the tile.
    """
    n = tile.num_blocks
    acc, row_max, row_sum = nothing_yet(CFG)
    for _ in range(n - tile.end_seen):
        kv = leave_block(kv, shared, barriers, W, CFG)
    acc, row_max, row_sum, kv = masked_blocks(acc, row_max, row_sum, kv, tile, n - tile.end_seen, n - tile.end_full,
                                              rows, shared, barriers, pointers, W, CFG)  # fmt: skip
    num_full = tile.end_full - tile.first_full
    if num_full > 0:
        p, row_max, row_sum, alpha = weights_alone(kv, row_max, row_sum, 0, rows, shared, barriers, pointers, False,
                                                   W, CFG)  # fmt: skip
        p = pairs_of(p, shared.v[0].dtype)
        acc = rescaled(acc, alpha, CFG)
        kv += 1
        index, phase = slot(kv, CFG.tiles.num_stages)
        mbarrier.wait(barriers.k_full.index(index), phase)
        for _ in range(num_full - 1):
            acc, p, row_max, row_sum, kv = step_joint(acc, p, row_max, row_sum, kv, rows, shared, barriers, W, CFG)
        acc = values_alone(acc, p, kv, shared, barriers, CFG)
    tile, rows = tile_again(ticket, problem, pointers, W, CFG)
    if CFG.mask != "none":
        first, stop = tile.num_blocks - tile.first_full, tile.num_blocks - tile.first_seen
        acc, row_max, row_sum, kv = masked_blocks(acc, row_max, row_sum, kv, tile, first, stop, rows, shared, barriers,
                                                  pointers, W, CFG)  # fmt: skip
        for _ in range(tile.first_seen):
            kv = leave_block(kv, shared, barriers, W, CFG)
    kv = pass_stage(kv, shared, barriers, CFG)
    mbarrier.arrive(q_empty, count=1)
    inverse, lse = normalizer(row_sum, row_max, rows, CFG)
    return acc, inverse, lse, kv, tile


@gluon.jit
def consume(o_desc, acc_desc, shared, barriers, problem, pointers, W: gl.constexpr, CFG: gl.constexpr):
    """Consumer warpgroup W: attend for rows [W * block_m, (W + 1) * block_m) of every tile."""
    row_layout: gl.constexpr = gl.SliceLayout(1, CFG.score_layout)
    count = 0
    kv = 0
    loads = 0
    if W == CFG.tiles.num_warpgroups - 1:
        pass_turn(kv, W, CFG)
    ticket, row, num_blocks = receive(count, shared, barriers, CFG)
    while ticket < problem.num_tiles:
        tile = received_tile(ticket, row, num_blocks, problem, pointers, W, CFG)
        row = own_row(tile.row, W, CFG)
        row_index = row + gl.arange(0, CFG.tiles.block_m, layout=row_layout)
        lse_of_head = lse_of(tile, problem, pointers)
        start, stop = visible_keys(row_index, problem, pointers, CFG)
        if CFG.resume:
            old_lse = gl.load(lse_of_head + row_index, mask=row_index < problem.seqlen_q, other=float("-inf"))
            if not CFG.tiles.stage_in_q:
                load_state(acc_desc, shared, barriers.acc_full.index(W), tile, row, W, 0, CFG)
        q_empty = barriers.q_empty.index(W)
        rows = QueryRows(start, stop, problem.scale, row)
        mbarrier.wait(barriers.q_full.index(W), count & 1)
        if tile.num_blocks == 0:
            acc, factor, lse, kv = attend_nothing(q_empty, kv, CFG)
        elif CFG.tiles.joint:
            acc, factor, lse, kv, tile = attend_joint(rows, q_empty, tile, ticket, kv, shared, barriers, problem,
                                                      pointers, W, CFG)  # fmt: skip
        elif CFG.tiles.schedule == "overlap":
            acc, factor, lse, kv = attend_overlapped(rows, q_empty, tile, kv, shared, barriers, pointers, W, CFG)
        else:
            acc, factor, lse, kv = attend_in_sequence(rows, q_empty, tile, kv, shared, barriers, pointers, W, CFG)
        if CFG.tiles.joint:
            row = own_row(tile.row, W, CFG)
            lse_of_head = lse_of(tile, problem, pointers)
        if CFG.resume:
            lse, weight, old_weight = merge_weights(lse, old_lse)
            factor = factor * weight
        else:
            old_weight = factor
        acc = scaled(acc, factor, CFG)
        # Computed again: a short live range saves registers.
        row_index = row + gl.arange(0, CFG.tiles.block_m, layout=row_layout)
        gl.store(lse_of_head + row_index, lse, mask=row_index < problem.seqlen_q)
        loads = store_part(acc[0], o_desc, acc_desc, shared, barriers, tile, row, loads, old_weight, W, 0, CFG)
        if len(CFG.tiles.value_parts) == 2:
            loads = store_part(acc[1], o_desc, acc_desc, shared, barriers, tile, row, loads, old_weight, W, 1, CFG)
        if CFG.tiles.stage_in_q:
            tma_store_wait(0)
            mbarrier.arrive(q_empty, count=1)
        count += 1
        ticket, row, num_blocks = receive(count, shared, barriers, CFG)
    if W == 0:
        take_turn(kv, W, CFG)  # so that no barrier is left half full
    tma_store_wait(0)


# -------------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def value_pair(first, second, CFG: gl.constexpr):
    """Return the descriptors of the parts of a head of v, out or acc."""
    if CFG.tiles.narrow:
        parts = (first,)
    else:
        parts = pair(first, second, CFG)
    return parts


@gluon.jit
def allocate(q_desc, k_desc, v_desc, o_desc, acc_desc, ends_desc, CFG: gl.constexpr):
    """Allocate the shared memory of a program."""
    WARPGROUPS: gl.constexpr = CFG.tiles.num_warpgroups
    box: gl.constexpr = [WARPGROUPS] + acc_desc[0].block_shape
    if CFG.tiles.stage_in_q:
        STATE_LAYOUT: gl.constexpr = CFG.state_layout
        stage = gl.allocate_shared_memory(gl.float32, box, STATE_LAYOUT)
        q = reinterpret(stage, q_desc[0].dtype, [2 * WARPGROUPS] + q_desc[0].block_shape, q_desc[0].layout)
        if CFG.tiles.parts[0] == CFG.tiles.parts[1]:
            q_ring = (q, q)
        else:
            RATIO: gl.constexpr = CFG.tiles.parts[0] // CFG.tiles.parts[1]
            box1: gl.constexpr = [2 * WARPGROUPS * RATIO] + q_desc[1].block_shape
            q_ring = (q, reinterpret(stage, q_desc[1].dtype, box1, q_desc[1].layout))
    else:
        stage_dtype: gl.constexpr = gl.float32 if CFG.resume else o_desc[0].dtype
        stage = gl.allocate_shared_memory(stage_dtype, box, acc_desc[0].layout)
        q_ring = ring_of(q_desc, WARPGROUPS, CFG)
    k_ring = ring_of(k_desc, CFG.tiles.num_stages, CFG)
    v_ring = ring_of(v_desc, CFG.tiles.num_stages, CFG)
    ticket = tickets(CFG)
    if CFG.mask == "ends":
        ends = gl.allocate_shared_memory(gl.int32, [CFG.tiles.num_stages] + ends_desc.block_shape, ends_desc.layout)
    else:
        ends = 0
    return Shared(q_ring, k_ring, v_ring, stage, ticket, ends)


@gluon.jit(
    do_not_specialize=[
        "lse", "start", "stop", "table", "stretches", "counter", "seqlen_q", "seqlen_k", "num_heads", "heads_per_kv",
        "heads_per_group", "heads_at_last", "num_row_tiles", "num_tiles", "lower", "upper", "split", "jump",
        "lse_stride_b", "lse_stride_h",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, acc_desc,  # first part of the head
    q_desc1, k_desc1, v_desc1, o_desc1, acc_desc1,  # second part, if its width differs
    ends_desc, lse, start, stop, table, stretches, counter,
    seqlen_q, seqlen_k, num_heads, heads_per_kv, heads_per_group, heads_at_last, num_row_tiles, num_tiles, lower, upper,
    split, jump, lse_stride_b, lse_stride_h, scale,
    CFG: gl.constexpr,
):  # fmt: skip
    """Attention forward; see the module docstring."""
    problem = Problem(seqlen_q, seqlen_k, num_heads, heads_per_kv, heads_per_group, heads_at_last, num_row_tiles,
                      num_tiles, lower, upper, split, jump, lse_stride_b, lse_stride_h, scale)  # fmt: skip
    pointers = Pointers(lse, start, stop, None, table, stretches, counter)
    q = pair(q_desc, q_desc1, CFG)
    k = pair(k_desc, k_desc1, CFG)
    v = value_pair(v_desc, v_desc1, CFG)
    o = value_pair(o_desc, o_desc1, CFG)
    acc = value_pair(acc_desc, acc_desc1, CFG)
    shared = allocate(q, k, v, o, acc, ends_desc, CFG)
    barriers = make_barriers(CFG)
    if CFG.tiles.num_warpgroups == 2:
        gl.warp_specialize([
            (consume, (o, acc, shared, barriers, problem, pointers, 0, CFG)),
            (consume, (o, acc, shared, barriers, problem, pointers, 1, CFG)),
            (produce, (q, k, v, ends_desc, shared, barriers, problem, pointers, CFG)),
        ], [4, 1], [CFG.tiles.consumer_registers, CFG.tiles.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (o, acc, shared, barriers, problem, pointers, 0, CFG)),
            (consume, (o, acc, shared, barriers, problem, pointers, 1, CFG)),
            (consume, (o, acc, shared, barriers, problem, pointers, 2, CFG)),
            (produce, (q, k, v, ends_desc, shared, barriers, problem, pointers, CFG)),
        ], [4, 4, 1], [CFG.tiles.consumer_registers, CFG.tiles.consumer_registers,
        CFG.tiles.producer_registers])  # fmt: skip
