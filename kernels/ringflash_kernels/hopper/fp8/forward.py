"""FP8 attention forward for compute capability 9.0, on the frame that it shares with the bf16 forward
(`hopper.pipeline`).

Q (64 rows), K and V (records of 128 keys) are e4m3, P too; scores, O and the softmax are fp32. What differs from bf16:

    scales     those of Q and K multiply the scores, that of V multiplies P V of a block
    P          is relative to the largest score of its row in the block: P' = 2^(s - m + OFFSET), rounded by its
               logarithm. The bits of P' are then linear in s: a multiplication and a conversion, no exponential.
    O          is relative to a *reference* of its row: the largest score of the blocks so far, or up to `slack` less
    row sums   sums of the rounded P', by tensor cores: a product with ones
    P V        V is stored transposed, with each 16 keys in an order in which the registers of S hold the operand.
               Tensor cores sum e4m3 products with 13 bits of significand: of a million equal keys they would return
               1/64 of the sum. So they sum one block only, which is added to O in fp32.

`fp8_reference` is the specification.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash_kernels.api import device_guard
from ringflash_kernels.fp8_reference import BLOCK_K, BLOCK_Q, CENTRE, OFFSET, TAIL_BYTES, Rows
from ringflash_kernels.hopper.compat import (
    TensorDescriptor,
    e4m3_of_bits,
    fence_async_shared,
    gl,
    gluon,
    largest_of_rows,
    mbarrier,
    reinterpret,
    settled,
    tma_load,
    tma_store_wait,
    unfused_product,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ringflash_kernels.hopper.descriptors import block_descriptor, cut, tile_descriptor
from ringflash_kernels.hopper.forward.host import (
    LaunchArgs,
    bands_of,
    check_state,
    count_sms,
    heads_at_last,
    kv_heads_per_group,
    table_of,
    tile_counter,
    tile_table,
    write_unseen_rows,
)
from ringflash_kernels.hopper.fp8.tiles import FP8_TILES, Fp8Tiles
from ringflash_kernels.hopper.launcher import Launcher
from ringflash_kernels.hopper.pipeline import (
    Pointers,
    Problem,
    QueryRows,
    announce_stretch,
    attend_nothing,
    decode,
    hide,
    key_of,
    load_q,
    load_state,
    make_barriers,
    merge_weights,
    nothing_yet,
    over_lanes,
    own_q,
    pair,
    pass_block,
    pass_turn,
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
from ringflash_kernels.hopper.walks import has_begins, limits, walks
from ringflash_kernels.mask import Mask

_LN2 = math.log(2.0)
_OFFSET = gl.constexpr(OFFSET)
_TOP_BITS = gl.constexpr((8 * (OFFSET + 7) + CENTRE) * 2.0**-24)  # of P' = 2^OFFSET, as `e4m3_of_bits` takes them
_BITS_PER_OCTAVE = gl.constexpr(8 * 2.0**-24)
_TAIL = gl.constexpr(TAIL_BYTES // 4)  # numbers in the tail of a record


@dataclass(frozen=True)
class Fp8Variant:
    """Compile-time choices of the kernel; see `ForwardVariant`.

    Args:
        row_max: also store an upper bound of each row's scores.
        mask, resume, starts: as there.
    """

    tiles: Fp8Tiles
    mask: str
    resume: bool
    row_max: bool = False
    starts: bool = False
    heads = 1

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.tiles.rows

    @property
    def is_band(self) -> bool:
        """True if diagonals say which keys a row sees."""
        return self.mask in ("band", "bands")

    @property
    def ends_bytes(self) -> int:
        """Bytes of the ends that arrive with a record; at head_dim 256, fp32 results leave no room for them."""
        return 4 * self.tiles.block_n if self.mask == "ends" and not (self.resume and len(self.tiles.parts) == 2) else 0

    @property
    def slack(self) -> float:
        """Largest lag of the reference behind the largest score, in log2 units; small if it is stored as row_max."""
        return 1.0 if self.row_max else 16.0

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        """Registers that hold S and P of one warpgroup."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.tiles.block_n, 32])

    @property
    def sum_layout(self) -> gl.NVMMADistributedLayout:
        """Registers that hold the row sums of a block, in each of eight columns."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])

    @property
    def acc_layouts(self) -> tuple[gl.NVMMADistributedLayout, ...]:
        """Registers that hold O of one warpgroup, for each part of the head."""
        return tuple(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32]) for columns in self.tiles.parts)


class Fp8Shared(NamedTuple):
    """Shared memory as `Shared`, and the scales of K and V of each stage (tails), and ones in e4m3 for row sums."""

    q: tuple
    k: tuple
    v: tuple
    tails: object
    ones: object
    stage: object
    ticket: object
    ends: object


class WarpgroupRows(NamedTuple):
    """Query rows of a warpgroup: the first row, the factor of its scores, and the limits of the visible keys.

    Masked blocks compute the keys of each row again, because registers for them would be missing in all blocks.
    """

    first: int
    scale: float
    problem: Problem
    pointers: Pointers


class QScales(NamedTuple):
    """Scales of q, one for each block of rows, and the tensor for the largest score of each row, as lse."""

    first: int
    stride_b: int
    stride_h: int
    row_max: int


# ------------------------------------------------------------------------------------------------------ producer


@gluon.jit
def load_part(desc, tiles, full, batch, block, head, ROW: gl.constexpr, COLUMN: gl.constexpr, CFG: gl.constexpr):
    """Load K or V of a record. Its second part, if there is one, begins at (ROW, COLUMN)."""
    tma_load(desc, [batch, block, head, 0, 0], full, tiles[0])
    if len(CFG.tiles.parts) == 2:
        tma_load(desc, [batch, block, head, ROW, COLUMN], full, tiles[1])


@gluon.jit
def load_record(q_desc, k_desc, v_desc, tail_desc, ends_desc, shared, barriers, tile, head_kv, block, kv, count,
                is_first, CFG: gl.constexpr):  # fmt: skip
    """Load the next record, and Q after the first K, which need not wait for the previous tile's use of Q."""
    NUM_BYTES: gl.constexpr = len(CFG.tiles.parts) * k_desc.block_type.nbytes
    index, phase = slot(kv, CFG.tiles.num_stages)
    full = barriers.k_full.index(index)
    mbarrier.expect(full, NUM_BYTES + tail_desc.block_type.nbytes + CFG.ends_bytes)
    tma_load(tail_desc, [tile.batch, block, head_kv, 0], full, shared.tails.index(index))
    load_part(k_desc, tiles_at(shared.k, index, CFG), full, tile.batch, block, head_kv, 0, CFG.tiles.parts[0], CFG)
    if CFG.ends_bytes:
        tma_load(ends_desc, [0, block * CFG.tiles.block_n], full, shared.ends.index(index))
    if is_first:
        load_q(q_desc, shared, barriers, tile, count, CFG)
    mbarrier.wait(barriers.v_empty.index(index), phase ^ 1)
    full = barriers.v_full.index(index)
    mbarrier.expect(full, NUM_BYTES)
    load_part(v_desc, tiles_at(shared.v, index, CFG), full, tile.batch, block, head_kv, CFG.tiles.parts[0], 0, CFG)


