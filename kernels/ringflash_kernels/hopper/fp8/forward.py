"""FP8 attention forward for compute capability 9.0, on the frame of the bf16 forward (`forward.kernel`).

Q (64 rows), K and V (records of 128 keys) are e4m3, P too; scores, O and the softmax are fp32. What differs from bf16:

    scales     of Q and K in the factor of exp2, that of V in its exponent: P' = exp2(s + log2(scale of V) - m + OFFSET)
    m          an integer, so that rescaling O is exact and P' is rounded alike whatever blocks came before
    P V        V comes transposed with the keys of every 16 in such an order that the registers of S hold the operand
    promotion  e4m3 products are added up in fp32 with 13 bits of significand; after some blocks their sum is moved to
               an O that is added in full fp32. Without, a million equal keys give a quarter of what they should.

`fp8_reference` is the specification.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ringflash_kernels.fp8_reference import BLOCK_K, BLOCK_Q, OFFSET, SLACK, TAIL_BYTES
from ringflash_kernels.fp8_reference import Rows as QuantisedRows
from ringflash_kernels.hopper.compat import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ringflash_kernels.hopper.descriptors import Descriptor, block_layout, cut, tile_descriptor, tile_layout
from ringflash_kernels.hopper.forward.kernel import (
    Pointers,
    Problem,
    Rows,
    Shared,
    attend_nothing,
    band_of,
    check_state,
    count_sms,
    decode,
    hide,
    key_of,
    kv_heads_per_group,
    lane_sums,
    load_q,
    make_barriers,
    matrices,
    merge_weights,
    nothing_yet,
    pair,
    pass_block,
    publish,
    q_tiles,
    receive,
    rescaled,
    ring_of,
    scaled,
    scores,
    settle,
    slot,
    store_part,
    tile_counter,
    tile_table,
    tiles_at,
    visible_keys,
    wait_values,
    zero_acc,
)
from ringflash_kernels.hopper.fp8.tiles import FP8_TILES, Fp8Tiles
from ringflash_kernels.hopper.launcher import Launcher, on
from ringflash_kernels.mask import Mask

_LN2 = math.log(2.0)
_OFFSET, _SLACK = gl.constexpr(OFFSET), gl.constexpr(SLACK)


@dataclass(frozen=True)
class Fp8Variant:
    """What is fixed when a kernel is compiled; see `ForwardVariant`."""

    tiles: Fp8Tiles
    mask: str
    resume: bool

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        """Registers that hold S and P of one warpgroup."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.tiles.block_n, 32])

    @property
    def acc_layouts(self) -> tuple[gl.NVMMADistributedLayout, ...]:
        """Registers that hold O of one warpgroup, for each part of the head."""
        return tuple(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32]) for columns in self.tiles.parts)

    @property
    def state_layout(self) -> gl.NVMMASharedLayout:
        """Shared memory that holds O of one warpgroup in fp32."""
        return tile_layout(self.tiles.block_m, self.tiles.parts[0], torch.float32)


class Scales(NamedTuple):
    """Scales of q, and the tails of records, with strides in elements."""

    q: int
    q_stride_b: int
    q_stride_h: int
    tails: int
    stride_b: int
    stride_block: int
    stride_h: int


class KeyScales(NamedTuple):
    """Scalars of a block of keys: the factor from S to log2 units, the exponent of V's scale, 1 / that scale."""

    factor: float
    exponent: float
    inverse: float


# ------------------------------------------------------------------------------------------------------ producer


@gluon.jit
def load_part(desc, tiles, full, batch, block, head, ROW: gl.constexpr, COLUMN: gl.constexpr, V: gl.constexpr):
    """Load K or V of a record, whose second part, if there is one, begins at (ROW, COLUMN); `full` counts the bytes."""
    if len(V.tiles.parts) == 2:
        mbarrier.expect(full, 2 * desc.block_type.nbytes)
        tma_load(desc, [batch, block, head, 0, 0], full, tiles[0])
        tma_load(desc, [batch, block, head, ROW, COLUMN], full, tiles[1])
    else:
        mbarrier.expect(full, desc.block_type.nbytes)
        tma_load(desc, [batch, block, head, 0, 0], full, tiles[0])


