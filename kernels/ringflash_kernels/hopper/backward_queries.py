"""dQ alone, in a fixed order: one CTA holds 128 queries and streams the keys past them.

For `deterministic=True`: each element of the dQ accumulator gets one addition a hop, where the keys kernel's
reduce-adds come in any order. S and dP are computed a second time (7 products a tile instead of 5). `Problem`
is read with queries and keys exchanged: its "keys" are the queries held, its "rows" the keys streamed.
"""

from ringflash_kernels.hopper.backward_problem import Problem, slot_of
from ringflash_kernels.hopper.compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_reduce_add,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@aggregate
class QueryShared:
    """Shared memory of a CTA."""

    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    BLOCK: gl.constexpr
    HEAD_DIM: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, dout, k, v, q_full, q_empty, kv_full, kv_empty, BLOCK, HEAD_DIM, STAGES):
        self.q = q
        self.dout = dout
        self.k = k
        self.v = v
        self.q_full = q_full
        self.q_empty = q_empty
        self.kv_full = kv_full
        self.kv_empty = kv_empty
        self.BLOCK = gl.constexpr(BLOCK)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.STAGES = gl.constexpr(STAGES)


@gluon.jit
def _load_keys(sm, problem, q_desc, dout_desc, k_desc, v_desc):
    """Producer: Q and dO of each tile, then K and V block by block."""
    step = 0
    round = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        row, batch, head, kv_head = problem.work(index)
        start, stop, _full_start, _full_stop = problem.blocks(row)
        if start < stop:
            mbarrier.wait(sm.q_empty.index(0), (round & 1) ^ 1)
            mbarrier.expect(sm.q_full.index(0), 4 * q_desc.block_type.nbytes)
            for half in gl.static_range(2):
                coord = [batch, head, row + half * 64, 0]
                tma_load(q_desc, coord, sm.q_full.index(0), sm.q.index(half))
                tma_load(dout_desc, coord, sm.q_full.index(0), sm.dout.index(half))
            round += 1
        for block in range(start, stop):
            slot, parity = slot_of(step, sm.STAGES)
            mbarrier.wait(sm.kv_empty.index(slot), parity ^ 1)
            mbarrier.expect(sm.kv_full.index(slot), 2 * k_desc.block_type.nbytes)
            coord = [batch, kv_head, block * sm.BLOCK, 0]
            tma_load(k_desc, coord, sm.kv_full.index(slot), sm.k.index(slot))
            tma_load(v_desc, coord, sm.kv_full.index(slot), sm.v.index(slot))
            step += 1


@gluon.jit
def _add_queries(sm, problem, dq, lse, delta, step, block, row, masked, W: gl.constexpr):
    """dQ += dS K for one block of keys."""
    N: gl.constexpr = sm.BLOCK
    D: gl.constexpr = sm.HEAD_DIM
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dq_layout, 2)
    slot, parity = slot_of(step, sm.STAGES)
    k = sm.k.index(slot).reshape([N, D])
    v = sm.v.index(slot).reshape([N, D])
    q = sm.q.index(W).reshape([64, D])
    dout = sm.dout.index(W).reshape([64, D])
    zeros = gl.zeros([64, N], gl.float32, s_layout)

    mbarrier.wait(sm.kv_full.index(slot), parity)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(dout, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    if masked:
        rows = row + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
        keys = block * N + gl.arange(0, N, layout=gl.SliceLayout(0, s_layout))
        s = gl.where(problem.visible(rows, keys), s, float("-inf"))
    p = gl.exp2(s * problem.scale_log2 - lse[:, None])
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(sm.q.dtype), operand)
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
    mbarrier.arrive(sm.kv_empty.index(slot), count=1)
    return dq