@gluon.jit
def walk_stretches(q_desc, k_desc, v_desc, tail_desc, ends_desc, shared, barriers, pointers, tile, head_kv, kv, count,
                   CFG: gl.constexpr):  # fmt: skip
    """Load the records of a tile's stretches, last to first; with the first of each say what the stretch is."""
    for i in range(tile.num_stretches):
        entry = pointers.stretches + (tile.stretch - i) * 4
        begin = gl.load(entry)
        end = gl.load(entry + 1)
        masked = gl.load(entry + 2)
        for j in range(end - begin):
            index, phase = slot(kv, CFG.tiles.num_stages)
            mbarrier.wait(barriers.k_empty.index(index), phase ^ 1)
            if j == 0:
                announce_stretch(index, end * CFG.tiles.block_n, end - begin, masked, shared)
            load_record(q_desc, k_desc, v_desc, tail_desc, ends_desc, shared, barriers, tile, head_kv, end - 1 - j, kv,
                        count, i + j == 0, CFG)  # fmt: skip
            kv += 1
    return kv


@gluon.jit
def produce(q_desc, k_desc, v_desc, tail_desc, ends_desc, shared, barriers, problem, pointers, CFG: gl.constexpr):
    """Producer warp: draw tiles from a counter that all programs share, load Q and fill the ring of K and V."""
    STAGES: gl.constexpr = CFG.tiles.num_stages
    count = 0
    kv = 0
    ticket = gl.program_id(0)
    while ticket < problem.num_tiles:
        tile = decode(ticket, problem, pointers, 0, CFG.tiles.rows, CFG)
        publish(ticket, tile.row, tile.num_blocks, count, shared, barriers, CFG)
        head_kv = tile.head // problem.heads_per_kv
        if CFG.mask == "ends":
            kv = walk_stretches(q_desc, k_desc, v_desc, tail_desc, ends_desc, shared, barriers, pointers, tile, head_kv,
                                kv, count, CFG)  # fmt: skip
        else:
            for i in range(tile.num_blocks):
                index, phase = slot(kv, STAGES)
                block = block_of(tile, i, CFG)
                mbarrier.wait(barriers.k_empty.index(index), phase ^ 1)
                load_record(q_desc, k_desc, v_desc, tail_desc, ends_desc, shared, barriers, tile, head_kv, block, kv,
                            count, i == 0, CFG)  # fmt: skip
                kv += 1
        if tile.num_blocks == 0:
            load_q(q_desc, shared, barriers, tile, count, CFG)
        count += 1
        ticket = gl.atomic_add(pointers.counter, 1) + gl.num_programs(0)
    publish(ticket, 0, 0, count, shared, barriers, CFG)
    if gl.atomic_add(pointers.counter + 1, 1) == gl.num_programs(0) - 1:  # the last program resets the counters
        gl.store(pointers.counter, 0)
        gl.store(pointers.counter + 1, 0)