@gluon.jit
def produce(q_desc, k_desc, v_desc, shared, barriers, problem, pointers, V: gl.constexpr):
    """The producer warp: draws tiles from a counter that all programs share, loads Q and the ring of K and V."""
    STAGES: gl.constexpr = V.tiles.num_stages
    count = 0
    kv = 0
    ticket = gl.program_id(0)
    while ticket < problem.num_tiles:
        tile = decode(ticket, problem, pointers, 0, V.tiles.rows, V)
        publish(ticket, count, shared, barriers)
        head_kv = tile.head // problem.heads_per_kv
        for i in range(tile.num_blocks):
            index, phase = slot(kv, STAGES)
            block = block_of(tile, i, V)
            mbarrier.wait(barriers.k_empty.index(index), phase ^ 1)
            load_part(k_desc[0], tiles_at(shared.k, index, V), barriers.k_full.index(index), tile.batch, block, head_kv,
                      0, V.tiles.parts[0], V)  # fmt: skip
            if i == 0:  # only now: the first K need not wait until the last tile is done with Q
                load_q(q_desc, shared, barriers, tile, count, V)
            mbarrier.wait(barriers.v_empty.index(index), phase ^ 1)
            load_part(v_desc[0], tiles_at(shared.v, index, V), barriers.v_full.index(index), tile.batch, block, head_kv,
                      V.tiles.parts[0], 0, V)  # fmt: skip
            kv += 1
        if tile.num_blocks == 0:
            load_q(q_desc, shared, barriers, tile, count, V)
        count += 1
        ticket = gl.atomic_add(pointers.counter, 1) + gl.num_programs(0)
    publish(ticket, count, shared, barriers)
    if gl.atomic_add(pointers.counter + 1, 1) == gl.num_programs(0) - 1:  # the last program leaves zeros behind
        gl.store(pointers.counter, 0)
        gl.store(pointers.counter + 1, 0)


# ----------------------------------------------------------------------------------------------------- consumers


@gluon.jit
def block_of(tile, i, V: gl.constexpr):
    """The record that holds the i-th block of the walk."""
    return tile.key // V.tiles.block_n + tile.num_blocks - 1 - i


@gluon.jit
def record_matrices(tiles, V: gl.constexpr):
    """The (rows, columns) that wgmma reads in the tile of each part of a record."""
    first = tiles[0].reshape([tiles[0].shape[3], tiles[0].shape[4]])
    if len(V.tiles.parts) == 2:
        parts = (first, tiles[1].reshape([tiles[1].shape[3], tiles[1].shape[4]]))
    else:
        parts = (first,)
    return parts


@gluon.jit
def scales_of(tails, block, stride_block, q_scale):
    """The scalars of a block of keys, from the tail of its record."""
    tail = tails + block.to(gl.int64) * stride_block
    return KeyScales(gl.load(tail) * q_scale, gl.load(tail + 2), gl.load(tail + 3))


@gluon.jit
def softmax(s, row_max, row_sum, key, rows, scales, MASKED: gl.constexpr, V: gl.constexpr):
    """P' = 2^(s + exponent - m + OFFSET), the new m, lanes' sums of P' / 2^exponent, and 2^(old m - m).

    m is in log2 units, an integer, and at most SLACK below the largest s + exponent: P' stays below what e4m3 holds.
    """
    if MASKED:
        s = hide(s, key, rows, V)
    ROUND: gl.constexpr = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to an integer
    top = gl.max(s, 1) * scales.factor + scales.exponent
    rounded = gl.maximum((top + ROUND) - ROUND, top - 1.0)  # the latter only for scores beyond 2^22
    new_max = gl.where(top - row_max > _SLACK, rounded, row_max)
    if MASKED:
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        finite_max = new_max
    alpha = gl.exp2(row_max - finite_max)
    p = gl.exp2(s * scales.factor - (finite_max - (scales.exponent + _OFFSET))[:, None])
    lane_layout: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    alpha_of_lanes = gl.convert_layout(alpha, lane_layout, assert_trivial=True)[:, None]
    row_sum = row_sum * alpha_of_lanes + lane_sums(p, V) * scales.inverse
    return p, new_max, row_sum, alpha


