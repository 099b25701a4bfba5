"""dQ for head_dim 256 with products in e4m3: one CTA holds 128 queries and streams the keys past them.

Like `backward.queries`, from which the masks are: `BackwardProblem` is read with queries and keys exchanged. dQ = dS K
has dS in the registers that hold it as an operand, so K is loaded a second time, transposed, with each 16 keys in
KEY_ORDER. All tiles of a KV head share the scale of dS here, because the tensor cores add up dQ of many of them; every
PROMOTE blocks it is added to global memory.
"""

from ringflash_kernels.hopper.backward.problem import (
    NUMBER,
    QUERY_TILE_ARGUMENTS,
    BackwardProblem,
    halves,
    interleave,
    receive_number,
    send_number,
    slot_of,
)
from ringflash_kernels.hopper.compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_complete,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ringflash_kernels.hopper.fp8.backward_keys import Scales


@aggregate
class Fp8QueryShared:
    """Shared memory of a CTA, and the choices every role needs; operands are in e4m3.

    q, dout       Q and dO of 64 queries for each consumer; mbarriers q_full, q_empty
    k8, v8, k1    STAGES blocks of 64 keys: K and V of S and dP, and K transposed, for dQ; mbarriers full, empty
    staged        64 columns of dQ of each consumer on their way to global memory
    begin, ends   as in `backward.queries.QueryShared`
    number        if DRAWN, the tile whose Q and dO are in shared memory
    """

    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    k8: gl.shared_memory_descriptor
    v8: gl.shared_memory_descriptor
    k1: gl.shared_memory_descriptor
    staged: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    begin: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor
    number: gl.shared_memory_descriptor
    D: gl.constexpr
    STAGES: gl.constexpr
    PROMOTE: gl.constexpr
    HAS_UNIT: gl.constexpr
    ADD: gl.constexpr
    DRAWN: gl.constexpr


@gluon.jit
def _tile_of(problem, index):
    """Return first query, batch, head and KV head of a work item. The last queries, longest if causal, go first."""
    row, batch, head, kv_head = problem.work(index)
    if not problem.TWO_SIDED:
        row = (problem.num_tiles - 1) * problem.BLOCK_N - row
    return row, batch, head, kv_head


