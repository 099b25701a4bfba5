"""dQ, dK, dV of latent attention (head_dim 192, values of 128): one CTA holds 128 keys, each of two consumers 64.

As `backward_keys`, but dK and dV of 64 keys take 160 of a thread's 240 registers. So a step computes one after another:
S; dV and a third of dQ of the previous block; dP; dK and the rest of that dQ. Until dP is known, P is kept in fp16. The
consumers do not alternate: without a rule, one of them computes products most of the time.

The columns of Q and K are two pieces, of SPLIT = 128 and REST = 64 columns, those of V and dO are one of SPLIT. Each
consumer computes half of either piece of dQ. Indices of K and V are `hidden` from the compiler, which would keep the
addresses of all of them in registers.
"""

from ringflash_kernels.hopper.backward.problem import (
    KEY_TILE_ARGUMENTS,
    NUMBER,
    BackwardProblem,
    halves,
    interleave,
    load_in_rounds,
    receive_number,
    slot_of,
)
from ringflash_kernels.hopper.backward.wide import FINE
from ringflash_kernels.hopper.compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    hidden,
    mbarrier,
    packed,
    start_of,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    unpacked,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@aggregate
class LatentShared:
    """Shared memory of a CTA: Q and K in two pieces of columns, whose names end in 0 and 1.

    q, dout, stats        STAGES blocks of 64 queries: Q, dO, and lse with delta
    k, v                  K and V of the tile's 128 keys, by consumer
    ds                    dS^T of this block and of the previous one, by consumer: buffer * 2 + W
    dq_first, dq_second   columns of dQ, dK or dV that a consumer sends
    ..._full              mbarriers that are signalled when a buffer is filled
    ..._empty             mbarriers that are signalled when it has been read
    begin, begins         as in `backward.keys.KeyShared`
    """

    q0: gl.shared_memory_descriptor
    q1: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    k0: gl.shared_memory_descriptor
    k1: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq_first: gl.shared_memory_descriptor
    dq_second: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    begin: gl.shared_memory_descriptor
    begins: gl.shared_memory_descriptor
    SPLIT: gl.constexpr
    REST: gl.constexpr
    STAGES: gl.constexpr
    ACCUMULATE: gl.constexpr


@gluon.jit
def _load_rows(sm, problem, descs, batch, head, block, step):
    """Load Q, dO and their statistics of a block once both consumers have released the buffer."""
    q0_desc, q1_desc, dout_desc, stats_desc, begins_desc = descs
    nbytes: gl.constexpr = q0_desc.block_type.nbytes + q1_desc.block_type.nbytes + dout_desc.block_type.nbytes
    row = block * 64
    slot, parity = slot_of(step, sm.STAGES)
    full = sm.q_full.index(slot)
    mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
    mbarrier.expect(full, nbytes + stats_desc.block_type.nbytes + (64 * 4 if problem.BEGINS else 0))
    tma_load(q0_desc, [batch, head, row, 0], full, sm.q0.index(slot))
    tma_load(q1_desc, [batch, head, row, sm.SPLIT], full, sm.q1.index(slot))
    stats_coord = [batch * problem.num_heads + head, 0, problem.row_start + row]
    tma_load(stats_desc, stats_coord, full, sm.stats.index(slot))
    if problem.BEGINS:
        tma_load(begins_desc, [0, row], full, sm.begins.index(slot))
    tma_load(dout_desc, [batch, head, row, 0], full, sm.dout.index(slot))


@gluon.jit
def _load(sm, problem, q0_desc, q1_desc, k0_desc, k1_desc, v_desc, dout_desc, stats_desc, begins_desc):
    """Producer: load K and V of each tile, then Q, dO and their statistics block by block."""
    nbytes: gl.constexpr = k0_desc.block_type.nbytes + k1_desc.block_type.nbytes + v_desc.block_type.nbytes
    descs = (q0_desc, q1_desc, dout_desc, stats_desc, begins_desc)
    step = 0
    round = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, _full_start, _full_stop, first, count = problem.steps(index, key)
        # Also for tiles that no query sees: their zeros may be written from the buffers of V.
        full = sm.kv_full.index(0)
        mbarrier.wait(sm.kv_empty.index(0), (round & 1) ^ 1)
        mbarrier.expect(full, 2 * nbytes)
        for half in gl.static_range(2):
            row = key + half * 64
            tma_load(k0_desc, [batch, kv_head, row, 0], full, sm.k0.index(half))
            tma_load(k1_desc, [batch, kv_head, row, sm.SPLIT], full, sm.k1.index(half))
            tma_load(v_desc, [batch, kv_head, row, 0], full, sm.v.index(half))
        round += 1
        if start < stop:  # the block of zeros that precedes the first is a step without data
            slot, parity = slot_of(step, sm.STAGES)
            mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
            mbarrier.arrive(sm.q_full.index(slot), count=1)
            step += 1
        step = load_in_rounds(sm, problem, _load_rows, descs, batch, first_head, start, stop, first, count, step)