@gluon.jit
def normalizer(row_sum, row_max, V: gl.constexpr):
    """1 / l and lse of every row, from the lanes' sums; NaN stays NaN."""
    S_LAYOUT: gl.constexpr = V.score_layout
    LN2: gl.constexpr = 0.6931471805599453
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, S_LAYOUT))
    inverse = gl.where(row_sum == 0, 0.0, 1.0 / row_sum)
    return inverse, gl.where(row_sum == 0, float("-inf"), (row_max - _OFFSET) * LN2 + gl.log(row_sum))


@gluon.jit
def operand(p, V: gl.constexpr):
    """P' as wgmma takes it from registers. V's keys are stored in the order that makes this a change of names only."""
    BM: gl.constexpr = V.tiles.block_m
    BN: gl.constexpr = V.tiles.block_n
    layout: gl.constexpr = gl.DotOperandLayout(0, V.acc_layouts[0], 4)
    p = p.to(gl.float8e4nv).reshape([BM, BN // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([BM, BN])
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def add_values(acc, p, v, V: gl.constexpr):
    """O += P' V within the tensor cores."""
    first = warpgroup_mma(operand(p, V), v[0].permute((1, 0)), acc[0], is_async=True)
    return wait_values((first,), V)


@gluon.jit
def added_part(acc, alpha, p, v, PART: gl.constexpr, V: gl.constexpr):
    """One part of O times alpha, plus P' V, in full fp32."""
    layout: gl.constexpr = V.acc_layouts[PART]
    BM: gl.constexpr = V.tiles.block_m
    columns: gl.constexpr = V.tiles.parts[PART]
    zeros = gl.zeros([BM, columns], gl.float32, layout)
    product = warpgroup_mma(p, v[PART].permute((1, 0)), zeros, use_acc=False, is_async=True)
    product = warpgroup_mma_wait(0, deps=(product,))
    return acc[PART] * gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None] + product


@gluon.jit
def add_promoted(acc, alpha, p, v, V: gl.constexpr):
    """O = O alpha + P' V, one part after another: registers hold the product of one only."""
    p = operand(p, V)
    first = added_part(acc, alpha, p, v, 0, V)
    if len(V.tiles.parts) == 2:
        parts = (first, added_part(acc, alpha, p, v, 1, V))
    else:
        parts = (first,)
    return parts


@gluon.jit
def with_kept(acc, row_max, kept_max, shared, W: gl.constexpr, V: gl.constexpr):
    """What registers hold of O, plus what shared memory does, relative to kept_max."""
    layout: gl.constexpr = V.acc_layouts[0]
    kept = kept_at(shared, W, V).load(layout)
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    factor = gl.convert_layout(gl.exp2(kept_max - finite_max), gl.SliceLayout(1, layout))[:, None]
    return (acc[0] + gl.where(factor == 0, 0.0, kept * factor),)


@gluon.jit
def kept_at(shared, W: gl.constexpr, V: gl.constexpr):
    """Shared memory in which O of a warpgroup waits: where results leave through later."""
    layout: gl.constexpr = V.state_layout
    BM: gl.constexpr = V.tiles.block_m
    columns: gl.constexpr = V.tiles.parts[0]
    return shared.stage.index(W)._reinterpret(gl.float32, [1, BM, 1, columns], layout).reshape([BM, columns])


@gluon.jit
def step(
    acc,
    row_max,
    row_sum,
    kept_max,
    kv,
    i,
    tile,
    rows,
    tails,
    stride_block,
    shared,
    barriers,
    MASKED: gl.constexpr,
    W: gl.constexpr,
    V: gl.constexpr,
):
    """Block i from S to O += P V; the other warpgroups' products run meanwhile."""
    PROMOTE: gl.constexpr = V.tiles.promote
    index, phase = slot(kv, V.tiles.num_stages)
    scales = scales_of(tails, block_of(tile, i, V), stride_block, rows.scale)
    mbarrier.wait(barriers.k_full.index(index), phase)
    s = warpgroup_mma_wait(0, deps=(scores(rows.q, record_matrices(tiles_at(shared.k, index, V), V), V),))
    mbarrier.arrive(barriers.k_empty.index(index), count=1)
    p, row_max, row_sum, alpha = softmax(s, row_max, row_sum, key_of(tile, i, V), rows, scales, MASKED, V)
    if PROMOTE > 1:
        acc = rescaled(acc, alpha, V)
    mbarrier.wait(barriers.v_full.index(index), phase)
    v = record_matrices(tiles_at(shared.v, index, V), V)
    if PROMOTE > 1:
        acc = add_values(acc, p, v, V)
    else:
        acc = add_promoted(acc, alpha, p, v, V)
    mbarrier.arrive(barriers.v_empty.index(index), count=1)
    if PROMOTE > 1:
        if i % PROMOTE == PROMOTE - 1:
            tma_store_wait(0)  # of the results before, which left from there
            kept_at(shared, W, V).store(with_kept(acc, row_max, kept_max, shared, W, V)[0])
            kept_max = row_max
            acc = zero_acc(V)
    return acc, row_max, row_sum, kept_max, kv + 1


@gluon.jit
def attend(rows, q_empty, tile, kv, tails, stride_block, shared, barriers, W: gl.constexpr, V: gl.constexpr):
    """O (not yet divided), 1 / l and lse of a tile, and the next use of the ring."""
    n = tile.num_blocks
    acc, row_max, row_sum = nothing_yet(V)
    kept_max = row_max
    if V.mask == "band":
        for _ in range(n - tile.end_seen):
            kv = pass_block(kv, shared, barriers, V)
    for i in range(n - tile.end_seen, n - tile.end_full):
        acc, row_max, row_sum, kept_max, kv = step(acc, row_max, row_sum, kept_max, kv, i, tile, rows, tails,
                                                   stride_block, shared, barriers, True, W, V)  # fmt: skip
    for i in range(n - tile.end_full, n - tile.first_full):
        acc, row_max, row_sum, kept_max, kv = step(acc, row_max, row_sum, kept_max, kv, i, tile, rows, tails,
                                                   stride_block, shared, barriers, False, W, V)  # fmt: skip
    if V.mask != "none":
        for i in range(n - tile.first_full, n - tile.first_seen):
            acc, row_max, row_sum, kept_max, kv = step(acc, row_max, row_sum, kept_max, kv, i, tile, rows, tails,
                                                       stride_block, shared, barriers, True, W, V)  # fmt: skip
    if V.mask == "band":
        for _ in range(tile.first_seen):
            kv = pass_block(kv, shared, barriers, V)
    mbarrier.arrive(q_empty, count=1)
    if V.tiles.promote > 1:
        acc = with_kept(acc, row_max, kept_max, shared, W, V)
        fence_async_shared()  # what was kept was written by threads; what follows there comes by TMA
    inverse, lse = normalizer(row_sum, row_max, V)
    return acc, inverse, lse, kv


@gluon.jit
def consume(o_desc, acc_desc, shared, barriers, problem, pointers, scales, W: gl.constexpr, V: gl.constexpr):
    """Consumer warpgroup W: rows [W * block_m, (W + 1) * block_m) of every tile."""
    row_layout: gl.constexpr = gl.SliceLayout(1, V.score_layout)
    BM: gl.constexpr = V.tiles.block_m
    count = 0
    kv = 0
    loads = 0
    ticket = receive(count, shared, barriers)
    while ticket < problem.num_tiles:
        tile = decode(ticket, problem, pointers, W * BM, BM, V)
        row = tile.row + W * BM
        row_index = row + gl.arange(0, BM, layout=row_layout)
        batch, head = tile.batch.to(gl.int64), tile.head.to(gl.int64)
        lse_of_head = pointers.lse + batch * problem.lse_stride_b + head * problem.lse_stride_h
        start, stop = visible_keys(row_index, problem, pointers, V)
        if V.resume:
            old_lse = gl.load(lse_of_head + row_index, mask=row_index < problem.seqlen_q, other=float("-inf"))
        q_block = gl.minimum(row, problem.seqlen_q - 1) // BM
        q_scale = gl.load(scales.q + batch * scales.q_stride_b + head * scales.q_stride_h + q_block)
        tails = scales.tails + batch * scales.stride_b + head // problem.heads_per_kv * scales.stride_h
        q_empty = barriers.q_empty.index(W)
        rows = Rows(matrices(q_tiles(shared, W, V), V), start, stop, q_scale * problem.scale)
        mbarrier.wait(barriers.q_full.index(W), count & 1)
        if tile.num_blocks == 0:
            acc, factor, lse, kv = attend_nothing(q_empty, kv, V)
        else:
            acc, factor, lse, kv = attend(rows, q_empty, tile, kv, tails, scales.stride_block, shared, barriers, W, V)
        if V.resume:
            lse, weight, old_weight = merge_weights(lse, old_lse)
            factor = factor * weight
        else:
            old_weight = factor
        acc = scaled(acc, factor, V)
        row_index = row + gl.arange(0, BM, layout=row_layout)  # again: a short live range spares registers
        gl.store(lse_of_head + row_index, lse, mask=row_index < problem.seqlen_q)
        loads = store_part(acc[0], o_desc, acc_desc, shared, barriers, tile, row, loads, old_weight, W, 0, V)
        if len(V.tiles.parts) == 2:
            loads = store_part(acc[1], o_desc, acc_desc, shared, barriers, tile, row, loads, old_weight, W, 1, V)
        count += 1
        ticket = receive(count, shared, barriers)
    tma_store_wait(0)


# -------------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def allocate(q_desc, k_desc, v_desc, o_desc, acc_desc, V: gl.constexpr):
    """Shared memory of a program."""
    WARPGROUPS: gl.constexpr = V.tiles.num_warpgroups
    if V.tiles.promote > 1 or V.resume:
        STATE_LAYOUT: gl.constexpr = V.state_layout
        box: gl.constexpr = [WARPGROUPS, 1, V.tiles.block_m, 1, V.tiles.parts[0]]
        stage = gl.allocate_shared_memory(gl.float32, box, STATE_LAYOUT)
    else:
        box: gl.constexpr = [WARPGROUPS] + o_desc[0].block_shape
        stage = gl.allocate_shared_memory(o_desc[0].dtype, box, o_desc[0].layout)
    q_ring = ring_of(q_desc, WARPGROUPS, V)
    k_ring = ring_of(k_desc, V.tiles.num_stages, V)
    v_ring = ring_of(v_desc, V.tiles.num_stages, V)
    ticket = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Shared(q_ring, k_ring, v_ring, stage, ticket)


@gluon.jit(
    do_not_specialize=[
        "lse", "start", "stop", "table", "counter", "q_scales", "tails", "seqlen_q", "seqlen_k", "num_heads",
        "heads_per_kv", "heads_per_group", "num_row_tiles", "num_tiles", "lower", "upper", "lse_stride_b",
        "lse_stride_h", "q_stride_b", "q_stride_h", "tail_stride_b", "tail_stride_block", "tail_stride_h",
    ]
)  # fmt: skip
def forward_fp8(
    q_desc, k_desc, v_desc, o_desc, acc_desc,
    lse, start, stop, table, counter, q_scales, tails,
    seqlen_q, seqlen_k, num_heads, heads_per_kv, heads_per_group, num_row_tiles, num_tiles, lower, upper,
    lse_stride_b, lse_stride_h, q_stride_b, q_stride_h, tail_stride_b, tail_stride_block, tail_stride_h, scale,
    V: gl.constexpr,
):  # fmt: skip
    """FP8 attention forward; see the top of this file."""
    problem = Problem(seqlen_q, seqlen_k, num_heads, heads_per_kv, heads_per_group, num_row_tiles, num_tiles, lower,
                      upper, lse_stride_b, lse_stride_h, scale)  # fmt: skip
    pointers = Pointers(lse, start, stop, table, counter)
    scales = Scales(q_scales, q_stride_b, q_stride_h, tails, tail_stride_b, tail_stride_block, tail_stride_h)
    q = pair(q_desc, q_desc, V)
    k = pair(k_desc, k_desc, V)
    v = pair(v_desc, v_desc, V)
    o = pair(o_desc, o_desc, V)
    acc = pair(acc_desc, acc_desc, V)
    shared = allocate(q, k, v, o, acc, V)
    barriers = make_barriers(V)
    if V.tiles.num_warpgroups == 2:
        gl.warp_specialize([
            (consume, (o, acc, shared, barriers, problem, pointers, scales, 0, V)),
            (consume, (o, acc, shared, barriers, problem, pointers, scales, 1, V)),
            (produce, (q, k, v, shared, barriers, problem, pointers, V)),
        ], [4, 1], [V.tiles.consumer_registers, V.tiles.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (o, acc, shared, barriers, problem, pointers, scales, 0, V)),
            (consume, (o, acc, shared, barriers, problem, pointers, scales, 1, V)),
            (consume, (o, acc, shared, barriers, problem, pointers, scales, 2, V)),
            (produce, (q, k, v, shared, barriers, problem, pointers, V)),
        ], [4, 4, 1], [V.tiles.consumer_registers, V.tiles.consumer_registers, V.tiles.producer_registers])  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- host


