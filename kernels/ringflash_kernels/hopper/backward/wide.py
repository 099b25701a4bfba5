"""dK and dV for head_dim 192 and 256: one CTA holds 64 keys and streams the queries past them.

dK and dV of 64 keys fill the registers of a consumer each, so the consumers divide the work by product:

    scores   S^T = K Q^T,  P = exp(S - lse) -> shared memory, dV += P^T dO
    grads    dP^T = V dO^T, dS = P (dP - delta),              dK += dS^T Q

The columns of Q and K are two pieces, SPLIT = 128 and REST = 128 (head_dim 256) or 64 (192), because tiles are powers
of two; those of V and dO are SPLIT and VALUE_REST, which may be 0. A consumer reads only K or only V, and stages dV or
dK in that buffer. `backward_queries` computes dQ: here every step would add a whole block of it, for half the products
of `backward_keys`.
"""

from ringflash_kernels.hopper.backward.problem import (
    KEY_TILE_ARGUMENTS,
    NUMBER,
    BackwardProblem,
    load_in_rounds,
    receive_number,
    slot_of,
)
from ringflash_kernels.hopper.compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    start_of,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Scale of P, which is at most 1, as fp16 in shared memory. With 11 significant bits dS is as exact as from an fp32 P,
# down to 2^-28; with P in bf16, as the product with dO has it, the error of dK was a quarter larger.
FINE = gl.constexpr(2.0**14)


@aggregate
class WideShared:
    """Shared memory of a CTA: operands in two pieces of columns, whose names end in 0 and 1.

    q, dout, stats   STAGES blocks of 64 queries: Q, dO, and lse with delta
    k, v             K and V of the tile's 64 keys
    p                P times FINE, from the consumer of scores to that of gradients
    ..._full         mbarriers that are signalled when a buffer is filled
    ..._empty        mbarriers that are signalled when it has been read
    begin, begins    as in `backward.keys.KeyShared`
    """

    q0: gl.shared_memory_descriptor
    q1: gl.shared_memory_descriptor
    dout0: gl.shared_memory_descriptor
    dout1: gl.shared_memory_descriptor
    k0: gl.shared_memory_descriptor
    k1: gl.shared_memory_descriptor
    v0: gl.shared_memory_descriptor
    v1: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    dout_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor
    begin: gl.shared_memory_descriptor
    begins: gl.shared_memory_descriptor
    SPLIT: gl.constexpr
    REST: gl.constexpr
    VALUE_REST: gl.constexpr
    STAGES: gl.constexpr
    HELD: gl.constexpr
    ACCUMULATE: gl.constexpr


@gluon.jit
def _load_rows(sm, problem, descs, batch, head, block, step):
    """Load Q with its statistics and dO of a block once the consumers have released the buffers."""
    q0_desc, q1_desc, dout0_desc, dout1_desc, stats_desc, begins_desc = descs
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.VALUE_REST
    nbytes: gl.constexpr = q0_desc.block_type.nbytes + q1_desc.block_type.nbytes
    value_nbytes: gl.constexpr = dout0_desc.block_type.nbytes + (dout1_desc.block_type.nbytes if R else 0)
    row = block * 64
    slot, parity = slot_of(step, sm.STAGES)
    q_full = sm.q_full.index(slot)
    mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
    mbarrier.expect(q_full, nbytes + stats_desc.block_type.nbytes + (64 * 4 if problem.BEGINS else 0))
    tma_load(q0_desc, [batch, head, row, 0], q_full, sm.q0.index(slot))
    tma_load(q1_desc, [batch, head, row, C], q_full, sm.q1.index(slot))
    stats_coord = [batch * problem.num_heads + head, 0, problem.row_start + row]
    tma_load(stats_desc, stats_coord, q_full, sm.stats.index(slot))
    if problem.BEGINS:
        tma_load(begins_desc, [0, row], q_full, sm.begins.index(slot))
    dout_full = sm.dout_full.index(slot)
    mbarrier.wait(sm.dout_empty.index(slot), parity ^ 1)
    mbarrier.expect(dout_full, value_nbytes)
    tma_load(dout0_desc, [batch, head, row, 0], dout_full, sm.dout0.index(slot))
    if R:
        tma_load(dout1_desc, [batch, head, row, C], dout_full, sm.dout1.index(slot))