@gluon.jit
def _dq_mma(sm, buffer, keys, C: gl.constexpr, W: gl.constexpr):
    """Issue dQ = dS K over both consumers' keys, for consumer W's half of the C columns of one piece of K."""
    N: gl.constexpr = C // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    left = keys.index(hidden(0)).reshape([64, C]).slice(W * N, N, dim=1)
    right = keys.index(hidden(1)).reshape([64, C]).slice(W * N, N, dim=1)
    ds = sm.ds.index(buffer * 2).permute((1, 0))
    dq = warpgroup_mma(ds, left, gl.zeros([64, N], gl.float32, layout), use_acc=False, is_async=True)
    return warpgroup_mma(sm.ds.index(buffer * 2 + 1).permute((1, 0)), right, dq, is_async=True)


@gluon.jit
def _staging(sm, W: gl.constexpr):
    """Return the buffer in which consumer W stages its columns of dQ, once what was there has been read."""
    tma_store_wait(0)
    if W == 0:
        staged = sm.dq_first
    else:
        staged = sm.dq_second
    return staged


@gluon.jit
def _send_rest(sm, dq1_desc, dq_row, dq1, W: gl.constexpr):
    """Add this consumer's columns of the second piece to dQ."""
    staged = start_of(_staging(sm, W), dq1_desc)
    staged.store(interleave(dq1, 32))
    fence_async_shared()
    tma_reduce_add(dq1_desc, [dq_row, 128 + 32 * W], staged)