class Launch(NamedTuple):
    """A kernel launch: what tells its compiled variant apart, number of programs, arguments of `forward_fp8`."""

    variant: tuple
    num_programs: int
    arguments: tuple


_LAUNCHER = Launcher(forward_fp8)


def forward(
    rows: QuantisedRows,
    records: torch.Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    acc: torch.Tensor | None = None,
    num_sms: int | None = None,
) -> None:
    """Attention of quantised operands over the visible pairs of `mask`, continuing (acc, lse) where given.

    Args:
        rows: quantised q.
        records: (batch, num_blocks, num_kv_heads, record_bytes), uint8; key j of the mask is row j % 128 of record
            j // 128. Any strides of the first three dimensions that are multiples of 128.
        out: as q, in a 16-bit dtype or fp32; every row is written. May be `acc`.
        lse, acc, num_sms: as `hopper.forward`.
    Numerics: see `fp8_reference`; scores and sums in fp32, see the top of this file for the sums of P V.
    Source: FP8 operands and their layouts: Shah et al. 2024 (arXiv:2407.08608); P V summed in two levels: Zhang et al.
        2024 (SageAttention2, arXiv:2411.10958); scales of V in the softmax and integer maxima are ours.
    """
    check_state(softmax_scale, out, lse, acc)
    q8 = rows.values
    first, stop = mask.q_span
    settle(out, lse, acc, slice(0, first))
    settle(out, lse, acc, slice(stop, q8.shape[1]))
    if first < stop:
        with on(q8.device):
            launch = plan(rows, records, mask, softmax_scale, out=out, lse=lse, acc=acc,
                          num_sms=num_sms or count_sms(q8.device), counter=tile_counter(q8.device))  # fmt: skip
            _LAUNCHER(launch.variant, launch.num_programs, *launch.arguments)