@gluon.jit
def _load_wide(
    sm, problem, q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, v1_desc, dout0_desc, dout1_desc, stats_desc, begins_desc
):
    """Producer: load K and V of each tile, then Q with its statistics and dO block by block."""
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.VALUE_REST
    nbytes: gl.constexpr = q0_desc.block_type.nbytes + q1_desc.block_type.nbytes
    value_nbytes: gl.constexpr = dout0_desc.block_type.nbytes + (dout1_desc.block_type.nbytes if R else 0)
    descs = (q0_desc, q1_desc, dout0_desc, dout1_desc, stats_desc, begins_desc)
    step = 0
    round = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, _full_start, _full_stop, first, count = problem.steps(index, key)
        # Also for tiles that no query sees: their zeros may be written from the buffers of K and V.
        kv_full = sm.kv_full.index(0)
        mbarrier.wait(sm.kv_empty.index(0), (round & 1) ^ 1)
        mbarrier.expect(kv_full, nbytes + value_nbytes)
        tma_load(k0_desc, [batch, kv_head, key, 0], kv_full, sm.k0)
        tma_load(k1_desc, [batch, kv_head, key, C], kv_full, sm.k1)
        tma_load(v0_desc, [batch, kv_head, key, 0], kv_full, sm.v0)
        if R:
            tma_load(v1_desc, [batch, kv_head, key, C], kv_full, sm.v1)
        round += 1
        step = load_in_rounds(sm, problem, _load_rows, descs, batch, first_head, start, stop, first, count, step)


@gluon.jit
def _write_chunk(sm, desc, x, coord, column, W: gl.constexpr):
    """Add or store 64 columns of dK or dV."""
    at = [coord[0], coord[1], coord[2], column]
    if W == 0:
        staged = start_of(sm.k0, desc)
    else:
        staged = start_of(sm.v0, desc)
    tma_store_wait(0)
    staged.reshape([64, 64]).store(x.to(desc.dtype))
    fence_async_shared()
    if sm.ACCUMULATE:
        tma_reduce_add(desc, at, staged)
    else:
        tma_store(desc, at, staged)


@gluon.jit
def _write_wide(sm, desc, x0, x1, batch, key, head, W: gl.constexpr, R: gl.constexpr):
    """Add or store dK or dV of a tile."""
    coord = [batch, head, key]
    left, right = x0.reshape([64, 2, 64]).permute([0, 2, 1]).split()
    _write_chunk(sm, desc, left, coord, 0, W)
    _write_chunk(sm, desc, right, coord, 64, W)
    if R == 128:
        left, right = x1.reshape([64, 2, 64]).permute([0, 2, 1]).split()
        _write_chunk(sm, desc, left, coord, 128, W)
        _write_chunk(sm, desc, right, coord, 192, W)
    elif R:
        _write_chunk(sm, desc, x1, coord, 128, W)
    tma_store_wait(0)