@gluon.jit
def _step(sm, problem, dq0_desc, dq1_desc, dk0, dk1, dv, step, block, key, seen, masked, dq_row, W: gl.constexpr):
    """Process one block of queries: P, dV, dS and dK of this block, and dQ of the previous one, at `dq_row`.

    If TWO_SIDED, the producer says which block it is and whether it is masked.
    """
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.REST
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    dtype: gl.constexpr = sm.q0.dtype
    slot, parity = slot_of(step, sm.STAGES)
    current = step & 1  # buffer of this block's dS
    last, last_parity = slot_of(step - 1, 2)
    q0 = sm.q0.index(slot).reshape([64, C])
    q1 = sm.q1.index(slot).reshape([64, R])
    dout = sm.dout.index(slot).reshape([64, C])
    stats = sm.stats.index(slot).reshape([2, 64])
    zeros = gl.zeros([64, 64], gl.float32, s_layout)
    k0 = sm.k0.index(hidden(W)).reshape([64, C])
    k1 = sm.k1.index(hidden(W)).reshape([64, R])
    v = sm.v.index(hidden(W)).reshape([64, C])

    # S^T = K Q^T
    mbarrier.wait(sm.q_full.index(slot), parity)
    s = warpgroup_mma(k0, q0.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma(k1, q1.permute((1, 0)), s, is_async=True)

    # P = exp(S - lse)
    lse = stats.slice(0, 1, dim=0).load(s_layout)
    s = warpgroup_mma_wait(0, deps=(s,))
    if problem.TWO_SIDED:
        number = receive_number(sm.begin.index(slot))
        block = number >> 1
        masked = (number & 1) != 0
    if masked:
        if problem.BOUNDS:
            first_row, stop_row = seen
        else:
            keys = key + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            first_row, stop_row = problem.rows_seeing(keys)
        columns = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
        inside = problem.within_block(block * 64, columns, first_row, stop_row)
        if problem.BEGINS:
            begins = sm.begins.index(slot).reshape([64]).load(gl.SliceLayout(0, s_layout))
            keys = key + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            inside = inside & (keys[:, None] >= begins[None, :])
        s = gl.where(inside, s, float("-inf"))
    p = gl.exp2(s * problem.scale_log2 - lse)
    p_bits = packed(p, dtype)
    operand = gl.convert_layout(p_bits, gl.DotOperandLayout(0, layout0, 2))
    fine = packed(p * FINE, gl.float16)

    # A third of dQ of the previous block, dV += P^T dO
    mbarrier.wait(sm.ds_full.index(last), last_parity)  # also keeps ptxas from moving exp past the wgmma wait
    dq1 = _dq_mma(sm, last, sm.k1, R, W)
    dv = warpgroup_mma(operand, dout, dv, is_async=True)
    dq1 = warpgroup_mma_wait(1, deps=(dq1,))
    _send_rest(sm, dq1_desc, dq_row, dq1, W)
    dv, operand = warpgroup_mma_wait(0, deps=(dv, operand))

    # dP^T = V dO^T, dS = P (dP - delta)
    dp = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    delta = stats.slice(1, 1, dim=0).load(s_layout)
    ds = (unpacked(fine) * (dp * (1 / FINE) - delta * (1 / FINE))).to(dtype)
    ds0 = gl.convert_layout(ds, gl.DotOperandLayout(0, layout0, 2))
    ds1 = gl.convert_layout(ds, gl.DotOperandLayout(0, layout1, 2))

    # The rest of dQ of the previous block, dK += dS^T Q
    dq0 = _dq_mma(sm, last, sm.k0, C, W)
    dk0 = warpgroup_mma(ds0, q0, dk0, is_async=True)
    dk1 = warpgroup_mma(ds1, q1, dk1, is_async=True)
    sm.ds.index(current * 2 + W).store(ds)
    dq0 = warpgroup_mma_wait(2, deps=(dq0,))
    staged = _staging(sm, W)
    staged.store(interleave(dq0, 64))
    fence_async_shared()
    mbarrier.arrive(sm.ds_full.index(current), count=1)
    tma_reduce_add(dq0_desc, [dq_row, 64 * W], staged)
    dk0, dk1, ds0, ds1 = warpgroup_mma_wait(0, deps=(dk0, dk1, ds0, ds1))
    mbarrier.arrive(sm.q_empty.index(slot), count=1)
    return dk0, dk1, dv, block


@gluon.jit
def _last_dq(sm, dq0_desc, dq1_desc, step, dq_row, W: gl.constexpr):
    """Compute dQ of a tile's last block, whose step is `step` - 1, and let it leave."""
    last, parity = slot_of(step - 1, 2)
    mbarrier.wait(sm.ds_full.index(last), parity)
    dq0 = _dq_mma(sm, last, sm.k0, sm.SPLIT, W)
    dq1 = _dq_mma(sm, last, sm.k1, sm.REST, W)
    dq0, dq1 = warpgroup_mma_wait(0, deps=(dq0, dq1))
    _send_rest(sm, dq1_desc, dq_row, dq1, W)
    staged = _staging(sm, W)
    staged.store(interleave(dq0, 64))
    fence_async_shared()
    tma_reduce_add(dq0_desc, [dq_row, 64 * W], staged)
    tma_store_wait(0)


@gluon.jit
def _write_chunk(sm, desc, x, coord, column, CHUNK: gl.constexpr, W: gl.constexpr):
    """Add or store 64 columns of dK or dV, staged in this consumer's V and its buffers of dQ alternately."""
    if CHUNK % 2:
        staged = start_of(sm.dq_second if W else sm.dq_first, desc)
    else:
        staged = start_of(sm.v.index(W), desc)
    tma_store_wait(1)
    staged.reshape([64, 64]).store(x.to(desc.dtype))
    fence_async_shared()
    at = [coord[0], coord[1], coord[2], column]
    if sm.ACCUMULATE:
        tma_reduce_add(desc, at, staged)
    else:
        tma_store(desc, at, staged)


@gluon.jit
def _consume(sm, problem, dq0_desc, dq1_desc, dk_desc, dv_desc, W: gl.constexpr):
    """Consumer W: compute the gradients of 64 keys of every tile."""
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.REST
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    step = 0
    round = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, full_start, full_stop, _first, _count = problem.steps(index, key)
        dk0 = gl.zeros([64, C], gl.float32, layout0)
        dk1 = gl.zeros([64, R], gl.float32, layout1)
        dv = gl.zeros([64, C], gl.float32, layout0)
        mbarrier.wait(sm.kv_full.index(0), round & 1)
        if start < stop:
            slot, parity = slot_of(step, sm.STAGES)
            mbarrier.wait(sm.q_full.index(slot), parity)
            mbarrier.arrive(sm.q_empty.index(slot), count=1)
            sm.ds.index((step & 1) * 2 + W).store(gl.zeros([64, 64], sm.ds.dtype, s_layout))
            fence_async_shared()
            mbarrier.arrive(sm.ds_full.index(step & 1), count=1)
            step += 1
            if problem.BOUNDS:  # read once per tile: in the loop the addresses would take more registers
                seen = problem.rows_seeing(key + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout)))
            else:
                seen = (0, 0)
            head_row = problem.dq_row(batch, first_head)
            dq_row = head_row + start * 64
            for _g in range(problem.group):
                if problem.TWO_SIDED:
                    for _ in range(stop):
                        dk0, dk1, dv, block = _step(
                            sm, problem, dq0_desc, dq1_desc, dk0, dk1, dv, step, 0, key, seen, False, dq_row, W
                        )
                        step += 1
                        dq_row = head_row + block * 64
                else:
                    slot, parity = slot_of(step, sm.STAGES)
                    mbarrier.wait(sm.q_full.index(slot), parity)
                    block = receive_number(sm.begin.index(slot))
                    for _ in range(start, stop):
                        masked = (block < full_start) | (block >= full_stop)
                        dk0, dk1, dv, _block = _step(
                            sm, problem, dq0_desc, dq1_desc, dk0, dk1, dv, step, block, key, seen, masked, dq_row, W
                        )
                        step += 1
                        dq_row = head_row + block * 64
                        block = problem.next_block(block, start, stop)
                head_row += problem.dq_rows
            _last_dq(sm, dq0_desc, dq1_desc, step, dq_row, W)
        if (not sm.ACCUMULATE) | (start < stop):
            coord = [batch, kv_head, key + W * 64]
            left, right = halves(dv, C)
            _write_chunk(sm, dv_desc, left, coord, 0, 0, W)
            _write_chunk(sm, dv_desc, right, coord, 64, 1, W)
            left, right = halves(dk0 * problem.softmax_scale, C)
            _write_chunk(sm, dk_desc, left, coord, 0, 2, W)
            _write_chunk(sm, dk_desc, right, coord, 64, 3, W)
            _write_chunk(sm, dk_desc, dk1 * problem.softmax_scale, coord, C, 4, W)
            tma_store_wait(0)
        mbarrier.arrive(sm.kv_empty.index(0), count=1)
        round += 1