def plan(
    rows: QuantisedRows,
    records: torch.Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    acc: torch.Tensor | None,
    num_sms: int,
    counter: torch.Tensor,
) -> Launch:
    """The launch that covers the rows of `mask.q_span`, from the block of q that holds the first.

    Args:
        counter: two int32 zeros, zeros again after the launch.
    """
    first, end = mask.q_span
    span, keys = (first // BLOCK_Q * BLOCK_Q, end), (0, mask.seqlen_k)
    start = stop = table = None
    lower = upper = 0
    region = mask.regions[0]
    if len(mask.regions) == 1 and region.q_start % BLOCK_Q == 0 and region.k_start % BLOCK_K == 0:
        keys = (region.k_start, region.k_stop)
        lower, upper = band_of(region)
        kind = "none" if region.lower is None and region.upper is None else "band"
    else:
        kind = "bounds"
        start, stop = (bound[slice(*span)] for bound in mask.bounds(rows.values.device))
    q8, q_scales = cut(rows.values, 1, span), cut(rows.scales, 2, (span[0] // BLOCK_Q, -(-end // BLOCK_Q)))
    records = cut(records, 1, (keys[0] // BLOCK_K, -(-keys[1] // BLOCK_K)))
    out, lse, acc = cut(out, 1, span), cut(lse, 2, span), cut(acc, 1, span)
    batch, seqlen_q, num_heads, head_dim = q8.shape
    num_kv_heads, seqlen_k = records.shape[2], keys[1] - keys[0]
    variant = _variant(FP8_TILES[head_dim], kind, acc is not None)
    if kind == "bounds":
        table = tile_table(mask, q8.device, variant.tiles.rows, span)
    num_row_tiles = -(-seqlen_q // variant.tiles.rows)
    num_tiles = batch * num_heads * num_row_tiles
    heads_per_kv = num_heads // num_kv_heads
    tails = records.view(torch.float32)[..., -TAIL_BYTES // 4 :]
    arguments = (
        *_descriptors(q8, records, out, out if acc is None else acc, variant.tiles),
        lse, start, stop, table, counter, q_scales, tails,
        seqlen_q, seqlen_k, num_heads, heads_per_kv,
        heads_per_kv * kv_heads_per_group(num_kv_heads, records.shape[1] * records.shape[3]),
        num_row_tiles, num_tiles, lower, upper, lse.stride(0), lse.stride(1), *q_scales.stride()[:2], *tails.stride()[:3],
        softmax_scale / head_dim / _LN2, variant,
    )  # fmt: skip
    return Launch((head_dim, kind, acc is not None, out.dtype), min(num_sms, num_tiles), arguments)


@functools.cache
def _variant(tiles: Fp8Tiles, mask: str, resume: bool) -> Fp8Variant:
    return Fp8Variant(tiles, mask, resume)


def _descriptors(
    q8: torch.Tensor, records: torch.Tensor, out: torch.Tensor, acc: torch.Tensor, tiles: Fp8Tiles
) -> tuple[TensorDescriptor, ...]:
    """Of q, of k and v in the records, of out and acc: boxes of one part of the head."""
    head_dim, columns = q8.shape[3], tiles.parts[0]
    size = BLOCK_K * head_dim
    values = records.view(q8.dtype)
    k8 = values[..., :size].unflatten(-1, (BLOCK_K, head_dim))
    v8 = values[..., size : 2 * size].unflatten(-1, (head_dim, BLOCK_K))
    return (
        tile_descriptor(q8, BLOCK_Q, columns),
        _record_descriptor(k8, (1, 1, 1, BLOCK_K, columns)),
        _record_descriptor(v8, (1, 1, 1, columns, BLOCK_K)),
        tile_descriptor(out, tiles.block_m, columns),
        tile_descriptor(acc, tiles.block_m, columns),
    )


def _record_descriptor(x: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """Descriptor of k or v in records: the stride of a dimension of one element is never used, but must be aligned."""
    strides = [stride if size > 1 else TAIL_BYTES for size, stride in zip(x.shape, x.stride(), strict=True)]
    return Descriptor(x, list(x.shape), [*strides[:4], 1], list(block), block_layout(block, x.dtype))
