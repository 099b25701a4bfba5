"""dQ, dK and dV with products in e4m3, on the frame of `backward.keys`: one CTA holds 128 keys and streams the queries.

S and dP always have e4m3 operands. With FP8_GRADIENTS so do dV = P^T dO, dK = dS^T Q and dQ = dS K; without it, these
three are bf16. In dV and dK, P and dS are operands in the registers that hold them, and dO and Q are loaded a second
time, transposed, with each 16 queries in KEY_ORDER. In dQ, dS passes through shared memory, where e4m3 operands need
adjacent keys. A thread holds keys 8 apart: it converts them as a pair, and a transposing store of 16 bits writes pairs.
So each 16 keys are in the order of those pairs, as they are in the K that is loaded a second time, transposed.

Sums of e4m3 products keep 13 bits of significand in the tensor cores. So every PROMOTE blocks dK and dV are added to
fp32 sums in global memory.

`backward_operands` explains the scales of rows and tiles.
"""

from ringflash_kernels.hopper.backward.dq import dq_staging
from ringflash_kernels.hopper.backward.keys import dq_mma, pass_turn, take_turn
from ringflash_kernels.hopper.backward.problem import (
    KEY_TILE_ARGUMENTS,
    NUMBER,
    BackwardProblem,
    halves,
    interleave,
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
    pairs_in_e4m3,
    reinterpret,
    settled,
    start_of,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_complete,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@aggregate
class Scales:
    """Addresses of scales: those of q (batch, num_heads, q_blocks), of tiles (batch, num_kv_heads, k_blocks, 8)."""

    q_ptr: gl.tensor
    q_blocks: gl.tensor
    tile_ptr: gl.tensor
    k_blocks: gl.tensor


@aggregate
class Fp8KeysShared:
    """Shared memory of a CTA, and the choices every role needs; see `backward.keys.KeyShared`.

    q0, dout0        e4m3 operands of S and dP;  q1, dout1: operands of dK and dV, transposed if e4m3
    k8, v8           e4m3 operands of S and dP;  k0, k1: the operand of dQ
    number           for each of KV_BUFFERS, the tile whose K and V are in it
    spare            staging of dK and dV beside that of dQ
    """

    q0: gl.shared_memory_descriptor
    q1: gl.shared_memory_descriptor
    dout0: gl.shared_memory_descriptor
    dout1: gl.shared_memory_descriptor
    k0: gl.shared_memory_descriptor
    k1: gl.shared_memory_descriptor
    k8: gl.shared_memory_descriptor
    v8: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq0: gl.shared_memory_descriptor
    dq1: gl.shared_memory_descriptor
    spare: gl.shared_memory_descriptor
    number: gl.shared_memory_descriptor
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
    FP8_GRADIENTS: gl.constexpr
    PROMOTE: gl.constexpr
    KV_BUFFERS: gl.constexpr
    KV_IN_REGISTERS: gl.constexpr
    TURN_BEFORE_EXP: gl.constexpr
    AHEAD: gl.constexpr
    STORE_FIRST: gl.constexpr
    ACCUMULATE: gl.constexpr


@gluon.jit
def _load_rows(sm, problem, descs, batch, head, block, step):
    """Load Q and dO, each twice, and their statistics of a block once both consumers have released the buffer."""
    q0_desc, q1_desc, dout0_desc, dout1_desc, stats_desc, begins_desc = descs
    query_bytes: gl.constexpr = (
        2 * (q0_desc.block_type.nbytes + q1_desc.block_type.nbytes) + stats_desc.block_type.nbytes
    )
    row = block * 64
    slot, parity = slot_of(step, sm.STAGES)
    full = sm.q_full.index(slot)
    mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
    mbarrier.expect(full, query_bytes + (64 * 4 if problem.BEGINS else 0))
    tma_load(q0_desc, [batch, head, row, 0], full, sm.q0.index(slot))
    stats_coord = [batch * problem.num_heads + head, 0, problem.row_start + row]
    tma_load(stats_desc, stats_coord, full, sm.stats.index(slot))
    if problem.BEGINS:
        tma_load(begins_desc, [0, row], full, sm.begins.index(slot))
    tma_load(dout0_desc, [batch, head, row, 0], full, sm.dout0.index(slot))
    if sm.FP8_GRADIENTS:
        tma_load(dout1_desc, [batch, head, 0, row], full, sm.dout1.index(slot))
        tma_load(q1_desc, [batch, head, 0, row], full, sm.q1.index(slot))
    else:
        tma_load(dout1_desc, [batch, head, row, 0], full, sm.dout1.index(slot))
        tma_load(q1_desc, [batch, head, row, 0], full, sm.q1.index(slot))


@gluon.jit
def _load(
    sm, problem, q0_desc, q1_desc, dout0_desc, dout1_desc, k_desc, k8_desc, v8_desc, stats_desc, begins_desc, counter
):
    """Producer: load K and V of each tile, then Q and dO, each twice, and their statistics block by block."""
    key_bytes: gl.constexpr = k_desc.block_type.nbytes + k8_desc.block_type.nbytes + v8_desc.block_type.nbytes
    descs = (q0_desc, q1_desc, dout0_desc, dout1_desc, stats_desc, begins_desc)
    step = 0
    round = 0
    index = gl.program_id(0)
    while index < problem.num_works:
        key, batch, first_head, kv_head = problem.work(index)
        if problem.TWO_SIDED:
            first, count, stop = problem.walk(index)
            start = 0
        else:
            start, stop, _full_start, _full_stop = problem.blocks(key)
            first, count = 0, 0
        place, phase = slot_of(round, sm.KV_BUFFERS)
        full = sm.kv_full.index(place)
        mbarrier.wait(sm.kv_empty.index(place), phase ^ 1)
        if sm.KV_BUFFERS == 2:
            send_number(sm.number.index(place), index)
        mbarrier.expect(full, 2 * key_bytes)
        for half in gl.static_range(2):
            if sm.FP8_GRADIENTS:
                tma_load(k_desc, [batch, kv_head, key // 128, 0, half * 64], full, sm.k0.index(place * 2 + half))
            else:
                tma_load(k_desc, [batch, kv_head, key + half * 64, 0], full, sm.k0.index(place * 2 + half))
            tma_load(k8_desc, [batch, kv_head, key // 128, half * 64, 0], full, sm.k8.index(place * 2 + half))
            tma_load(v8_desc, [batch, kv_head, key // 128, half * 64, 0], full, sm.v8.index(place * 2 + half))
        round += 1
        if start < stop:  # the block of zeros before the first is a step without data
            slot, parity = slot_of(step, sm.STAGES)
            mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
            mbarrier.arrive(sm.q_full.index(slot), count=1)
            step += 1
        step = load_in_rounds(sm, problem, _load_rows, descs, batch, first_head, start, stop, first, count, step)
        index += gl.num_programs(0)
        if sm.KV_BUFFERS == 2:
            index = gl.atomic_add(counter, 1) + gl.num_programs(0)
    if sm.KV_BUFFERS == 2:
        place, phase = slot_of(round, sm.KV_BUFFERS)
        mbarrier.wait(sm.kv_empty.index(place), phase ^ 1)
        send_number(sm.number.index(place), problem.num_works)
        mbarrier.arrive(sm.kv_full.index(place), count=1)
        if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:  # the last program resets the counters
            gl.store(counter, 0)
            gl.store(counter + 1, 0)


@gluon.jit
def _as_operand(x, sm):
    """Return P or dS as the first operand of the product with dO or Q; no data moves between threads."""
    C: gl.constexpr = sm.SPLIT
    if sm.FP8_GRADIENTS:
        layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 32]), 4)
        x = x.to(sm.q0.dtype).reshape([64, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 64])
        result = gl.convert_layout(x, layout, assert_trivial=True)
    else:
        layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16]), 2)
        result = gl.convert_layout(x.to(sm.k0.dtype), layout)
    return result


@gluon.jit
def _second(sm, tile):
    """Return the operand of dK or dV: (64 queries, columns), which for e4m3 is a view of the transposed tile."""
    if sm.FP8_GRADIENTS:
        second = tile.reshape([sm.SPLIT, 64]).permute((1, 0))
    else:
        second = tile.reshape([64, sm.SPLIT])
    return second


@gluon.jit
def _dq_mma(sm, buffer, place, W: gl.constexpr):
    """Issue dQ = dS K over both consumers' keys, for the columns of consumer W."""
    N: gl.constexpr = sm.SPLIT // 2
    if sm.FP8_GRADIENTS:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
        dq = gl.zeros([64, N], gl.float32, layout)
        for half in gl.static_range(2):
            k = sm.k0.index(place * 2 + half).reshape([sm.SPLIT, 64]).slice(W * N, N, dim=0)
            dq = warpgroup_mma(sm.ds.index(buffer * 2 + half), k.permute((1, 0)), dq, use_acc=half == 1, is_async=True)
    else:
        dq = dq_mma(sm, buffer, W)
    return dq


@gluon.jit
def _stage_dq(sm, desc, dq, scale, W: gl.constexpr):
    """Return the buffer of dQ for TMA, with dQ; e4m3 products of this tile get their scale."""
    staged = dq_staging(sm, W)
    if sm.FP8_GRADIENTS:
        dq *= scale
        staged = start_of(staged, desc)
    staged.store(interleave(dq, staged.shape[1], 4 * 32 // desc.dtype.primitive_bitwidth).to(desc.dtype))
    fence_async_shared()
    return staged


@gluon.jit
def _store_ds(sm, tile, ds):
    """Store dS^T of a consumer's keys, in e4m3 as dS with the key r + 8 h of every 16 at the position 2 r + h."""
    if sm.FP8_GRADIENTS:
        x = ds.reshape([4, 2, 8, 64]).permute((0, 2, 3, 1))
        low, high = x.split()
        pairs = pairs_in_e4m3(low, high).reshape([32, 64]).permute((1, 0))
        layout: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
        reinterpret(tile, gl.int16, [64, 32], layout).store(pairs)
    else:
        tile.store(ds.to(tile.dtype))


@gluon.jit
def _step(
    sm,
    problem,
    dq_desc,
    dk,
    dv,
    k,
    v,
    step,
    block,
    scale_ptr,
    scales,
    key,
    seen,
    masked,
    dq_row,
    place,
    s,
    left,
    W: gl.constexpr,
):
    """Process one block of queries: P, dV, dS, dK of this block, and dQ of the previous one, at `dq_row`.

    If TWO_SIDED, the producer says which block it is and whether it is masked.
    """
    C: gl.constexpr = sm.SPLIT
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    slot, parity = slot_of(step, sm.STAGES)
    current = step & 1  # buffer of this block's dS
    last, last_parity = slot_of(step - 1, 2)
    q = sm.q0.index(slot).reshape([64, C])
    dout = sm.dout0.index(slot).reshape([64, C])
    stats = sm.stats.index(slot).reshape([2, 64])
    zeros = gl.zeros([64, 64], gl.float32, s_layout)

    # S^T = K Q^T and dP^T = V dO^T
    if not problem.TWO_SIDED:
        s_scale = gl.load(scale_ptr + block) * scales[0]
    if not sm.AHEAD:
        mbarrier.wait(sm.q_full.index(slot), parity)
    if sm.FP8_GRADIENTS:  # from -delta on, which then needs no registers; with bf16 operands ptxas would spill more
        reference = stats.slice(0, 1, dim=0).load(s_layout)  # behind the products it would wait for them
        dp = given((stats.slice(1, 1, dim=0).load(s_layout) * scales[2]).broadcast_to([64, 64]))
    else:
        dp = zeros
    take_turn(step, W)
    if not sm.AHEAD:
        s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, dout.permute((1, 0)), dp, use_acc=sm.FP8_GRADIENTS, is_async=True)

    if problem.TWO_SIDED:
        number = receive_number(sm.begin.index(slot))
        block = number >> 1
        masked = (number & 1) != 0
        s_scale = gl.load(scale_ptr + block) * scales[0]

    # P = exp(S - reference of the row)
    if not sm.FP8_GRADIENTS:
        reference = stats.slice(0, 1, dim=0).load(s_layout)
    if not sm.AHEAD:
        s = warpgroup_mma_wait(1, deps=(s,))
    if sm.TURN_BEFORE_EXP:
        pass_turn(step, W)
    if masked:  # a second, masked loop would make ptxas spill in the first
        rows = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
        if problem.BOUNDS:
            inside = problem.within(rows, seen[0], seen[1])
        else:
            inside = problem.visible(key + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout)), rows)
        if problem.BEGINS:
            begins = sm.begins.index(slot).reshape([64]).load(gl.SliceLayout(0, s_layout))
            keys = key + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            inside = inside & (keys[:, None] >= begins[None, :])
        s = gl.where(inside, s, float("-inf"))
    p = gl.exp2(s * s_scale - reference)
    p_operand = _as_operand(p, sm)
    if sm.FP8_GRADIENTS:
        p *= scales[1]
    else:
        delta = settled(stats.slice(1, 1, dim=0).load(s_layout) * scales[2])
    if not sm.TURN_BEFORE_EXP:
        pass_turn(step, W)

    # dV += P^T dO, dQ of the previous block; the wait also keeps ptxas from moving exp behind the wgmma wait
    mbarrier.wait(sm.ds_full.index(last), last_parity)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    dv = warpgroup_mma(p_operand, _second(sm, sm.dout1.index(slot)), dv, is_async=True)
    dq = _dq_mma(sm, last, place, W)
    if sm.AHEAD:  # S of the next step; at the last one of a tile S of this one again
        next_slot, next_parity = slot_of(step + (left > 1).to(gl.int32), sm.STAGES)
        mbarrier.wait(sm.q_full.index(next_slot), next_parity)
        q = sm.q0.index(next_slot).reshape([64, C])
        s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)

    # dS = P (dP - delta), dK += dS^T Q
    if sm.FP8_GRADIENTS:
        ds = p * dp
    else:
        ds = p * (dp * scales[1] - delta)
    ds_operand = _as_operand(ds, sm)
    dk = warpgroup_mma(ds_operand, _second(sm, sm.q1.index(slot)), dk, is_async=True)
    tma_store_wait(0)
    _store_ds(sm, sm.ds.index(current * 2 + W), ds)
    dq = warpgroup_mma_wait(2 if sm.AHEAD else 1, deps=(dq,))
    staged = _stage_dq(sm, dq_desc, dq, scales[3], W)
    mbarrier.arrive(sm.ds_full.index(current), count=1)
    tma_reduce_add(dq_desc, [dq_row, C // 2 * W], staged)
    if sm.AHEAD:
        dk, dv, s = warpgroup_mma_wait(0, deps=(dk, dv, s))
    elif sm.FP8_GRADIENTS:  # registers of 8 bits cannot be named here (triton 3.6)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    else:
        dk, dv, p_operand, ds_operand = warpgroup_mma_wait(0, deps=(dk, dv, p_operand, ds_operand))
    mbarrier.arrive(sm.q_empty.index(slot), count=1)
    if not sm.AHEAD:
        s = 0
    return dk, dv, block, s


@gluon.jit
def _last_dq(sm, dq_desc, step, dq_row, scale, place, W: gl.constexpr):
    """Compute and add dQ of a tile's last block, whose step is `step` - 1."""
    last, parity = slot_of(step - 1, 2)
    mbarrier.wait(sm.ds_full.index(last), parity)
    dq = _dq_mma(sm, last, place, W)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    tma_store_wait(0)
    staged = _stage_dq(sm, dq_desc, dq, scale, W)
    tma_reduce_add(dq_desc, [dq_row, sm.SPLIT // 2 * W], staged)


@gluon.jit
def _stage(sm, desc, x, which: gl.constexpr, W: gl.constexpr):
    """Return x, in the dtype of `desc`, in this consumer's dQ buffer or its spare one."""
    N: gl.constexpr = x.shape[1]
    memory = sm.spare.index(W) if which else dq_staging(sm, W)
    staged = reinterpret(memory, desc.dtype, [1, 1, 64, N], desc.layout)
    tma_store_wait(1 if sm.FP8_GRADIENTS and sm.KV_BUFFERS == 1 else 0)
    staged.reshape([64, N]).store(x.to(desc.dtype))
    fence_async_shared()
    return staged


@gluon.jit
def _write(sm, desc, x, coord, is_first, W: gl.constexpr):
    """Add or store dK or dV of this consumer's 64 keys, fp32 in halves."""
    D: gl.constexpr = sm.SPLIT
    if desc.dtype == gl.float32:
        left, right = halves(x, D)
        for half in gl.static_range(2):
            staged = _stage(sm, desc, right if half else left, half, W)
            _send(sm, desc, [coord[0], coord[1], coord[2], half * (D // 2)], staged, is_first)
    else:
        _send(sm, desc, [coord[0], coord[1], coord[2], 0], _stage(sm, desc, x, 0, W), is_first)


@gluon.jit
def _send(sm, desc, at, staged, is_first):
    if sm.ACCUMULATE:
        tma_reduce_add(desc, at, staged)
    elif not sm.STORE_FIRST:
        tma_store(desc, at, staged)
    elif is_first:
        tma_store(desc, at, staged)
    else:
        tma_reduce_add(desc, at, staged)


@gluon.jit
def _write_both(sm, dk_desc, dv_desc, dk, dv, tile_ptr, coord, is_first, W: gl.constexpr):
    """Add or store dK and dV, each times its scale. With STORE_FIRST the first of several parts is stored."""
    if sm.STORE_FIRST:
        tma_store_complete(coord[2])  # what was stored is in memory before more is added
    else:
        tma_store_wait(0)
    _write(sm, dv_desc, dv * gl.load(tile_ptr + 4), coord, is_first, W)
    _write(sm, dk_desc, dk * gl.load(tile_ptr + 3), coord, is_first, W)


@gluon.jit
def _consume(sm, problem, scales, dq_desc, dk_desc, dv_desc, W: gl.constexpr):
    """Consumer W: compute the gradients of 64 keys of every tile."""
    C: gl.constexpr = sm.SPLIT
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 32 if sm.FP8_GRADIENTS else 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 4)
    step = 0
    round = 0
    if W == 1:
        pass_turn(step, W)
    if sm.KV_BUFFERS == 2:
        mbarrier.wait(sm.kv_full.index(0), 0)
        index = receive_number(sm.number.index(0))
    else:
        index = gl.program_id(0)
    while index < problem.num_works:
        key, batch, first_head, kv_head = problem.work(index)
        if problem.TWO_SIDED:
            _first, _count, stop = problem.walk(index)
            start = 0
        else:
            start, stop, full_start, full_stop = problem.blocks(key)
        tile_ptr = scales.tile_ptr + ((batch * problem.num_kv_heads + kv_head) * scales.k_blocks + key // 128) * 8
        of_tile = (gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2), gl.load(tile_ptr + 5))
        coord = [batch, kv_head, key + W * 64]
        dk = gl.zeros([64, C], gl.float32, layout)
        dv = gl.zeros([64, C], gl.float32, layout)
        is_first = True
        place, phase = slot_of(round, sm.KV_BUFFERS)
        if sm.KV_BUFFERS == 1:
            mbarrier.wait(sm.kv_full.index(place), phase)
        if start < stop:
            slot, parity = slot_of(step, sm.STAGES)
            mbarrier.wait(sm.q_full.index(slot), parity)
            mbarrier.arrive(sm.q_empty.index(slot), count=1)
            sm.ds.index((step & 1) * 2 + W).store(gl.zeros([64, 64], sm.ds.dtype, s_layout))
            fence_async_shared()
            mbarrier.arrive(sm.ds_full.index(step & 1), count=1)
            step += 1
            if sm.KV_IN_REGISTERS:  # less shared memory is read
                k = sm.k8.index(place * 2 + W).reshape([64, C]).load(operand)
                v = sm.v8.index(place * 2 + W).reshape([64, C]).load(operand)
            else:
                k = sm.k8.index(place * 2 + W).reshape([64, C])
                v = sm.v8.index(place * 2 + W).reshape([64, C])
            if problem.BOUNDS:  # read once a tile: in the loop the addresses would take more registers
                seen = problem.rows_seeing(key + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout)))
            else:
                seen = (0, 0)
            head_row = problem.dq_row(batch, first_head)
            scale_ptr = scales.q_ptr + (batch * problem.num_heads + first_head) * scales.q_blocks
            dq_row = head_row + start * 64
            kept = 0  # blocks whose products the registers hold
            left = problem.group * (stop - start)
            if sm.AHEAD:
                slot, parity = slot_of(step, sm.STAGES)
                mbarrier.wait(sm.q_full.index(slot), parity)
                zeros = gl.zeros([64, 64], gl.float32, s_layout)
                q = sm.q0.index(slot).reshape([64, C])
                s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
            else:
                s = 0
            for _g in range(problem.group):
                if problem.TWO_SIDED:
                    block = 0
                else:
                    slot, parity = slot_of(step, sm.STAGES)
                    mbarrier.wait(sm.q_full.index(slot), parity)
                    block = receive_number(sm.begin.index(slot))
                for _ in range(start, stop):
                    if sm.FP8_GRADIENTS and (sm.ACCUMULATE or sm.STORE_FIRST):
                        if kept == sm.PROMOTE:
                            _write_both(sm, dk_desc, dv_desc, dk, dv, tile_ptr, coord, is_first, W)
                            if sm.STORE_FIRST:
                                is_first = False
                            dk = gl.zeros([64, C], gl.float32, layout)
                            dv = gl.zeros([64, C], gl.float32, layout)
                            kept = 0
                        kept += 1
                    if problem.TWO_SIDED:
                        masked = False
                    else:
                        masked = (block < full_start) | (block >= full_stop)
                    dk, dv, block, s = _step(
                        sm, problem, dq_desc, dk, dv, k, v, step, block, scale_ptr, of_tile, key, seen, masked,
                        dq_row, place, s, left, W,
                    )  # fmt: skip
                    step += 1
                    left -= 1
                    dq_row = head_row + block * 64
                    if not problem.TWO_SIDED:
                        block = problem.next_block(block, start, stop)
                head_row += problem.dq_rows
                scale_ptr += scales.q_blocks
            _last_dq(sm, dq_desc, step, dq_row, of_tile[3], place, W)
        if (not sm.ACCUMULATE) | (start < stop):
            _write_both(sm, dk_desc, dv_desc, dk, dv, tile_ptr, coord, is_first, W)
            tma_store_wait(0)
        mbarrier.arrive(sm.kv_empty.index(place), count=1)
        round += 1
        if sm.KV_BUFFERS == 2:
            place, phase = slot_of(round, sm.KV_BUFFERS)
            mbarrier.wait(sm.kv_full.index(place), phase)
            index = receive_number(sm.number.index(place))
        else:
            index += gl.num_programs(0)
    if W == 0:
        take_turn(step, W)  # no barrier is left half full


@gluon.jit
def _consume_first(sm, problem, scales, dq_desc, dk_desc, dv_desc):
    _consume(sm, problem, scales, dq_desc, dk_desc, dv_desc, 0)


@gluon.jit
def _consume_second(sm, problem, scales, dq_desc, dk_desc, dv_desc):
    _consume(sm, problem, scales, dq_desc, dk_desc, dv_desc, 1)


@gluon.jit(
    do_not_specialize=[
        "q_scales_ptr", "q_blocks", "tile_scales_ptr", "k_blocks", "counter", *KEY_TILE_ARGUMENTS,
    ]
)  # fmt: skip
def backward_keys_fp8(
    q0_desc, q1_desc, dout0_desc, dout1_desc, k_desc, k8_desc, v8_desc, stats_desc, dq_desc, dk_desc, dv_desc,
    q_scales_ptr, q_blocks, tile_scales_ptr, k_blocks, counter,
    begins_desc, first_ptr, stop_ptr, tiles_ptr, stretches_ptr, min_row, num_rows, num_keys, row_start,
    dq_rows, num_heads, num_kv_heads, num_tiles, heads_together, num_works, group, first_shift, split, second_shift,
    stop_shift, period, clock_ptr, scale_log2, softmax_scale,
    STAGES: gl.constexpr, FP8_GRADIENTS: gl.constexpr, PROMOTE: gl.constexpr, KV_BUFFERS: gl.constexpr,
    KV_IN_REGISTERS: gl.constexpr, TURN_BEFORE_EXP: gl.constexpr, AHEAD: gl.constexpr, STORE_FIRST: gl.constexpr,
    BOUNDS: gl.constexpr, TWO_SIDED: gl.constexpr, BEGINS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Launch with 4 warps on any number of CTAs up to `num_works`; see the module and `BackwardProblem`.

    Add to dK and dV, or without ACCUMULATE overwrite them: then one CTA has all heads of a group, and with
    FP8_GRADIENTS at most PROMOTE blocks, because sums that leave the tensor cores in parts are added up in dK and dV.
    With two KV_BUFFERS, CTAs draw their tiles from `counter`, two int32 zeros, which are zeros again afterwards.
    """
    D: gl.constexpr = k8_desc.block_type.shape[4]
    e4m3: gl.constexpr = k8_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], k_desc.dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
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
    staging: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D // 2], gl.float32)
    dq = gl.allocate_shared_memory(gl.float32, [2, 64, D // 2], staging)  # dQ, dK and dV leave from it
    if FP8_GRADIENTS and KV_BUFFERS == 1:
        spare = gl.allocate_shared_memory(gl.float32, [2, 64, D // 2], staging)
    else:
        spare = dq
    k0 = gl.allocate_shared_memory(k_desc.dtype, [2 * KV_BUFFERS] + k_desc.block_type.shape, k_desc.layout)
    number = gl.allocate_shared_memory(gl.int32, [KV_BUFFERS, 1], NUMBER)
    kv_full = gl.allocate_shared_memory(gl.int64, [KV_BUFFERS, 1], barrier)
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV_BUFFERS, 1], barrier)
    for i in gl.static_range(KV_BUFFERS):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    sm = Fp8KeysShared(
        gl.allocate_shared_memory(e4m3, [STAGES, 1, 1, 64, D], q0_desc.layout),
        gl.allocate_shared_memory(q1_desc.dtype, [STAGES] + q1_desc.block_type.shape, q1_desc.layout),
        gl.allocate_shared_memory(e4m3, [STAGES, 1, 1, 64, D], dout0_desc.layout),
        gl.allocate_shared_memory(dout1_desc.dtype, [STAGES] + dout1_desc.block_type.shape, dout1_desc.layout),
        k0,
        k0,
        gl.allocate_shared_memory(e4m3, [2 * KV_BUFFERS, 1, 1, 1, 64, D], k8_desc.layout),
        gl.allocate_shared_memory(e4m3, [2 * KV_BUFFERS, 1, 1, 1, 64, D], v8_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, 64], stats_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [4, 64, 64], ds_layout),
        dq.index(0), dq.index(1), spare, number,
        kv_full, kv_empty, q_full, q_empty, ds_full, begin, begins,
        D, 0, STAGES, FP8_GRADIENTS, PROMOTE, KV_BUFFERS, KV_IN_REGISTERS, TURN_BEFORE_EXP, AHEAD, STORE_FIRST,
        ACCUMULATE,
    )  # fmt: skip
    if not TWO_SIDED:
        tiles_ptr = first_ptr  # not read
        stretches_ptr = first_ptr
    problem = BackwardProblem(
        min_row, num_rows, num_keys, row_start, dq_rows, num_heads, num_kv_heads, num_tiles, heads_together,
        heads_together, num_works, group, first_shift, split, second_shift, stop_shift, period, clock_ptr, first_ptr,
        stop_ptr, tiles_ptr, stretches_ptr, scale_log2, softmax_scale, BOUNDS, TWO_SIDED, BEGINS, 64, 2 * 64, False,
    )  # fmt: skip
    scales = Scales(q_scales_ptr, q_blocks, tile_scales_ptr, k_blocks)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_first, (sm, problem, scales, dq_desc, dk_desc, dv_desc)),
            (_consume_second, (sm, problem, scales, dq_desc, dk_desc, dv_desc)),
            (
                _load,
                (
                    sm,
                    problem,
                    q0_desc,
                    q1_desc,
                    dout0_desc,
                    dout1_desc,
                    k_desc,
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