@gluon.jit
def _consume_first(sm, problem, dq0_desc, dq1_desc, dk_desc, dv_desc):
    _consume(sm, problem, dq0_desc, dq1_desc, dk_desc, dv_desc, 0)


@gluon.jit
def _consume_second(sm, problem, dq0_desc, dq1_desc, dk_desc, dv_desc):
    _consume(sm, problem, dq0_desc, dq1_desc, dk_desc, dv_desc, 1)


@gluon.jit(do_not_specialize=[*KEY_TILE_ARGUMENTS, "heads_at_last"])
def backward_latent(
    q0_desc, q1_desc, k0_desc, k1_desc, v_desc, dout_desc, stats_desc, dq0_desc, dq1_desc, dk_desc, dv_desc,
    begins_desc, first_ptr, stop_ptr, tiles_ptr, stretches_ptr, min_row, num_rows, num_keys, row_start, dq_rows,
    num_heads, num_kv_heads, num_tiles, heads_together, heads_at_last, num_works, group, first_shift, split,
    second_shift, stop_shift, period, clock_ptr, scale_log2, softmax_scale,
    SPLIT: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr, BOUNDS: gl.constexpr,
    TWO_SIDED: gl.constexpr, BEGINS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """dQ, dK and dV; launch with 4 warps on any number of CTAs up to `num_works`. See `BackwardProblem`."""
    dtype: gl.constexpr = q0_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
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
    begin = gl.allocate_shared_memory(gl.int32, [STAGES, 1], NUMBER)
    if BEGINS:
        begins = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 64], begins_desc.layout)
    else:
        begins = begin
    sm = LatentShared(
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, SPLIT], q0_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, REST], q1_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, SPLIT], dout_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, 64, SPLIT], k0_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, 64, REST], k1_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, 64, SPLIT], v_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, 64], stats_desc.layout),
        gl.allocate_shared_memory(dtype, [4, 64, 64], ds_layout),
        gl.allocate_shared_memory(gl.float32, dq0_desc.block_type.shape, dq0_desc.layout),
        gl.allocate_shared_memory(gl.float32, dq0_desc.block_type.shape, dq0_desc.layout),
        kv_full, kv_empty, q_full, q_empty, ds_full, begin, begins,
        SPLIT, REST, STAGES, ACCUMULATE,
    )  # fmt: skip
    if not TWO_SIDED:
        tiles_ptr = first_ptr  # not read
        stretches_ptr = first_ptr
    problem = BackwardProblem(
        min_row, num_rows, num_keys, row_start, dq_rows, num_heads, num_kv_heads, num_tiles, heads_together,
        heads_at_last, num_works, group, first_shift, split, second_shift, stop_shift, period, clock_ptr, first_ptr,
        stop_ptr, tiles_ptr, stretches_ptr, scale_log2, softmax_scale, BOUNDS, TWO_SIDED, BEGINS, 64, 2 * 64,
        not BOUNDS,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_first, (sm, problem, dq0_desc, dq1_desc, dk_desc, dv_desc)),
            (_consume_second, (sm, problem, dq0_desc, dq1_desc, dk_desc, dv_desc)),
            (_load, (sm, problem, q0_desc, q1_desc, k0_desc, k1_desc, v_desc, dout_desc, stats_desc, begins_desc)),
        ],
        [4, 1],
        [240, 24],
    )
