"""dQ, dK, dV for head_dim up to 128: one CTA holds 128 keys and streams the queries past them.

A producer warp loads by TMA; two independent consumers of four warps own 64 keys each. With S^T = K Q^T and
dP^T = V dO^T of shape (keys, queries), P^T and dS^T never leave the registers on their way to dV and dK. dQ of a
query block needs the dS of both consumers: each computes half of its columns from what both left in shared memory
one step EARLIER, so that the consumers may drift apart by a step, one in exp while the other feeds the tensor
cores. The step before the first is a block of zeros. dQ leaves by TMA reduce-add, unscaled, in fp32, its columns
permuted within 32 (see `_interleave`; the postprocess kernel undoes it).
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
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@aggregate
class Shared:
    """Shared memory of a CTA, and the choices every role needs."""

    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    BLOCK_M: gl.constexpr
    HEAD_DIM: gl.constexpr
    STAGES: gl.constexpr
    KV_IN_REGISTERS: gl.constexpr
    WITH_DQ: gl.constexpr
    ACCUMULATE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        q,
        dout,
        k,
        v,
        stats,
        ds,
        dq,
        kv_full,
        kv_empty,
        q_full,
        q_empty,
        ds_full,
        BLOCK_M,
        HEAD_DIM,
        STAGES,
        KV_IN_REGISTERS,
        WITH_DQ,
        ACCUMULATE,
    ):
        self.q = q
        self.dout = dout
        self.k = k
        self.v = v
        self.stats = stats
        self.ds = ds
        self.dq = dq
        self.kv_full = kv_full
        self.kv_empty = kv_empty
        self.q_full = q_full
        self.q_empty = q_empty
        self.ds_full = ds_full
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.STAGES = gl.constexpr(STAGES)
        self.KV_IN_REGISTERS = gl.constexpr(KV_IN_REGISTERS)
        self.WITH_DQ = gl.constexpr(WITH_DQ)
        self.ACCUMULATE = gl.constexpr(ACCUMULATE)


@gluon.jit
def _load(sm, problem, q_desc, k_desc, v_desc, dout_desc, stats_desc):
    """Producer: K and V of each tile, then Q, dO and their statistics block by block."""
    M: gl.constexpr = sm.BLOCK_M
    step = 0
    round = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, _full_start, _full_stop = problem.blocks(key)
        if start < stop:
            mbarrier.wait(sm.kv_empty.index(0), (round & 1) ^ 1)
            mbarrier.expect(sm.kv_full.index(0), 4 * k_desc.block_type.nbytes)
            for half in gl.static_range(2):
                coord = [batch, key + half * 64, kv_head, 0]
                tma_load(k_desc, coord, sm.kv_full.index(0), sm.k.index(half))
                tma_load(v_desc, coord, sm.kv_full.index(0), sm.v.index(half))
            round += 1
            # The block of zeros before the first is a step without data.
            slot, parity = slot_of(step, sm.STAGES)
            mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
            mbarrier.arrive(sm.q_full.index(slot), count=1)
            step += 1
        block = problem.first_block(key, start, stop)
        for g in range(problem.group):
            head = first_head + g
            for _ in range(start, stop):
                slot, parity = slot_of(step, sm.STAGES)
                full = sm.q_full.index(slot)
                mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
                mbarrier.expect(full, 2 * q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
                tma_load(q_desc, [batch, block * M, head, 0], full, sm.q.index(slot))
                stats_coord = [batch * problem.num_heads + head, 0, problem.row_start + block * M]
                tma_load(stats_desc, stats_coord, full, sm.stats.index(slot))
                tma_load(dout_desc, [batch, block * M, head, 0], full, sm.dout.index(slot))
                block = problem.next_block(block, start, stop)
                step += 1


@gluon.jit
def _interleave(x, N: gl.constexpr):
    """Columns (j, t, e) of each 32 stored as (t, j, e), sizes 4, 4, 2: a thread's eight values become neighbours.

    No data moves between threads, and the stores to shared memory are 16 bytes wide without bank conflicts.
    """
    return x.reshape([64, N // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, N])


@gluon.jit
def _dq_mma(sm, buffer, W: gl.constexpr):
    """dQ = dS K over both consumers' keys, the columns of consumer W."""
    N: gl.constexpr = sm.HEAD_DIM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    ds0 = sm.ds.index(buffer * 2).permute((1, 0))
    ds1 = sm.ds.index(buffer * 2 + 1).permute((1, 0))
    k0 = sm.k.index(0).reshape([64, sm.HEAD_DIM]).slice(W * N, N, dim=1)
    k1 = sm.k.index(1).reshape([64, sm.HEAD_DIM]).slice(W * N, N, dim=1)
    dq = warpgroup_mma(ds0, k0, gl.zeros([64, N], gl.float32, layout), use_acc=False, is_async=True)
    return warpgroup_mma(ds1, k1, dq, is_async=True)


