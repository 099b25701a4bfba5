"""dK and dV for head_dim 256 with products in e4m3: one CTA holds 64 keys and streams the queries past them.

As in `backward.wide`, the consumers divide the work by product: S, P and dV; dP, dS and dK. P passes from one to the
other in shared memory, in fp16: in fp32 the kernel takes 1.08 times as long. Operands, their order and scales are those
of `backward_keys`, and as there dK and dV leave the registers every PROMOTE blocks. `backward_queries` computes dQ.
"""

from ringflash_kernels.hopper.backward.problem import (
    KEY_TILE_ARGUMENTS,
    NUMBER,
    BackwardProblem,
    halves,
    load_in_rounds,
    receive_number,
    send_number,
    slot_of,
)
from ringflash_kernels.hopper.compat import (
    aggregate,
    fence_async_shared,
    given,
    gl,
    gluon,
    mbarrier,
    reinterpret,
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
class Fp8WideShared:
    """Shared memory of a CTA, and the choices every role needs; operands are in e4m3.

    q0, dout0, stats   STAGES blocks of 64 queries: Q and dO of S and dP, and lse with delta; mbarriers q_full, q_empty
    q1, dout1          the same Q and dO transposed, for dK and dV; mbarriers turned_full, turned_empty
    k8, v8             K and V of the tile's 64 keys
    p                  P in fp16, from the consumer of scores to that of gradients
    staged             columns of dV (0) and dK (1) on their way to global memory
    begin, begins      as in `backward.keys.KeyShared`
    number             the tile whose K and V are in shared memory
    """

    q0: gl.shared_memory_descriptor
    q1: gl.shared_memory_descriptor
    dout0: gl.shared_memory_descriptor
    dout1: gl.shared_memory_descriptor
    k8: gl.shared_memory_descriptor
    v8: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    staged: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    turned_full: gl.shared_memory_descriptor
    turned_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor
    begin: gl.shared_memory_descriptor
    begins: gl.shared_memory_descriptor
    number: gl.shared_memory_descriptor
    D: gl.constexpr
    STAGES: gl.constexpr
    PROMOTE: gl.constexpr
    PARTS: gl.constexpr
    ACCUMULATE: gl.constexpr


@gluon.jit
def _load_rows(sm, problem, descs, batch, head, block, step):
    """Load Q and dO of a block with their statistics, and both transposed, once the consumers have released them."""
    q0_desc, q1_desc, dout0_desc, dout1_desc, stats_desc, begins_desc = descs
    nbytes: gl.constexpr = q0_desc.block_type.nbytes + dout0_desc.block_type.nbytes + stats_desc.block_type.nbytes
    turned_bytes: gl.constexpr = q1_desc.block_type.nbytes + dout1_desc.block_type.nbytes
    row = block * 64
    slot, parity = slot_of(step, sm.STAGES)
    full = sm.q_full.index(slot)
    mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
    mbarrier.expect(full, nbytes + (64 * 4 if problem.BEGINS else 0))
    tma_load(q0_desc, [batch, head, row, 0], full, sm.q0.index(slot))
    stats_coord = [batch * problem.num_heads + head, 0, problem.row_start + row]
    tma_load(stats_desc, stats_coord, full, sm.stats.index(slot))
    if problem.BEGINS:
        tma_load(begins_desc, [0, row], full, sm.begins.index(slot))
    tma_load(dout0_desc, [batch, head, row, 0], full, sm.dout0.index(slot))
    full = sm.turned_full.index(slot)
    mbarrier.wait(sm.turned_empty.index(slot), parity ^ 1)
    mbarrier.expect(full, turned_bytes)
    tma_load(dout1_desc, [batch, head, 0, row], full, sm.dout1.index(slot))
    tma_load(q1_desc, [batch, head, 0, row], full, sm.q1.index(slot))


@gluon.jit
def _load(sm, problem, q0_desc, q1_desc, dout0_desc, dout1_desc, k8_desc, v8_desc, stats_desc, begins_desc, counter):
    """Producer: load K and V of each tile, then what `_load_rows` loads, block by block."""
    descs = (q0_desc, q1_desc, dout0_desc, dout1_desc, stats_desc, begins_desc)
    step = 0
    round = 0
    index = gl.program_id(0)
    while index < problem.num_works:
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, _full_start, _full_stop, first, count = problem.steps(index, key)
        full = sm.kv_full.index(0)
        mbarrier.wait(sm.kv_empty.index(0), (round & 1) ^ 1)
        send_number(sm.number.index(0), index)
        mbarrier.expect(full, k8_desc.block_type.nbytes + v8_desc.block_type.nbytes)
        tma_load(k8_desc, [batch, kv_head, key // 128, key % 128, 0], full, sm.k8)
        tma_load(v8_desc, [batch, kv_head, key // 128, key % 128, 0], full, sm.v8)
        round += 1
        step = load_in_rounds(sm, problem, _load_rows, descs, batch, first_head, start, stop, first, count, step)
        index = gl.atomic_add(counter, 1) + gl.num_programs(0)
    mbarrier.wait(sm.kv_empty.index(0), (round & 1) ^ 1)
    send_number(sm.number.index(0), problem.num_works)
    mbarrier.arrive(sm.kv_full.index(0), count=1)
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:  # the last program resets the counters
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _as_operand(x, sm):
    """Return P or dS as the first operand of the product with dO or Q; no data moves between threads."""
    layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sm.D, 32]), 4)
    x = x.to(sm.q0.dtype).reshape([64, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 64])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _score_step(sm, problem, k, dv, scale_ptr, k_scale, step, block, key, seen, masked):
    """Process one block of queries: S, P and dV."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    slot, parity = slot_of(step, sm.STAGES)
    if not problem.TWO_SIDED:
        s_scale = gl.load(scale_ptr + block) * k_scale
    mbarrier.wait(sm.q_full.index(slot), parity)
    q = sm.q0.index(slot).reshape([64, sm.D])
    zeros = gl.zeros([64, 64], gl.float32, s_layout)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    reference = sm.stats.index(slot).reshape([2, 64]).slice(0, 1, dim=0).load(s_layout)
    s = warpgroup_mma_wait(0, deps=(s,))
    if problem.TWO_SIDED:  # what the producer says of the step is released with Q
        number = receive_number(sm.begin.index(slot))
        block = number >> 1
        masked = (number & 1) != 0
        s_scale = gl.load(scale_ptr + block) * k_scale
    else:
        mbarrier.arrive(sm.q_empty.index(slot), count=1)
    if masked:
        rows = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
        keys = key + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
        if problem.BOUNDS:
            inside = problem.within(rows, seen[0], seen[1])
        else:
            inside = problem.visible(keys, rows)
        if problem.BEGINS:
            begins = sm.begins.index(slot).reshape([64]).load(gl.SliceLayout(0, s_layout))
            inside = inside & (keys[:, None] >= begins[None, :])
        s = gl.where(inside, s, float("-inf"))
    if problem.TWO_SIDED:
        mbarrier.arrive(sm.q_empty.index(slot), count=1)
    p = gl.exp2(s * s_scale - reference)
    p_operand = _as_operand(p, sm)
    mbarrier.wait(sm.p_empty.index(0), (step & 1) ^ 1)
    sm.p.store(p.to(gl.float16))
    mbarrier.arrive(sm.p_full.index(0), count=1)
    mbarrier.wait(sm.turned_full.index(slot), parity)
    dout = sm.dout1.index(slot).reshape([sm.D, 64])
    dv = warpgroup_mma(p_operand, dout.permute((1, 0)), dv, is_async=True)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    mbarrier.arrive(sm.turned_empty.index(slot), count=1)
    return dv, block


@gluon.jit
def _gradient_step(sm, v, dk, of_ds, of_delta, step):
    """Process one block of queries: dP, from -delta on, dS and dK."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    slot, parity = slot_of(step, sm.STAGES)
    mbarrier.wait(sm.q_full.index(slot), parity)
    delta = sm.stats.index(slot).reshape([2, 64]).slice(1, 1, dim=0).load(s_layout)
    dp = given((delta * of_delta).broadcast_to([64, 64]))
    dp = warpgroup_mma(v, sm.dout0.index(slot).reshape([64, sm.D]).permute((1, 0)), dp, is_async=True)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(sm.q_empty.index(slot), count=1)
    mbarrier.wait(sm.p_full.index(0), step & 1)
    p = sm.p.load(s_layout).to(gl.float32)
    mbarrier.arrive(sm.p_empty.index(0), count=1)
    ds = _as_operand(p * of_ds * dp, sm)
    mbarrier.wait(sm.turned_full.index(slot), parity)
    q = sm.q1.index(slot).reshape([sm.D, 64])
    dk = warpgroup_mma(ds, q.permute((1, 0)), dk, is_async=True)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(sm.turned_empty.index(slot), count=1)
    return dk


@gluon.jit
def _write_chunk(sm, desc, x, coord, column, is_first, W: gl.constexpr):
    """Add or store some columns of dK or dV."""
    staged = reinterpret(sm.staged.index(W), desc.dtype, [1, 1] + x.shape, desc.layout)
    at = [coord[0], coord[1], coord[2], column]
    tma_store_wait(0)
    staged.reshape(x.shape).store(x.to(desc.dtype))
    fence_async_shared()
    if sm.ACCUMULATE:
        tma_reduce_add(desc, at, staged)
    elif not sm.PARTS:
        tma_store(desc, at, staged)
    elif is_first:
        tma_store(desc, at, staged)
    else:
        tma_reduce_add(desc, at, staged)


@gluon.jit
def _write(sm, desc, x, coord, is_first, W: gl.constexpr):
    """Add or store dK or dV: 64 columns at a time in fp32, 128 in 16 bits. Of several parts the first is stored."""
    H: gl.constexpr = sm.D // 2
    left, right = halves(x, sm.D)
    if sm.PARTS and not sm.ACCUMULATE:
        tma_store_complete(coord[2])  # what was stored is in memory before more is added
    if desc.dtype == gl.float32:
        first, second = halves(left, H)
        _write_chunk(sm, desc, first, coord, 0, is_first, W)
        _write_chunk(sm, desc, second, coord, H // 2, is_first, W)
        first, second = halves(right, H)
        _write_chunk(sm, desc, first, coord, H, is_first, W)
        _write_chunk(sm, desc, second, coord, H + H // 2, is_first, W)
    else:
        _write_chunk(sm, desc, left, coord, 0, is_first, W)
        _write_chunk(sm, desc, right, coord, H, is_first, W)


@gluon.jit
def _consume(sm, problem, scales, desc, W: gl.constexpr):
    """Consumer W: compute dV (0) or dK (1) of every tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sm.D, 32])
    step = 0
    round = 0
    mbarrier.wait(sm.kv_full.index(0), 0)
    index = receive_number(sm.number.index(0))
    while index < problem.num_works:
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, full_start, full_stop, _first, _count = problem.steps(index, key)
        tile_ptr = scales.tile_ptr + ((batch * problem.num_kv_heads + kv_head) * scales.k_blocks + key // 128) * 8
        coord = [batch, kv_head, key]
        if problem.BOUNDS and W == 0:
            seen = problem.rows_seeing(key + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout)))
        else:
            seen = (0, 0)
        if W == 0:
            k_scale = gl.load(tile_ptr)
            scale_ptr = scales.q_ptr + (batch * problem.num_heads + first_head) * scales.q_blocks
        else:
            of_ds = gl.load(tile_ptr + 1)
            of_delta = gl.load(tile_ptr + 2)
        total = gl.zeros([64, sm.D], gl.float32, layout)
        is_first = True
        if W == 0:
            held = sm.k8.reshape([64, sm.D])
        else:
            held = sm.v8.reshape([64, sm.D])
        if start < stop:
            kept = 0  # blocks whose products the registers hold
            for _g in range(problem.group):
                if problem.TWO_SIDED or W == 1:
                    block = 0
                else:
                    slot, parity = slot_of(step, sm.STAGES)
                    mbarrier.wait(sm.q_full.index(slot), parity)
                    block = receive_number(sm.begin.index(slot))
                for _ in range(start, stop):
                    if sm.PARTS:
                        if kept == sm.PROMOTE:
                            _write(sm, desc, total * gl.load(tile_ptr + 4 - W), coord, is_first, W)
                            total = gl.zeros([64, sm.D], gl.float32, layout)
                            kept = 0
                            is_first = False
                        kept += 1
                    if W == 0:
                        if problem.TWO_SIDED:
                            masked = False
                        else:
                            masked = (block < full_start) | (block >= full_stop)
                        total, block = _score_step(
                            sm, problem, held, total, scale_ptr, k_scale, step, block, key, seen, masked
                        )
                        if not problem.TWO_SIDED:
                            block = problem.next_block(block, start, stop)
                    else:
                        total = _gradient_step(sm, held, total, of_ds, of_delta, step)
                    step += 1
                if W == 0:
                    scale_ptr += scales.q_blocks
        mbarrier.arrive(sm.kv_empty.index(0), count=1)
        round += 1
        if (not sm.ACCUMULATE) | (start < stop):
            _write(sm, desc, total * gl.load(tile_ptr + 4 - W), coord, is_first, W)
        mbarrier.wait(sm.kv_full.index(0), round & 1)
        index = receive_number(sm.number.index(0))
    tma_store_wait(0)


@gluon.jit
def _consume_scores(sm, problem, scales, dv_desc):
    _consume(sm, problem, scales, dv_desc, 0)


@gluon.jit
def _consume_gradients(sm, problem, scales, dk_desc):
    _consume(sm, problem, scales, dk_desc, 1)


@gluon.jit(
    do_not_specialize=[
        "q_scales_ptr", "q_blocks", "tile_scales_ptr", "k_blocks", "counter", *KEY_TILE_ARGUMENTS,
    ]
)  # fmt: skip
def backward_wide_fp8(
    q0_desc, q1_desc, dout0_desc, dout1_desc, k8_desc, v8_desc, stats_desc, dk_desc, dv_desc,
    q_scales_ptr, q_blocks, tile_scales_ptr, k_blocks, counter,
    begins_desc, first_ptr, stop_ptr, tiles_ptr, stretches_ptr, min_row, num_rows, num_keys, row_start,
    dq_rows, num_heads, num_kv_heads, num_tiles, heads_together, num_works, group, first_shift, split, second_shift,
    stop_shift, period, clock_ptr,
    STAGES: gl.constexpr, PROMOTE: gl.constexpr, PARTS: gl.constexpr, BOUNDS: gl.constexpr,
    TWO_SIDED: gl.constexpr, BEGINS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """dK and dV; launch with 4 warps on any number of CTAs up to `num_works`. See the module and `BackwardProblem`.

    Add to dK and dV, or without ACCUMULATE overwrite them: then one CTA has all heads of a group. PARTS: it may have
    more than PROMOTE blocks.
    """
    D: gl.constexpr = k8_desc.block_type.shape[4]
    e4m3: gl.constexpr = k8_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turned_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turned_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    p_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    p_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_empty.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(turned_full.index(i), count=1)
        mbarrier.init(turned_empty.index(i), count=2)
    mbarrier.init(p_full.index(0), count=1)
    mbarrier.init(p_empty.index(0), count=1)
    begin = gl.allocate_shared_memory(gl.int32, [STAGES, 1], NUMBER)
    if BEGINS:
        begins = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 64], begins_desc.layout)
    else:
        begins = begin
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    staging: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
    sm = Fp8WideShared(
        gl.allocate_shared_memory(e4m3, [STAGES, 1, 1, 64, D], q0_desc.layout),
        gl.allocate_shared_memory(e4m3, [STAGES, 1, 1, D, 64], q1_desc.layout),
        gl.allocate_shared_memory(e4m3, [STAGES, 1, 1, 64, D], dout0_desc.layout),
        gl.allocate_shared_memory(e4m3, [STAGES, 1, 1, D, 64], dout1_desc.layout),
        gl.allocate_shared_memory(e4m3, [1, 1, 1, 64, D], k8_desc.layout),
        gl.allocate_shared_memory(e4m3, [1, 1, 1, 64, D], v8_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, 64], stats_desc.layout),
        gl.allocate_shared_memory(gl.float16, [64, 64], p_layout),
        gl.allocate_shared_memory(gl.float32, [2, 64, 64], staging),
        kv_full, kv_empty, q_full, q_empty, turned_full, turned_empty, p_full, p_empty, begin, begins,
        gl.allocate_shared_memory(gl.int32, [1, 1], NUMBER), D, STAGES, PROMOTE, PARTS, ACCUMULATE,
    )  # fmt: skip
    if not TWO_SIDED:
        tiles_ptr = first_ptr  # not read
        stretches_ptr = first_ptr
    problem = BackwardProblem(
        min_row, num_rows, num_keys, row_start, dq_rows, num_heads, num_kv_heads, num_tiles, heads_together,
        heads_together, num_works, group, first_shift, split, second_shift, stop_shift, period, clock_ptr, first_ptr,
        stop_ptr, tiles_ptr, stretches_ptr, gl.to_tensor(1.0), gl.to_tensor(1.0),
        BOUNDS, TWO_SIDED, BEGINS, 64, 64, False,
    )  # fmt: skip
    scales = Scales(q_scales_ptr, q_blocks, tile_scales_ptr, k_blocks)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_scores, (sm, problem, scales, dv_desc)),
            (_consume_gradients, (sm, problem, scales, dk_desc)),
            (
                _load,
                (
                    sm,
                    problem,
                    q0_desc,
                    q1_desc,
                    dout0_desc,
                    dout1_desc,
                    k8_desc,
                    v8_desc,
                    stats_desc,
                    begins_desc,
                    counter,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