# ----------------------------------------------------------------------------------------------------- consumers


@gluon.jit
def block_of(tile, i, CFG: gl.constexpr):
    """Return the record that holds the i-th block of the walk."""
    return tile.key // CFG.tiles.block_n + tile.num_blocks - 1 - i


@gluon.jit
def record_matrices(tiles, CFG: gl.constexpr):
    """View the tile of each part of a record as the (rows, columns) matrix that wgmma reads."""
    first = tiles[0].reshape([tiles[0].shape[3], tiles[0].shape[4]])
    if len(CFG.tiles.parts) == 2:
        parts = (first, tiles[1].reshape([tiles[1].shape[3], tiles[1].shape[4]]))
    else:
        parts = (first,)
    return parts


@gluon.jit
def scale_of(tails, index, WHICH: gl.constexpr):
    """Return the scale of K (0) or V (1) of a block, from the tail of its record."""
    numbers = reinterpret(tails.index(index), gl.float32, [_TAIL, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return gl.max(numbers.index(WHICH).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def hidden(s, index, key, rows, shared, CFG: gl.constexpr):
    """Return S with -inf for keys that the row does not see; see `hide`."""
    BM: gl.constexpr = CFG.tiles.block_m
    own = rows.first + gl.arange(0, BM, layout=gl.SliceLayout(1, CFG.score_layout))
    start, stop = visible_keys(own, rows.problem, rows.pointers, CFG)
    return hide(s, index, key, QueryRows(start, stop, rows.scale, rows.first), shared, rows.pointers, CFG)


@gluon.jit
def largest(s, CFG: gl.constexpr):
    """Return the largest score of every row in the block, before scaling."""
    if CFG.tiles.max_of_three:
        result = over_lanes(largest_of_rows(s, CFG.tiles.block_n // 2), CFG)
    else:
        result = gl.max(s, 1)
    return result


@gluon.jit
def softmax(s, reference, factor, MASKED: gl.constexpr, CFG: gl.constexpr):
    """Return P' in the form of `e4m3_of_bits`, the new reference of O, and the factors of the previous O and of P' V.

    m is a row's largest score in this block, in log2 units. The reference may lag behind it by `slack`. So it rarely
    changes after the first blocks, and O is rarely rescaled.
    """
    SLACK: gl.constexpr = CFG.slack
    block_max = largest(s, CFG) * factor
    new = gl.where(block_max - reference > SLACK, block_max, reference)
    if MASKED:
        finite_max = gl.where(block_max == float("-inf"), 0.0, block_max)
        finite_new = gl.where(new == float("-inf"), 0.0, new)
    else:
        finite_max = block_max
        finite_new = new
    bits = s * (factor * _BITS_PER_OCTAVE) + (_TOP_BITS - finite_max * _BITS_PER_OCTAVE)[:, None]
    return bits, new, gl.exp2(reference - finite_new), gl.exp2(block_max - finite_new)


@gluon.jit
def normalizer(row_sum, reference, CFG: gl.constexpr):
    """Return 1 / l and lse of every row; NaN stays NaN."""
    S_LAYOUT: gl.constexpr = CFG.score_layout
    LN2: gl.constexpr = 0.6931471805599453
    row_sum = gl.convert_layout(gl.max(row_sum, 1), gl.SliceLayout(1, S_LAYOUT))
    inverse = gl.where(row_sum == 0, 0.0, 1.0 / row_sum)
    return inverse, gl.where(row_sum == 0, float("-inf"), (reference - _OFFSET) * LN2 + gl.log(row_sum))


@gluon.jit
def operand(bits, CFG: gl.constexpr):
    """Return P' as a register operand of wgmma. No data moves, because V's keys are stored in the matching order."""
    BM: gl.constexpr = CFG.tiles.block_m
    BN: gl.constexpr = CFG.tiles.block_n
    layout: gl.constexpr = gl.DotOperandLayout(0, CFG.acc_layouts[0], 4)
    bits = bits.reshape([BM, BN // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([BM, BN])
    return e4m3_of_bits(gl.convert_layout(bits, layout, assert_trivial=True))


@gluon.jit
def issue_values(p, v, PART: gl.constexpr, CFG: gl.constexpr):
    """Issue one part of P' V of a block."""
    BM: gl.constexpr = CFG.tiles.block_m
    columns: gl.constexpr = CFG.tiles.parts[PART]
    layout: gl.constexpr = CFG.acc_layouts[PART]
    zeros = gl.zeros([BM, columns], gl.float32, layout)
    return warpgroup_mma(p, v[PART].permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def issue_row_sums(p, ones, CFG: gl.constexpr):
    """Issue the row sums of P' of a block."""
    BM: gl.constexpr = CFG.tiles.block_m
    layout: gl.constexpr = CFG.sum_layout
    p = gl.convert_layout(p, gl.DotOperandLayout(0, layout, 4), assert_trivial=True)
    return warpgroup_mma(p, ones.permute((1, 0)), gl.zeros([BM, 8], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def add_block(acc, factor, product, PART: gl.constexpr, CFG: gl.constexpr):
    """Return one part of O, plus P' V of a block times the factor of each row."""
    layout: gl.constexpr = CFG.acc_layouts[PART]
    return acc[PART] + product * gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def per_lane(factor, row_sum):
    """Return the factor of each row in the layout of the row sums."""
    layout: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    return gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def add_values(acc, row_sum, beta, v_scale, bits, v, ones, CFG: gl.constexpr):
    """Compute O += P' V and the row sums, part by part, because registers hold the product of only one."""
    BM: gl.constexpr = CFG.tiles.block_m
    p = operand(bits, CFG)
    product, sums = warpgroup_mma_wait(0, deps=(issue_values(p, v, 0, CFG), issue_row_sums(p, ones, CFG)))
    sums, _ = sums.reshape([BM, 4, 2]).split()  # two equal columns in each of four lanes
    row_sum += gl.convert_layout(sums, row_sum.type.layout, assert_trivial=True) * per_lane(beta, row_sum)
    first = add_block(acc, beta * v_scale, product, 0, CFG)
    if len(CFG.tiles.parts) == 2:
        first = settled(first)
        product = warpgroup_mma_wait(0, deps=(issue_values(p, v, 1, CFG),))
        parts = (first, add_block(acc, beta * v_scale, product, 1, CFG))
    else:
        parts = (first,)
    return parts, row_sum


@gluon.jit
def leave_block(kv, shared, barriers, W: gl.constexpr, CFG: gl.constexpr):
    """Do `pass_block`, and pass the turn to the next warpgroup."""
    pass_turn(kv, W, CFG)
    kv = pass_block(kv, shared, barriers, CFG)
    take_turn(kv, W, CFG)
    return kv


@gluon.jit
def step(
    acc, reference, row_sum, kv, key, rows, shared, barriers, MASKED: gl.constexpr, W: gl.constexpr, CFG: gl.constexpr
):
    """Process the block at `key` from S to O += P' V, while the other warpgroups' products run."""
    index, phase = slot(kv, CFG.tiles.num_stages)
    mbarrier.wait(barriers.k_full.index(index), phase)
    s = scores(own_q(shared, W, CFG), record_matrices(tiles_at(shared.k, index, CFG), CFG), CFG)
    pass_turn(kv, W, CFG)
    factor = rows.scale * scale_of(shared.tails, index, 0)
    v_scale = scale_of(shared.tails, index, 1)
    s = warpgroup_mma_wait(0, deps=(s,))
    if MASKED and CFG.mask == "ends":  # the ends are in the slot
        s = hidden(s, index, key, rows, shared, CFG)
    mbarrier.arrive(barriers.k_empty.index(index), count=1)
    if MASKED and CFG.mask != "ends":
        s = hidden(s, index, key, rows, shared, CFG)
    bits, reference, alpha, beta = softmax(s, reference, factor, MASKED, CFG)
    acc = rescaled(acc, alpha, CFG)
    row_sum = unfused_product(row_sum, per_lane(alpha, row_sum))
    mbarrier.wait(barriers.v_full.index(index), phase)
    take_turn(kv, W, CFG)
    v = record_matrices(tiles_at(shared.v, index, CFG), CFG)
    acc, row_sum = add_values(acc, row_sum, beta, v_scale, bits, v, shared.ones, CFG)
    mbarrier.arrive(barriers.v_empty.index(index), count=1)
    return acc, reference, row_sum, kv + 1


@gluon.jit
def attend(rows, q_empty, tile, kv, shared, barriers, W: gl.constexpr, CFG: gl.constexpr):
    """Return O (not yet divided), 1 / l and lse of a tile, the next use of the ring, and the reference of each row."""
    n = tile.num_blocks
    acc, reference, row_sum = nothing_yet(CFG)
    take_turn(kv, W, CFG)
    if CFG.mask == "ends":
        left = n
        while left > 0:
            index, phase = slot(kv, CFG.tiles.num_stages)
            mbarrier.wait(barriers.k_full.index(index), phase)
            end, num_masked, num_full = stretch_at(index, shared)
            left -= num_masked + num_full
            for j in range(num_masked):
                key = end - (1 + j) * CFG.tiles.block_n
                acc, reference, row_sum, kv = step(
                    acc, reference, row_sum, kv, key, rows, shared, barriers, True, W, CFG
                )
            for _ in range(num_full):
                acc, reference, row_sum, kv = step(
                    acc, reference, row_sum, kv, 0, rows, shared, barriers, False, W, CFG
                )
    else:
        if CFG.is_band:
            for _ in range(n - tile.end_seen):
                kv = leave_block(kv, shared, barriers, W, CFG)
        for i in range(n - tile.end_seen, n - tile.end_full):
            acc, reference, row_sum, kv = step(acc, reference, row_sum, kv, key_of(tile, i, CFG), rows, shared,
            barriers,
                                               True, W, CFG)  # fmt: skip
        for i in range(n - tile.end_full, n - tile.first_full):
            acc, reference, row_sum, kv = step(acc, reference, row_sum, kv, key_of(tile, i, CFG), rows, shared,
            barriers,
                                               False, W, CFG)  # fmt: skip
        if CFG.mask != "none":
            for i in range(n - tile.first_full, n - tile.first_seen):
                acc, reference, row_sum, kv = step(acc, reference, row_sum, kv, key_of(tile, i, CFG), rows, shared,
                                                   barriers, True, W, CFG)  # fmt: skip
        if CFG.is_band:
            for _ in range(tile.first_seen):
                kv = leave_block(kv, shared, barriers, W, CFG)
    pass_turn(kv, W, CFG)
    mbarrier.arrive(q_empty, count=1)
    inverse, lse = normalizer(row_sum, reference, CFG)
    return acc, inverse, lse, kv, reference


@gluon.jit
def store_row_max(reference, row_index, batch, head, problem, q_scales, CFG: gl.constexpr):
    """Store an upper bound of each row's scores in natural units, or that of earlier calls if it is larger."""
    LN2: gl.constexpr = 0.6931471805599453
    at = q_scales.row_max + batch * problem.lse_stride_b + head * problem.lse_stride_h + row_index
    largest = (reference + CFG.slack) * LN2
    if CFG.resume:
        largest = gl.maximum(largest, gl.load(at, mask=row_index < problem.seqlen_q, other=0.0))
    gl.store(at, largest, mask=row_index < problem.seqlen_q)


@gluon.jit
def consume(o_desc, acc_desc, shared, barriers, problem, pointers, q_scales, W: gl.constexpr, CFG: gl.constexpr):
    """Consumer warpgroup W: attend for rows [W * block_m, (W + 1) * block_m) of every tile."""
    row_layout: gl.constexpr = gl.SliceLayout(1, CFG.score_layout)
    BM: gl.constexpr = CFG.tiles.block_m
    count = 0
    kv = 0
    loads = 0
    if W == CFG.tiles.num_warpgroups - 1:
        pass_turn(count, W, CFG)  # the first turn of all
    ticket, row, num_blocks = receive(count, shared, barriers, CFG)
    while ticket < problem.num_tiles:
        tile = received_tile(ticket, row, num_blocks, problem, pointers, W, CFG)
        row = tile.row + W * BM
        row_index = row + gl.arange(0, BM, layout=row_layout)
        batch, head = tile.batch.to(gl.int64), tile.head.to(gl.int64)
        lse_of_head = pointers.lse + batch * problem.lse_stride_b + head * problem.lse_stride_h
        if CFG.resume:
            old_lse = gl.load(lse_of_head + row_index, mask=row_index < problem.seqlen_q, other=float("-inf"))
            load_state(acc_desc, shared, barriers.acc_full.index(W), tile, row, W, 0, CFG)
        q_block = gl.minimum(row, problem.seqlen_q - 1) // BM
        q_scale = gl.load(q_scales.first + batch * q_scales.stride_b + head * q_scales.stride_h + q_block)
        q_empty = barriers.q_empty.index(W)
        rows = WarpgroupRows(row, q_scale * problem.scale, problem, pointers)
        mbarrier.wait(barriers.q_full.index(W), count & 1)
        if tile.num_blocks == 0:
            acc, factor, lse, kv = attend_nothing(q_empty, kv, CFG)
            reference = lse
        else:
            acc, factor, lse, kv, reference = attend(rows, q_empty, tile, kv, shared, barriers, W, CFG)
        if CFG.row_max:
            store_row_max(reference, row + gl.arange(0, BM, layout=row_layout), batch, head, problem, q_scales, CFG)
        if CFG.resume:
            lse, weight, old_weight = merge_weights(lse, old_lse)
            factor = factor * weight
        else:
            old_weight = factor
        acc = scaled(acc, factor, CFG)
        row_index = row + gl.arange(0, BM, layout=row_layout)  # recomputed: a short live range saves registers
        gl.store(lse_of_head + row_index, lse, mask=row_index < problem.seqlen_q)
        loads = store_part(acc[0], o_desc, acc_desc, shared, barriers, tile, row, loads, old_weight, W, 0, CFG)
        if len(CFG.tiles.parts) == 2:
            loads = store_part(acc[1], o_desc, acc_desc, shared, barriers, tile, row, loads, old_weight, W, 1, CFG)
        count += 1
        ticket, row, num_blocks = receive(count, shared, barriers, CFG)
    if W == 0:
        take_turn(count, W, CFG)  # so that no barrier is left half full
    tma_store_wait(0)


# -------------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def tile_of_ones(CFG: gl.constexpr):
    """Return ones, as bits, for row sums: ptxas 12.8 leaves half of the bytes undefined if it converts 1.0."""
    BN: gl.constexpr = CFG.tiles.block_n
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    registers: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(gl.float8e4nv, [8, BN], layout)
    ones.store(gl.full([8, BN], 0x38, gl.int8, registers).to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    return ones


@gluon.jit
def allocate(q_desc, k_desc, v_desc, tail_desc, acc_desc, o_desc, ends_desc, CFG: gl.constexpr):
    """Allocate the shared memory of a program."""
    WARPGROUPS: gl.constexpr = CFG.tiles.num_warpgroups
    STAGES: gl.constexpr = CFG.tiles.num_stages
    box: gl.constexpr = [WARPGROUPS] + acc_desc[0].block_shape
    stage_dtype: gl.constexpr = gl.float32 if CFG.resume else o_desc[0].dtype
    stage = gl.allocate_shared_memory(stage_dtype, box, acc_desc[0].layout)
    q_ring = ring_of(q_desc, WARPGROUPS, CFG)
    k_ring = ring_of(pair(k_desc, k_desc, CFG), STAGES, CFG)
    v_ring = ring_of(pair(v_desc, v_desc, CFG), STAGES, CFG)
    tails = gl.allocate_shared_memory(gl.float32, [STAGES] + tail_desc.block_shape, tail_desc.layout)
    ticket = tickets(CFG)
    if CFG.ends_bytes:
        ends = gl.allocate_shared_memory(gl.int32, [STAGES] + ends_desc.block_shape, ends_desc.layout)
    else:
        ends = 0
    return Fp8Shared(q_ring, k_ring, v_ring, tails, tile_of_ones(CFG), stage, ticket, ends)


@gluon.jit(
    do_not_specialize=[
        "lse", "start", "stop", "ends", "table", "stretches", "counter", "q_scales", "row_max", "seqlen_q", "seqlen_k",
        "num_heads", "heads_per_kv", "heads_per_group", "heads_at_last", "num_row_tiles", "num_tiles", "lower", "upper",
        "split", "jump", "lse_stride_b", "lse_stride_h", "q_stride_b", "q_stride_h",
    ]
)  # fmt: skip
def forward_fp8(
    q_desc, k_desc, v_desc, tail_desc, o_desc, acc_desc, ends_desc,
    lse, start, stop, ends, table, stretches, counter, q_scales, row_max,
    seqlen_q, seqlen_k, num_heads, heads_per_kv, heads_per_group, heads_at_last, num_row_tiles, num_tiles, lower, upper,
    split, jump, lse_stride_b, lse_stride_h, q_stride_b, q_stride_h, scale,
    CFG: gl.constexpr,
):  # fmt: skip
    """FP8 attention forward; see the module docstring."""
    problem = Problem(seqlen_q, seqlen_k, num_heads, heads_per_kv, heads_per_group, heads_at_last, num_row_tiles,
                      num_tiles, lower, upper, split, jump, lse_stride_b, lse_stride_h, scale)  # fmt: skip
    pointers = Pointers(lse, start, stop, ends, table, stretches, counter)
    q_scales = QScales(q_scales, q_stride_b, q_stride_h, row_max)
    q = pair(q_desc, q_desc, CFG)
    o = pair(o_desc, o_desc, CFG)
    acc = pair(acc_desc, acc_desc, CFG)
    shared = allocate(q, k_desc, v_desc, tail_desc, acc, o, ends_desc, CFG)
    barriers = make_barriers(CFG)
    if CFG.tiles.num_warpgroups == 2:
        gl.warp_specialize([
            (consume, (o, acc, shared, barriers, problem, pointers, q_scales, 0, CFG)),
            (consume, (o, acc, shared, barriers, problem, pointers, q_scales, 1, CFG)),
            (produce, (q, k_desc, v_desc, tail_desc, ends_desc, shared, barriers, problem, pointers, CFG)),
        ], [4, 1], [CFG.tiles.consumer_registers, CFG.tiles.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (o, acc, shared, barriers, problem, pointers, q_scales, 0, CFG)),
            (consume, (o, acc, shared, barriers, problem, pointers, q_scales, 1, CFG)),
            (consume, (o, acc, shared, barriers, problem, pointers, q_scales, 2, CFG)),
            (produce, (q, k_desc, v_desc, tail_desc, ends_desc, shared, barriers, problem, pointers, CFG)),
        ], [4, 4, 1], [CFG.tiles.consumer_registers, CFG.tiles.consumer_registers,
        CFG.tiles.producer_registers])  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- host


_LAUNCHER = Launcher(forward_fp8)


def forward(
    rows: Rows,
    records: Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: Tensor,
    lse: Tensor,
    acc: Tensor | None = None,
    num_sms: int | None = None,
    row_max: Tensor | None = None,
) -> None:
    """Compute attention of quantised operands over the visible pairs of `mask`, continuing (acc, lse) if given.

    Args:
        rows: quantised q.
        records: (batch, num_blocks, num_kv_heads, record_bytes), uint8; key j of the mask is row j % 128 of record
            j // 128. Any strides of the first three dimensions that are multiples of 128.
        out: as q, in a 16-bit dtype or fp32; every row is written. May be `acc`.
        lse, acc, num_sms: as `hopper.forward`.
        row_max: as lse, with its strides; receives an upper bound of each row's scores; updated in place with `acc`.
    Numerics: see `fp8_reference`; scores and sums in fp32, the sums of P V over a block have 13 bits.
    Source: FP8 operands and their layouts: Shah et al. 2024 (arXiv:2407.08608); P V summed in two levels: Zhang et al.
        2024 (SageAttention2, arXiv:2411.10958); P relative to its own block is ours.
    """
    check_state(softmax_scale, out, lse, acc)
    q8 = rows.values
    first, stop = mask.q_span
    for unseen in (slice(0, first), slice(stop, q8.shape[1])):
        write_unseen_rows(out, lse, acc, unseen)
        if row_max is not None and acc is None and unseen.start < unseen.stop:
            row_max[..., unseen] = -math.inf
    if first < stop:
        with device_guard(q8.device):
            launch = build_launch(rows, records, mask, softmax_scale, out=out, lse=lse, acc=acc, row_max=row_max,
                                  num_sms=num_sms or count_sms(q8.device), counter=tile_counter(q8.device))  # fmt: skip
            _LAUNCHER(launch.variant, launch.num_programs, *launch.arguments)


def build_launch(
    rows: Rows,
    records: Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: Tensor,
    lse: Tensor,
    acc: Tensor | None,
    row_max: Tensor | None = None,
    num_sms: int,
    counter: Tensor,
) -> LaunchArgs:
    """Return the launch that covers the rows of `mask.q_span`, from the block of q that holds the first.

    Args:
        counter: two int32 zeros, which are zeros again after the launch.
    """
    first, end = mask.q_span
    span = (first // BLOCK_Q * BLOCK_Q, end)
    ends_of_blocks = ends = start = stop = table = stretches = None
    region = mask.regions[0]
    aligned = region.q_start % BLOCK_Q == region.k_start % BLOCK_K == 0
    kind, keys, diagonals = (bands_of(mask) if aligned else None) or table_of(mask)
    q8, q_scales = cut(rows.values, 1, span), cut(rows.scales, 2, (span[0] // BLOCK_Q, -(-end // BLOCK_Q)))
    records = cut(records, 1, (keys[0] // BLOCK_K, -(-keys[1] // BLOCK_K)))
    out, lse, acc, row_max = cut(out, 1, span), cut(lse, 2, span), cut(acc, 1, span), cut(row_max, 2, span)
    batch, seqlen_q, num_heads, head_dim = q8.shape
    num_kv_heads, seqlen_k = records.shape[2], keys[1] - keys[0]
    starts = kind == "ends" and has_begins(mask)
    variant = _variant(FP8_TILES[head_dim], kind, acc is not None, row_max is not None, starts)
    if kind == "bounds":
        start, stop = (bound[slice(*span)] for bound in mask.bounds(q8.device))
        table = tile_table(mask, q8.device, variant.tiles.rows, span)
    elif kind == "ends":
        ends, start, stop = limits(mask, q8.device, variant.tiles.rows, span)
        if variant.ends_bytes:
            ends_of_blocks, ends = block_descriptor(ends, (1, BLOCK_K)), None
        table, stretches, *_ = walks(mask, q8.device, span, variant.tiles.rows, BLOCK_K)
    num_row_tiles = -(-seqlen_q // variant.tiles.rows)
    num_tiles = batch * num_heads * num_row_tiles
    heads_per_kv = num_heads // num_kv_heads
    per_group = heads_per_kv * kv_heads_per_group(num_kv_heads, records.shape[1] * records.shape[3])
    arguments = (
        *_descriptors(q8, records, out, out if acc is None else acc, variant.tiles),
        ends_of_blocks, lse, start, stop, ends, table, stretches, counter,
        q_scales, lse if row_max is None else row_max,
        seqlen_q, seqlen_k, num_heads, heads_per_kv,
        per_group, heads_at_last(mask.regions, variant.tiles, span, batch * num_heads, per_group, num_sms),
        num_row_tiles, num_tiles, *diagonals, lse.stride(0), lse.stride(1), *q_scales.stride()[:2],
        softmax_scale / head_dim / _LN2, variant,
    )  # fmt: skip
    key = (head_dim, kind, acc is not None, row_max is not None, starts, out.dtype)
    return LaunchArgs(key, min(num_sms, num_tiles), arguments)


@functools.cache
def _variant(tiles: Fp8Tiles, mask: str, resume: bool, row_max: bool, starts: bool) -> Fp8Variant:
    return Fp8Variant(tiles, mask, resume, row_max, starts)


def _descriptors(
    q8: Tensor, records: Tensor, out: Tensor, acc: Tensor, tiles: Fp8Tiles
) -> tuple[TensorDescriptor, ...]:
    """Return descriptors of q, of k, v and tails in the records, of out and acc: boxes of one part of the head."""
    head_dim, columns = q8.shape[3], tiles.parts[0]
    size = BLOCK_K * head_dim
    values = records.view(q8.dtype)
    k8 = values[..., :size].unflatten(-1, (BLOCK_K, head_dim))
    v8 = values[..., size : 2 * size].unflatten(-1, (head_dim, BLOCK_K))
    return (
        tile_descriptor(q8, BLOCK_Q, columns),
        block_descriptor(k8, (1, 1, 1, BLOCK_K, columns)),
        block_descriptor(v8, (1, 1, 1, columns, BLOCK_K)),
        block_descriptor(records.view(torch.float32)[..., size // 2 :], (1, 1, 1, TAIL_BYTES // 4)),
        tile_descriptor(out, tiles.block_m, columns),
        tile_descriptor(acc, tiles.block_m, columns),
    )