@gluon.jit
def _register_operand(sm, piece):
    """Load the first HELD columns of K or V as a register operand."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    part = piece.reshape([64, sm.SPLIT]).slice(0, sm.HELD, dim=1)
    return part.load(gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _product(sm, held, keys0, keys1, rows0, rows1, R: gl.constexpr):
    """Issue S^T (of K and Q) or dP^T (of V and dO)."""
    C: gl.constexpr = sm.SPLIT
    H: gl.constexpr = sm.HELD
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    x = gl.zeros([64, 64], gl.float32, layout)
    keys = keys0.reshape([64, C])
    rows = rows0.reshape([64, C])
    x = warpgroup_mma(held, rows.slice(0, H, dim=1).permute((1, 0)), x, use_acc=False, is_async=True)
    if H < C:
        rows = rows.slice(H, C - H, dim=1).permute((1, 0))
        x = warpgroup_mma(keys.slice(H, C - H, dim=1), rows, x, is_async=True)
    if R:
        x = warpgroup_mma(keys1.reshape([64, R]), rows1.reshape([64, R]).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def _score_step(sm, problem, k, dv0, dv1, step, block, key, masked):
    """Process one block of queries: S, P and dV."""
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.VALUE_REST
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    slot, parity = slot_of(step, sm.STAGES)

    # P = exp(S - lse)
    mbarrier.wait(sm.q_full.index(slot), parity)
    s = _product(sm, k, sm.k0, sm.k1, sm.q0.index(slot), sm.q1.index(slot), sm.REST)
    lse = sm.stats.index(slot).reshape([2, 64]).slice(0, 1, dim=0).load(s_layout)
    s = warpgroup_mma_wait(0, deps=(s,))
    if problem.TWO_SIDED:  # what the producer says of the step is released with Q
        number = receive_number(sm.begin.index(slot))
        block = number >> 1
        masked = (number & 1) != 0
    else:
        mbarrier.arrive(sm.q_empty.index(slot), count=1)
    if masked:
        keys = key + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
        rows = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
        s = gl.where(problem.visible(keys, rows), s, float("-inf"))
        if problem.BEGINS:
            begins = sm.begins.index(slot).reshape([64]).load(gl.SliceLayout(0, s_layout))
            s = gl.where(keys[:, None] >= begins[None, :], s, float("-inf"))
    if problem.TWO_SIDED:
        mbarrier.arrive(sm.q_empty.index(slot), count=1)
    p_exact = gl.exp2(s * problem.scale_log2 - lse)
    p = p_exact.to(sm.q0.dtype)
    mbarrier.wait(sm.p_empty.index(0), (step & 1) ^ 1)
    sm.p.store((p_exact * FINE).to(gl.float16))
    mbarrier.arrive(sm.p_full.index(0), count=1)

    # dV += P^T dO
    mbarrier.wait(sm.dout_full.index(slot), parity)
    p0 = gl.convert_layout(p, gl.DotOperandLayout(0, layout0, 2))
    if R:
        layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
        p1 = gl.convert_layout(p, gl.DotOperandLayout(0, layout1, 2))
        dv0 = warpgroup_mma(p0, sm.dout0.index(slot).reshape([64, C]), dv0, is_async=True)
        dv1 = warpgroup_mma(p1, sm.dout1.index(slot).reshape([64, R]), dv1, is_async=True)
        dv0, dv1, p0, p1 = warpgroup_mma_wait(0, deps=(dv0, dv1, p0, p1))
    else:
        dv0 = warpgroup_mma(p0, sm.dout0.index(slot).reshape([64, C]), dv0, is_async=True)
        dv0, p0 = warpgroup_mma_wait(0, deps=(dv0, p0))
    mbarrier.arrive(sm.dout_empty.index(slot), count=1)
    return dv0, dv1


@gluon.jit
def _gradient_step(sm, v, dk0, dk1, step):
    """Process one block of queries: dP, dS and dK."""
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.REST
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    slot, parity = slot_of(step, sm.STAGES)
    q0 = sm.q0.index(slot).reshape([64, C])
    q1 = sm.q1.index(slot).reshape([64, R])

    # dS = P (dP - delta)
    mbarrier.wait(sm.dout_full.index(slot), parity)
    dp = _product(sm, v, sm.v0, sm.v1, sm.dout0.index(slot), sm.dout1.index(slot), sm.VALUE_REST)
    mbarrier.wait(sm.q_full.index(slot), parity)
    delta = sm.stats.index(slot).reshape([2, 64]).slice(1, 1, dim=0).load(s_layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(sm.dout_empty.index(slot), count=1)
    mbarrier.wait(sm.p_full.index(0), step & 1)
    p = sm.p.load(s_layout).to(gl.float32) * (1 / FINE)
    mbarrier.arrive(sm.p_empty.index(0), count=1)
    ds = (p * (dp - delta)).to(sm.q0.dtype)

    # dK += dS^T Q
    ds0 = gl.convert_layout(ds, gl.DotOperandLayout(0, layout0, 2))
    ds1 = gl.convert_layout(ds, gl.DotOperandLayout(0, layout1, 2))
    dk0 = warpgroup_mma(ds0, q0, dk0, is_async=True)
    dk1 = warpgroup_mma(ds1, q1, dk1, is_async=True)
    dk0, dk1, ds0, ds1 = warpgroup_mma_wait(0, deps=(dk0, dk1, ds0, ds1))
    mbarrier.arrive(sm.q_empty.index(slot), count=1)
    return dk0, dk1


@gluon.jit
def _consume_scores(sm, problem, dv_desc):
    """First consumer: compute dV."""
    R: gl.constexpr = sm.VALUE_REST
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sm.SPLIT, 16])
    step = 0
    round = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, full_start, full_stop, _first, _count = problem.steps(index, key)
        dv0 = gl.zeros([64, sm.SPLIT], gl.float32, layout0)
        if R:
            layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
            dv1 = gl.zeros([64, R], gl.float32, layout1)
        else:
            dv1 = 0
        mbarrier.wait(sm.kv_full.index(0), round & 1)
        k = _register_operand(sm, sm.k0)
        if problem.TWO_SIDED:
            for _ in range(problem.group * stop):
                dv0, dv1 = _score_step(sm, problem, k, dv0, dv1, step, 0, key, False)
                step += 1
        elif start < stop:
            for _g in range(problem.group):
                slot, parity = slot_of(step, sm.STAGES)
                mbarrier.wait(sm.q_full.index(slot), parity)
                block = receive_number(sm.begin.index(slot))
                for _ in range(start, stop):
                    masked = (block < full_start) | (block >= full_stop)
                    dv0, dv1 = _score_step(sm, problem, k, dv0, dv1, step, block, key, masked)
                    block = problem.next_block(block, start, stop)
                    step += 1
        if (not sm.ACCUMULATE) | (start < stop):
            _write_wide(sm, dv_desc, dv0, dv1, batch, key, kv_head, 0, R)
        mbarrier.arrive(sm.kv_empty.index(0), count=1)
        round += 1


@gluon.jit
def _consume_gradients(sm, problem, dk_desc):
    """Second consumer: compute dK."""
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sm.SPLIT, 16])
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sm.REST, 16])
    step = 0
    round = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, _full_start, _full_stop, _first, _count = problem.steps(index, key)
        dk0 = gl.zeros([64, sm.SPLIT], gl.float32, layout0)
        dk1 = gl.zeros([64, sm.REST], gl.float32, layout1)
        mbarrier.wait(sm.kv_full.index(0), round & 1)
        v = _register_operand(sm, sm.v0)
        for _ in range(problem.group * (stop - start)):
            dk0, dk1 = _gradient_step(sm, v, dk0, dk1, step)
            step += 1
        if (not sm.ACCUMULATE) | (start < stop):
            dk0, dk1 = dk0 * problem.softmax_scale, dk1 * problem.softmax_scale
            _write_wide(sm, dk_desc, dk0, dk1, batch, key, kv_head, 1, sm.REST)
        mbarrier.arrive(sm.kv_empty.index(0), count=1)
        round += 1


@gluon.jit(do_not_specialize=KEY_TILE_ARGUMENTS)
def backward_wide(
    q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, v1_desc, dout0_desc, dout1_desc, stats_desc, dk_desc, dv_desc,
    begins_desc, first_ptr, stop_ptr, tiles_ptr, stretches_ptr, min_row, num_rows, num_keys, row_start,
    dq_rows, num_heads, num_kv_heads, num_tiles, heads_together, num_works, group, first_shift, split, second_shift,
    stop_shift, period, clock_ptr, scale_log2, softmax_scale,
    SPLIT: gl.constexpr, REST: gl.constexpr, VALUE_REST: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    BOUNDS: gl.constexpr, TWO_SIDED: gl.constexpr, BEGINS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """dK and dV; launch with 4 warps on any number of CTAs up to `num_works`. See the module and `BackwardProblem`.

    HELD: columns of the first piece of K and V that are kept in registers.
    """
    dtype: gl.constexpr = q0_desc.dtype
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    dout_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    p_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    p_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_empty.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(dout_empty.index(i), count=2)
    mbarrier.init(p_full.index(0), count=1)
    mbarrier.init(p_empty.index(0), count=1)
    begin = gl.allocate_shared_memory(gl.int32, [STAGES, 1], NUMBER)
    if BEGINS:
        begins = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 64], begins_desc.layout)
    else:
        begins = begin
    p = gl.allocate_shared_memory(gl.float16, [64, 64], p_layout)
    q0 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, SPLIT], q0_desc.layout)
    q1 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, REST], q1_desc.layout)
    dout0 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, SPLIT], dout0_desc.layout)
    if VALUE_REST:
        dout1 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, VALUE_REST], dout1_desc.layout)
    else:
        dout1 = dout0
    k0 = gl.allocate_shared_memory(dtype, [1, 1, 64, SPLIT], k0_desc.layout)
    k1 = gl.allocate_shared_memory(dtype, [1, 1, 64, REST], k1_desc.layout)
    v0 = gl.allocate_shared_memory(dtype, [1, 1, 64, SPLIT], v0_desc.layout)
    if VALUE_REST:
        v1 = gl.allocate_shared_memory(dtype, [1, 1, 64, VALUE_REST], v1_desc.layout)
    else:
        v1 = v0
    sm = WideShared(
        q0, q1, dout0, dout1, k0, k1, v0, v1,
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, 64], stats_desc.layout), p, kv_full, kv_empty, q_full,
        q_empty, dout_full, dout_empty, p_full, p_empty, begin, begins, SPLIT, REST, VALUE_REST, STAGES, HELD,
        ACCUMULATE,
    )  # fmt: skip
    if not TWO_SIDED:
        tiles_ptr = first_ptr  # not read
        stretches_ptr = first_ptr
    problem = BackwardProblem(
        min_row, num_rows, num_keys, row_start, dq_rows, num_heads, num_kv_heads, num_tiles, heads_together,
        heads_together, num_works, group, first_shift, split, second_shift, stop_shift, period, clock_ptr, first_ptr,
        stop_ptr, tiles_ptr, stretches_ptr, scale_log2, softmax_scale, BOUNDS, TWO_SIDED, BEGINS, 64, 64, False,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_scores, (sm, problem, dv_desc)),
            (_consume_gradients, (sm, problem, dk_desc)),
            (
                _load_wide,
                (
                    sm,
                    problem,
                    q0_desc,
                    q1_desc,
                    k0_desc,
                    k1_desc,
                    v0_desc,
                    v1_desc,
                    dout0_desc,
                    dout1_desc,
                    stats_desc,
                    begins_desc,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