@gluon.jit
def _load_block(sm, problem, k8_desc, v8_desc, k1_desc, ends_desc, batch, kv_head, block, masked, step):
    """Load K, V and the transposed K of a block; under a two-sided mask also its ends, and what the step is."""
    slot, parity = slot_of(step, sm.STAGES)
    full = sm.full.index(slot)
    nbytes: gl.constexpr = k8_desc.block_type.nbytes + v8_desc.block_type.nbytes + k1_desc.block_type.nbytes
    mbarrier.wait(sm.empty.index(slot), parity ^ 1)
    if problem.TWO_SIDED:
        send_number(sm.begin.index(slot), block * 2 + masked)
    mbarrier.expect(full, nbytes + (64 * 4 if problem.TWO_SIDED else 0))
    half = block % 2 * 64
    tma_load(k8_desc, [batch, kv_head, block // 2, half, 0], full, sm.k8.index(slot))
    if problem.TWO_SIDED:
        tma_load(ends_desc, [0, block * 64], full, sm.ends.index(slot))
    tma_load(v8_desc, [batch, kv_head, block // 2, half, 0], full, sm.v8.index(slot))
    tma_load(k1_desc, [batch, kv_head, block // 2, 0, half], full, sm.k1.index(slot))


@gluon.jit
def _load(sm, problem, q_desc, dout_desc, k8_desc, v8_desc, k1_desc, ends_desc, counter):
    """Producer: load Q and dO of each tile, then K and V block by block."""
    step = 0
    round = 0
    index = gl.program_id(0)
    while index < problem.num_works:
        row, batch, head, kv_head = _tile_of(problem, index)
        if problem.TWO_SIDED:
            first, count, stop = problem.walk(index)
            start = 0
        else:
            start, stop, _full_start, _full_stop = problem.blocks(row)
        if sm.DRAWN | (start < stop):
            full = sm.q_full.index(0)
            mbarrier.wait(sm.q_empty.index(0), (round & 1) ^ 1)
            if sm.DRAWN:
                send_number(sm.number.index(0), index)
            mbarrier.expect(full, 2 * (q_desc.block_type.nbytes + dout_desc.block_type.nbytes))
            for half in gl.static_range(2):
                tma_load(q_desc, [batch, head, row + half * 64, 0], full, sm.q.index(half))
                tma_load(dout_desc, [batch, head, row + half * 64, 0], full, sm.dout.index(half))
            round += 1
        if problem.TWO_SIDED:
            for i in range(count):
                begin, end, masked = problem.stretch(first + i)
                for block in range(begin, end):
                    _load_block(sm, problem, k8_desc, v8_desc, k1_desc, ends_desc, batch, kv_head, block, masked, step)
                    step += 1
        else:
            for block in range(start, stop):
                _load_block(sm, problem, k8_desc, v8_desc, k1_desc, ends_desc, batch, kv_head, block, 0, step)
                step += 1
        if sm.DRAWN:
            index = gl.atomic_add(counter, 1) + gl.num_programs(0)
        else:
            index += gl.num_programs(0)
    if sm.DRAWN:
        mbarrier.wait(sm.q_empty.index(0), (round & 1) ^ 1)
        send_number(sm.number.index(0), problem.num_works)
        mbarrier.arrive(sm.q_full.index(0), count=1)
        if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:  # the last program resets the counters
            gl.store(counter, 0)
            gl.store(counter + 1, 0)


@gluon.jit
def _step(sm, problem, dq, reference, delta, seen, tile_ptr, q_scale, share, step, row, block, masked, W: gl.constexpr):
    """Add dQ of one block of keys."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sm.D, 32]), 4)
    zeros = gl.zeros([64, 64], gl.float32, s_layout)
    slot, parity = slot_of(step, sm.STAGES)
    if not problem.TWO_SIDED:
        at = tile_ptr + (block >> 1) * 8
        s_scale = gl.load(at) * q_scale
        of_delta = gl.load(at + 2)
        of_ds = gl.load(at + 6) * share
    mbarrier.wait(sm.full.index(slot), parity)
    if problem.TWO_SIDED:
        number = receive_number(sm.begin.index(slot))
        block = number >> 1
        masked = (number & 1) != 0
        at = tile_ptr + (block >> 1) * 8
        s_scale = gl.load(at) * q_scale
        of_delta = gl.load(at + 2)
        of_ds = gl.load(at + 6) * share
    q = sm.q.index(W).reshape([64, sm.D])
    dout = sm.dout.index(W).reshape([64, sm.D])
    k = sm.k8.index(slot).reshape([64, sm.D])
    v = sm.v8.index(slot).reshape([64, sm.D])
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(dout, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    if masked:
        keys = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
        s = gl.where(problem.within(keys, seen[0], seen[1]), s, float("-inf"))
        if problem.TWO_SIDED:
            rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            ends = sm.ends.index(slot).reshape([64]).load(gl.SliceLayout(0, s_layout))
            s = gl.where(rows[:, None] < ends[None, :], s, float("-inf"))
    p = gl.exp2(s * s_scale - reference[:, None]) * of_ds
    # This wait ends the basic block, or ptxas would move exp past the wait for dP.
    mbarrier.wait(sm.full.index(slot), parity)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = (p * (dp + (delta * of_delta)[:, None])).to(sm.q.dtype)
    ds = ds.reshape([64, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 64])
    ds = gl.convert_layout(ds, operand, assert_trivial=True)
    dq = warpgroup_mma(ds, sm.k1.index(slot).reshape([sm.D, 64]).permute((1, 0)), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(sm.empty.index(slot), count=1)
    return dq


@gluon.jit
def _write_chunk(sm, desc, x, at, column, is_first, W: gl.constexpr):
    """Add 64 columns of dQ to the accumulator, or store them there."""
    staged = sm.staged.index(W)
    tma_store_wait(0)
    staged.reshape([64, 64]).store(interleave(x, 64, 4 * 32 // desc.dtype.primitive_bitwidth).to(desc.dtype))
    fence_async_shared()
    if sm.ADD:
        tma_reduce_add(desc, [at[0], at[1], column], staged)
    elif is_first:
        tma_store(desc, [at[0], at[1], column], staged)
    else:
        tma_reduce_add(desc, [at[0], at[1], column], staged)


@gluon.jit
def _write(sm, desc, dq, at, is_first, W: gl.constexpr):
    """Add dQ of consumer W's 64 queries to the accumulator; without ADD the first part of it is stored."""
    H: gl.constexpr = sm.D // 2
    if not sm.ADD:
        tma_store_complete(at[1])  # what was stored is in memory before more is added
    left, right = halves(dq, sm.D)
    first, second = halves(left, H)
    _write_chunk(sm, desc, first, at, 0, is_first, W)
    _write_chunk(sm, desc, second, at, 64, is_first, W)
    first, second = halves(right, H)
    _write_chunk(sm, desc, first, at, 128, is_first, W)
    _write_chunk(sm, desc, second, at, 192, is_first, W)


@gluon.jit
def _hold(sm, problem, scales, maxima_ptr, stats_ptr, stats_stride, dq_desc, W: gl.constexpr):
    """Consumer W: compute dQ of 64 queries of every tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sm.D, 32])
    step = 0
    round = 0
    if sm.DRAWN:
        mbarrier.wait(sm.q_full.index(0), 0)
        index = receive_number(sm.number.index(0))
    else:
        index = gl.program_id(0)
    while index < problem.num_works:
        row, batch, head, kv_head = _tile_of(problem, index)
        if problem.TWO_SIDED:
            _first, _count, stop = problem.walk(index)
            start = 0
        else:
            start, stop, full_start, full_stop = problem.blocks(row)
        batch_head = batch * problem.num_heads + head
        row += W * 64
        if start < stop:
            rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            seen = problem.rows_seeing(rows)
            inside = rows < problem.num_keys
            stats = stats_ptr + batch_head.to(gl.int64) * 2 * stats_stride + problem.row_start
            reference = gl.load(stats + rows, mask=inside, other=float("inf"))
            delta = gl.load(stats + stats_stride + rows, mask=inside, other=0.0)
            q_at = scales.q_ptr + batch_head * scales.q_blocks + row // 64
            q_scale = gl.load(q_at, mask=row < problem.num_keys, other=0.0)
            batch_kv_head = batch * problem.num_kv_heads + kv_head
            largest = gl.load(maxima_ptr + batch_kv_head * 8 + 7)
            factor = largest
            if sm.HAS_UNIT:
                factor *= gl.load(maxima_ptr + batch_kv_head * 8 + 5)
            share = 1.0 / largest
            tile_ptr = scales.tile_ptr + batch_kv_head * scales.k_blocks * 8
            if not sm.DRAWN:
                mbarrier.wait(sm.q_full.index(0), round & 1)
            for first in range(start, stop, sm.PROMOTE):
                dq = gl.zeros([64, sm.D], gl.float32, layout)
                for block in range(first, gl.minimum(first + sm.PROMOTE, stop)):
                    if problem.TWO_SIDED:  # the producer says which block it is
                        masked = False
                    else:
                        masked = (block < full_start) | (block >= full_stop)
                    dq = _step(
                        sm, problem, dq, reference, delta, seen, tile_ptr, q_scale, share, step, row, block, masked, W
                    )
                    step += 1
                if first + sm.PROMOTE >= stop:
                    mbarrier.arrive(sm.q_empty.index(0), count=1)
                _write(sm, dq_desc, dq * factor, [batch_head, problem.row_start + row], first == start, W)
            round += 1
        else:
            if sm.DRAWN:
                mbarrier.arrive(sm.q_empty.index(0), count=1)
                round += 1
            if not sm.ADD:
                zeros = gl.zeros([64, sm.D], gl.float32, layout)
                _write(sm, dq_desc, zeros, [batch_head, problem.row_start + row], True, W)
        if sm.DRAWN:
            mbarrier.wait(sm.q_full.index(0), round & 1)
            index = receive_number(sm.number.index(0))
        else:
            index += gl.num_programs(0)
    tma_store_wait(0)


@gluon.jit
def _hold_first(sm, problem, scales, maxima_ptr, stats_ptr, stats_stride, dq_desc):
    _hold(sm, problem, scales, maxima_ptr, stats_ptr, stats_stride, dq_desc, 0)


@gluon.jit
def _hold_second(sm, problem, scales, maxima_ptr, stats_ptr, stats_stride, dq_desc):
    _hold(sm, problem, scales, maxima_ptr, stats_ptr, stats_stride, dq_desc, 1)


@gluon.jit(
    do_not_specialize=[
        "q_scales_ptr", "q_blocks", "tile_scales_ptr", "k_blocks", "maxima_ptr", "counter", *QUERY_TILE_ARGUMENTS,
    ]
)  # fmt: skip
def backward_queries_fp8(
    q_desc, dout_desc, k8_desc, v8_desc, k1_desc, dq_desc, ends_desc,
    q_scales_ptr, q_blocks, tile_scales_ptr, k_blocks, maxima_ptr, counter,
    stats_ptr, first_ptr, stop_ptr, tiles_ptr, stretches_ptr, stats_stride, row_start, dq_rows, num_rows,
    num_keys, num_heads, num_kv_heads, num_tiles, heads_together, num_works, first_shift, stop_shift,
    STAGES: gl.constexpr, PROMOTE: gl.constexpr, HAS_UNIT: gl.constexpr, ADD: gl.constexpr, DRAWN: gl.constexpr,
    BOUNDS: gl.constexpr, TWO_SIDED: gl.constexpr,
):  # fmt: skip
    """Only dQ; launch with 4 warps on any number of CTAs up to `num_works`. See the module and `BackwardProblem`.

    HAS_UNIT: dQ is in fp16, in the unit of the KV head; see `backward_operands`. ADD: add to the accumulator, or else
    overwrite it.
    """
    D: gl.constexpr = k8_desc.block_type.shape[4]
    e4m3: gl.constexpr = k8_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    if TWO_SIDED:
        begin = gl.allocate_shared_memory(gl.int32, [STAGES, 1], NUMBER)
        ends = gl.allocate_shared_memory(gl.int32, [STAGES] + ends_desc.block_shape, ends_desc.layout)
    else:
        begin = full  # not read
        ends = full
        tiles_ptr = first_ptr
        stretches_ptr = first_ptr
    sm = Fp8QueryShared(
        gl.allocate_shared_memory(e4m3, [2, 1, 1, 64, D], q_desc.layout),
        gl.allocate_shared_memory(e4m3, [2, 1, 1, 64, D], dout_desc.layout),
        gl.allocate_shared_memory(e4m3, [STAGES, 1, 1, 1, 64, D], k8_desc.layout),
        gl.allocate_shared_memory(e4m3, [STAGES, 1, 1, 1, 64, D], v8_desc.layout),
        gl.allocate_shared_memory(e4m3, [STAGES, 1, 1, 1, D, 64], k1_desc.layout),
        gl.allocate_shared_memory(dq_desc.dtype, [2, 1, 64, 64], dq_desc.layout),
        q_full, q_empty, full, empty, begin, ends,
        gl.allocate_shared_memory(gl.int32, [1, 1], NUMBER), D, STAGES, PROMOTE, HAS_UNIT, ADD, DRAWN,
    )  # fmt: skip
    problem = BackwardProblem(
        gl.to_tensor(0), num_rows, num_keys, row_start, dq_rows, num_heads, num_kv_heads, num_tiles, heads_together,
        heads_together, num_works, gl.to_tensor(1),
        first_shift, num_rows, num_rows, stop_shift,  # one band: no second one, which would begin at `split`
        gl.to_tensor(0), first_ptr,  # no clock
        first_ptr, stop_ptr, tiles_ptr, stretches_ptr, gl.to_tensor(1.0),
        gl.to_tensor(1.0), BOUNDS, TWO_SIDED, False, 64, 2 * 64, False,
    )  # fmt: skip
    scales = Scales(q_scales_ptr, q_blocks, tile_scales_ptr, k_blocks)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_hold_first, (sm, problem, scales, maxima_ptr, stats_ptr, stats_stride, dq_desc)),
            (_hold_second, (sm, problem, scales, maxima_ptr, stats_ptr, stats_stride, dq_desc)),
            (_load, (sm, problem, q_desc, dout_desc, k8_desc, v8_desc, k1_desc, ends_desc, counter)),
        ],
        [4, 1],
        [240, 24],
    )