@gluon.jit
def _step(sm, problem, dq_desc, dk, dv, k, v, step, block, key, masked, dq_row, W: gl.constexpr):
    """One block of queries: P, dV, dS, dK of this block, dQ of the one before, at `dq_row`."""
    M: gl.constexpr = sm.BLOCK_M
    D: gl.constexpr = sm.HEAD_DIM
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    over_queries: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = sm.q.dtype
    slot, parity = slot_of(step, sm.STAGES)
    current = step & 1  # buffer of this block's dS
    last, last_parity = slot_of(step - 1, 2)
    q = sm.q.index(slot).reshape([M, D])
    dout = sm.dout.index(slot).reshape([M, D])
    stats = sm.stats.index(slot).reshape([2, M])
    zeros = gl.zeros([64, M], gl.float32, s_layout)

    # S^T = K Q^T and dP^T = V dO^T
    mbarrier.wait(sm.q_full.index(slot), parity)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)

    # P = exp(S - lse)
    lse = stats.slice(0, 1, dim=0).load(s_layout)
    s = warpgroup_mma_wait(1, deps=(s,))
    if masked:  # a second, masked loop would make ptxas spill in the first
        keys = key + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
        rows = block * M + gl.arange(0, M, layout=over_queries)
        s = gl.where(problem.visible(keys, rows), s, float("-inf"))
    p = gl.exp2(s * problem.scale_log2 - lse)
    p_operand = gl.convert_layout(p.to(dtype), operand)
    delta = stats.slice(1, 1, dim=0).load(s_layout)

    # dV += P^T dO, dQ of the previous block; the wait also keeps ptxas from moving exp behind the wgmma wait
    if sm.WITH_DQ:
        mbarrier.wait(sm.ds_full.index(last), last_parity)
    else:
        mbarrier.wait(sm.q_full.index(slot), parity)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    dv = warpgroup_mma(p_operand, dout, dv, is_async=True)
    if sm.WITH_DQ:
        dq = _dq_mma(sm, last, W)

    # dS = P (dP - delta), dK += dS^T Q
    ds = (p * (dp - delta)).to(dtype)
    ds_operand = gl.convert_layout(ds, operand)
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    if sm.WITH_DQ:
        tma_store_wait(0)
        sm.ds.index(current * 2 + W).store(ds)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        sm.dq.index(W).store(_interleave(dq, D // 2))
        fence_async_shared()
        mbarrier.arrive(sm.ds_full.index(current), count=1)
        tma_reduce_add(dq_desc, [dq_row, W * (D // 2)], sm.dq.index(W))
    dk, ds_operand, dv, p_operand = warpgroup_mma_wait(0, deps=(dk, ds_operand, dv, p_operand))
    mbarrier.arrive(sm.q_empty.index(slot), count=1)
    return dk, dv


@gluon.jit
def _last_dq(sm, dq_desc, step, dq_row, W: gl.constexpr):
    """dQ of a tile's last block, the one before `step`."""
    N: gl.constexpr = sm.HEAD_DIM // 2
    last, parity = slot_of(step - 1, 2)
    mbarrier.wait(sm.ds_full.index(last), parity)
    dq = _dq_mma(sm, last, W)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    tma_store_wait(0)
    sm.dq.index(W).store(_interleave(dq, N))
    fence_async_shared()
    tma_reduce_add(dq_desc, [dq_row, W * N], sm.dq.index(W))
    tma_store_wait(0)


@gluon.jit
def _halves(x, D: gl.constexpr):
    """Left and right half of the columns; stays within a thread."""
    return x.reshape([64, 2, D // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _write_kv(sm, dk_desc, dv_desc, dk, dv, batch, key, head, W: gl.constexpr):
    """Add (fp32) or store dK and dV of this consumer's 64 keys, staged in its V and dQ buffers."""
    D: gl.constexpr = sm.HEAD_DIM
    row = key + W * 64
    if sm.ACCUMULATE:
        left = sm.v.index(W)._reinterpret(gl.float32, [1, 64, 1, D // 2], dv_desc.layout)
        right = sm.dq.index(W)._reinterpret(gl.float32, [1, 64, 1, D // 2], dv_desc.layout)
        for which in gl.static_range(2):
            x, y = _halves(dk if which else dv, D)
            left.reshape([64, D // 2]).store(x)
            right.reshape([64, D // 2]).store(y)
            fence_async_shared()
            tma_reduce_add(dk_desc if which else dv_desc, [batch, row, head, 0], left)
            tma_reduce_add(dk_desc if which else dv_desc, [batch, row, head, D // 2], right)
            tma_store_wait(0)
    else:
        dtype: gl.constexpr = sm.v.dtype
        dv_staged = sm.v.index(W)
        dk_staged = sm.dq.index(W)._reinterpret(dtype, [1, 64, 1, D], dk_desc.layout)
        dv_staged.reshape([64, D]).store(dv.to(dtype))
        dk_staged.reshape([64, D]).store(dk.to(dtype))
        fence_async_shared()
        tma_store(dv_desc, [batch, row, head, 0], dv_staged)
        tma_store(dk_desc, [batch, row, head, 0], dk_staged)
        tma_store_wait(0)


@gluon.jit
def _consume(sm, problem, dq_desc, dk_desc, dv_desc, W: gl.constexpr):
    """Consumer W: gradients of 64 keys of every tile."""
    M: gl.constexpr = sm.BLOCK_M
    D: gl.constexpr = sm.HEAD_DIM
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    step = 0
    round = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, full_start, full_stop = problem.blocks(key)
        dk = gl.zeros([64, D], gl.float32, kv_layout)
        dv = gl.zeros([64, D], gl.float32, kv_layout)
        if start < stop:
            slot, parity = slot_of(step, sm.STAGES)
            mbarrier.wait(sm.q_full.index(slot), parity)
            mbarrier.arrive(sm.q_empty.index(slot), count=1)
            if sm.WITH_DQ:
                sm.ds.index((step & 1) * 2 + W).store(gl.zeros([64, M], sm.ds.dtype, s_layout))
                fence_async_shared()
                mbarrier.arrive(sm.ds_full.index(step & 1), count=1)
            step += 1
            mbarrier.wait(sm.kv_full.index(0), round & 1)
            if sm.KV_IN_REGISTERS:  # at head_dim 64 shared-memory bandwidth is the limit
                k = sm.k.index(W).reshape([64, D]).load(operand)
                v = sm.v.index(W).reshape([64, D]).load(operand)
            else:
                k = sm.k.index(W).reshape([64, D])
                v = sm.v.index(W).reshape([64, D])
            block = problem.first_block(key, start, stop)
            head_row = problem.dq_row(batch, first_head)
            dq_row = head_row + block * M
            for _g in range(problem.group):
                for _ in range(start, stop):
                    masked = (block < full_start) | (block >= full_stop)
                    dk, dv = _step(sm, problem, dq_desc, dk, dv, k, v, step, block, key, masked, dq_row, W)
                    step += 1
                    dq_row = head_row + block * M
                    block = problem.next_block(block, start, stop)
                head_row += problem.dq_rows
            if sm.WITH_DQ:
                _last_dq(sm, dq_desc, step, dq_row, W)
        dk = dk * problem.softmax_scale
        if sm.ACCUMULATE:
            if start < stop:
                _write_kv(sm, dk_desc, dv_desc, dk, dv, batch, key, kv_head, W)
        else:
            _write_kv(sm, dk_desc, dv_desc, dk, dv, batch, key, kv_head, W)
        if start < stop:
            mbarrier.arrive(sm.kv_empty.index(0), count=1)
            round += 1


@gluon.jit
def _consume_first(sm, problem, dq_desc, dk_desc, dv_desc):
    _consume(sm, problem, dq_desc, dk_desc, dv_desc, 0)


@gluon.jit
def _consume_second(sm, problem, dq_desc, dk_desc, dv_desc):
    _consume(sm, problem, dq_desc, dk_desc, dv_desc, 1)


_SCALARS = [
    "min_row",
    "num_rows",
    "num_keys",
    "row_start",
    "dq_rows",
    "num_heads",
    "num_kv_heads",
    "num_tiles",
    "num_works",
    "group",
    "first_shift",
    "stop_shift",
    "stagger",
]


@gluon.jit(do_not_specialize=_SCALARS)
def backward_keys(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    stats_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    first_ptr,
    stop_ptr,
    min_row,
    num_rows,
    num_keys,
    row_start,
    dq_rows,
    num_heads,
    num_kv_heads,
    num_tiles,
    num_works,
    group,
    first_shift,
    stop_shift,
    stagger,
    scale_log2,
    softmax_scale,
    BLOCK_M: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    KV_IN_REGISTERS: gl.constexpr,
    BOUNDS: gl.constexpr,
    WITH_DQ: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Launch with 4 warps on any number of CTAs up to `num_works`; see the module and `Problem`."""
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], q_desc.dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_empty.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
    sm = Shared(
        gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], dout_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [2, 1, 64, 1, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [2, 1, 64, 1, HEAD_DIM], v_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, BLOCK_M], stats_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [4, 64, BLOCK_M], ds_layout),
        gl.allocate_shared_memory(gl.float32, [2, 64, HEAD_DIM // 2], dq_desc.layout),
        kv_full,
        kv_empty,
        q_full,
        q_empty,
        ds_full,
        BLOCK_M,
        HEAD_DIM,
        STAGES,
        KV_IN_REGISTERS,
        WITH_DQ,
        ACCUMULATE,
    )
    problem = Problem(
        min_row,
        num_rows,
        num_keys,
        row_start,
        dq_rows,
        num_heads,
        num_kv_heads,
        num_tiles,
        num_works,
        group,
        first_shift,
        stop_shift,
        stagger,
        first_ptr,
        stop_ptr,
        scale_log2,
        softmax_scale,
        BOUNDS,
        BLOCK_M,
        2 * 64,
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_first, (sm, problem, dq_desc, dk_desc, dv_desc)),
            (_consume_second, (sm, problem, dq_desc, dk_desc, dv_desc)),
            (_load, (sm, problem, q_desc, k_desc, v_desc, dout_desc, stats_desc)),
        ],
        [4, 1],
        [240, 24],
    )