@gluon.jit
def _interleave_columns(x, N: gl.constexpr):
    """Columns (j, t, e) of each 32 stored as (t, j, e): the order of the keys kernel's dQ."""
    return x.reshape([64, N // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, N])


@gluon.jit
def _hold(sm, problem, stats_ptr, stats_stride, row_start, dq_desc, W: gl.constexpr):
    """Consumer W: dQ of 64 queries of every tile."""
    D: gl.constexpr = sm.HEAD_DIM
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sm.BLOCK, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    step = 0
    round = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        row, batch, head, kv_head = problem.work(index)
        start, stop, full_start, full_stop = problem.blocks(row)
        if start < stop:
            batch_head = batch * problem.num_heads + head
            rows = row + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            inside = rows < problem.num_keys
            stats = stats_ptr + batch_head.to(gl.int64) * 2 * stats_stride + row_start
            lse = gl.load(stats + rows, mask=inside, other=float("inf"))
            delta = gl.load(stats + stats_stride + rows, mask=inside, other=0.0)
            dq = gl.zeros([64, D], gl.float32, dq_layout)
            mbarrier.wait(sm.q_full.index(0), round & 1)
            for block in range(start, stop):
                masked = (block < full_start) | (block >= full_stop)
                dq = _add_queries(sm, problem, dq, lse, delta, step, block, row, masked, W)
                step += 1
            staged = sm.q.index(W)._reinterpret(gl.float32, [64, D // 2], dq_desc.layout)
            left, right = dq.reshape([64, 2, D // 2]).permute([0, 2, 1]).split()
            for half in gl.static_range(2):
                staged.store(_interleave_columns(right if half else left, D // 2))
                fence_async_shared()
                tma_reduce_add(dq_desc, [problem.dq_row(batch, head) + row + W * 64, half * (D // 2)], staged)
                tma_store_wait(0)
            mbarrier.arrive(sm.q_empty.index(0), count=1)
            round += 1


@gluon.jit
def _hold_first(sm, problem, stats_ptr, stats_stride, row_start, dq_desc):
    _hold(sm, problem, stats_ptr, stats_stride, row_start, dq_desc, 0)


@gluon.jit
def _hold_second(sm, problem, stats_ptr, stats_stride, row_start, dq_desc):
    _hold(sm, problem, stats_ptr, stats_stride, row_start, dq_desc, 1)


@gluon.jit(
    do_not_specialize=[
        "stats_ptr", "first_ptr", "stop_ptr", "stats_stride", "row_start", "dq_rows", "num_rows", "num_keys",
        "num_heads", "num_kv_heads", "num_tiles", "heads_together", "num_works", "first_shift", "stop_shift",
    ]
)  # fmt: skip
def backward_queries(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dq_desc,
    stats_ptr,
    first_ptr,
    stop_ptr,
    stats_stride,
    row_start,
    dq_rows,
    num_rows,
    num_keys,
    num_heads,
    num_kv_heads,
    num_tiles,
    heads_together,
    num_works,
    first_shift,
    stop_shift,
    scale_log2,
    softmax_scale,
    BLOCK: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    BOUNDS: gl.constexpr,
):
    """Launch with 4 warps on any number of CTAs up to `num_works`; see the module and `Problem`."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    sm = QueryShared(
        gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, HEAD_DIM], dout_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK, HEAD_DIM], v_desc.layout),
        q_full,
        q_empty,
        kv_full,
        kv_empty,
        BLOCK,
        HEAD_DIM,
        STAGES,
    )
    problem = Problem(
        gl.to_tensor(0),
        num_rows,
        num_keys,
        row_start,
        dq_rows,
        num_heads,
        num_kv_heads,
        num_tiles,
        heads_together,
        num_works,
        gl.to_tensor(1),
        first_shift,
        num_rows,  # one band
        num_rows,
        stop_shift,
        gl.to_tensor(0),
        first_ptr,  # not read
        first_ptr,
        stop_ptr,
        scale_log2,
        softmax_scale,
        BOUNDS,
        BLOCK,
        2 * 64,
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_hold_first, (sm, problem, stats_ptr, stats_stride, row_start, dq_desc)),
            (_hold_second, (sm, problem, stats_ptr, stats_stride, row_start, dq_desc)),
            (_load_keys, (sm, problem, q_desc, dout_desc, k_desc, v_desc)),
        ],
        [4, 1],
        [240, 24],
    )
