"""dQ, dK, dV for head_dim up to 128: one CTA holds 128 keys and streams the queries past them.

A producer warp loads by TMA; two independent consumers of four warps own 64 keys each. A step is one block of queries:

    producer   K V Q(0) dO(0) Q(1) dO(1) ...             mbarriers full / empty, a ring of stages
    consumer   S^T = K Q^T,  dP^T = V dO^T               (keys, queries), issued when it has the turn
               P = exp(S - lse)                          passes the turn on after a part of the exp
               dV += P^T dO,  dQ of the previous step    dQ: half of the columns, from the dS of both consumers
               dS = P (dP - delta),  dK += dS^T Q        dS also to shared memory, for dQ in the next step
               dQ of the previous step                   staged, and added to memory by TMA

P^T and dS^T never leave the registers on their way to dV and dK. dQ is one step late, so that neither consumer waits
for the other's dS; a block of zeros precedes the first step. dQ is added unscaled, in fp32, its columns permuted within
32 (see `interleave`; the postprocess kernel undoes it), in any order between CTAs. If ORDERED, three additional warps
add it in a fixed order (`dq.py`).

The consumers take turns (FlashAttention-3's ping-pong): one computes its exp while the other feeds the tensor cores.
Without turns they may run in step or alternate, as the compiler's schedule happens to be (a difference of 15% at
head_dim 64).

If PERSISTENT, CTAs are persistent: each takes several tiles, one after another from a counter. Under a window, CTAs
are then at about the same rows at a time; with tiles of single heads, the next tile starts sooner. V of the next tile
arrives while the last dQ is computed, and K while dK and dV leave, from the two buffers of dQ.
"""

from ringflash_kernels.hopper.backward.dq import (
    WRITERS,
    add_first,
    add_second,
    add_third,
    dq_buffer,
    dq_staging,
    numbered_staging,
    send_dq,
    wait_for_buffer,
    wait_until_read,
)
from ringflash_kernels.hopper.backward.order import DqOrder
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
from ringflash_kernels.hopper.backward.row_passes import RowPasses, end_of_draws, run_passes
from ringflash_kernels.hopper.compat import (
    MANY_ADDRESSES,
    aggregate,
    arrive_after,
    draw,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier,
    opaque,
    publish,
    reinterpret,
    settled,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_complete,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@aggregate
class KeyShared:
    """Shared memory of a CTA, and the compile-time choices that every role needs.

    A head is one piece of SPLIT columns, or two, of SPLIT and REST columns: their names end in 0 and 1.

        q, dout, stats   STAGES blocks of 64 queries: Q, dO, and lse with delta
        k, v             K and V of 64 keys for each consumer
        ds               dS of two steps: index 2 * buffer + W
        dq0, dq1         staging of the columns of dQ that consumer 0 and consumer 1 compute; dq0_buffers and
                         dq1_buffers: DQ_BUFFERS of each, of which dq0 and dq1 are the first
        ..._full         mbarriers that are signalled when a buffer is filled
        ..._empty        mbarriers that are signalled when it has been read
        begin            number that the producer hands on with a stage: its block, and if ORDERED or TWO_SIDED whether
                         that is masked; if DESCENDING, then for each stage the row of its dQ
        begins           first key that each query of a stage sees, if BEGINS
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
    ds: gl.shared_memory_descriptor
    dq0: gl.shared_memory_descriptor
    dq1: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    begin: gl.shared_memory_descriptor
    begins: gl.shared_memory_descriptor
    dq0_buffers: gl.shared_memory_descriptor
    dq1_buffers: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    SPLIT: gl.constexpr
    REST: gl.constexpr
    STAGES: gl.constexpr
    KV_IN_REGISTERS: gl.constexpr
    TURN_AFTER: gl.constexpr
    ORDERED: gl.constexpr
    DESCENDING: gl.constexpr
    DQ_BUFFERS: gl.constexpr
    ACCUMULATE: gl.constexpr
    SPLIT_WALKS: gl.constexpr
    PERSISTENT: gl.constexpr
    SPARE_WARPS: gl.constexpr


@gluon.jit
def _load_queries(sm, problem, descs, batch, head, block, step):
    """Load Q, dO and their statistics of a block once both consumers have released the buffer."""
    q0_desc, q1_desc, dout0_desc, dout1_desc, stats_desc, begins_desc = descs
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.REST
    nbytes: gl.constexpr = q0_desc.block_type.nbytes + (q1_desc.block_type.nbytes if R else 0)
    row = block * 64
    slot, parity = slot_of(step, sm.STAGES)
    full = sm.q_full.index(slot)
    mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
    mbarrier.expect(full, 2 * nbytes + stats_desc.block_type.nbytes + (64 * 4 if problem.BEGINS else 0))
    tma_load(q0_desc, [batch, head, row, 0], full, sm.q0.index(slot))
    if R:
        tma_load(q1_desc, [batch, head, row, C], full, sm.q1.index(slot))
    stats_coord = [batch * problem.num_heads + head, 0, problem.row_start + row]
    tma_load(stats_desc, stats_coord, full, sm.stats.index(slot))
    if problem.BEGINS:
        tma_load(begins_desc, [0, row], full, sm.begins.index(slot))
    tma_load(dout0_desc, [batch, head, row, 0], full, sm.dout0.index(slot))
    if R:
        tma_load(dout1_desc, [batch, head, row, C], full, sm.dout1.index(slot))


@gluon.jit
def _hand_on(drawn_ptr, index):
    """Write the number of the next tile to global memory, where consumers read it after its keys have arrived."""
    publish(drawn_ptr + 2 + gl.program_id(0), index)


@gluon.jit
def _load(
    sm, problem, q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, v1_desc, dout0_desc, dout1_desc, stats_desc, begins_desc,
    drawn_ptr, passes,
):  # fmt: skip
    """Producer: load K and V of each tile, then Q, dO and their statistics block by block."""
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.REST
    nbytes: gl.constexpr = q0_desc.block_type.nbytes + (q1_desc.block_type.nbytes if R else 0)
    descs = (q0_desc, q1_desc, dout0_desc, dout1_desc, stats_desc, begins_desc)
    step = 0
    round = 0
    ready = 0
    if sm.PERSISTENT:
        index = draw(drawn_ptr)
    else:
        index = gl.program_id(0)
    while index < problem.num_works:
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, full_start, full_stop, first, count = problem.steps(index, key)
        # Also for tiles that no query sees: their zeros are written from the buffers of V.
        full = sm.kv_full.index(0)
        mbarrier.wait(sm.kv_empty.index(0), (round & 1) ^ 1)
        if sm.PERSISTENT:
            _hand_on(drawn_ptr, index)
        mbarrier.expect(full, 4 * nbytes)
        if sm.PERSISTENT:
            for half in gl.static_range(2):
                tma_load(v0_desc, [batch, kv_head, key + half * 64, 0], full, sm.v0.index(half))
            mbarrier.wait(sm.kv_empty.index(1), (round & 1) ^ 1)
        for half in gl.static_range(2):
            row = key + half * 64
            tma_load(k0_desc, [batch, kv_head, row, 0], full, sm.k0.index(half))
            if not sm.PERSISTENT:
                tma_load(v0_desc, [batch, kv_head, row, 0], full, sm.v0.index(half))
            if R:
                tma_load(k1_desc, [batch, kv_head, row, C], full, sm.k1.index(half))
                tma_load(v1_desc, [batch, kv_head, row, C], full, sm.v1.index(half))
        round += 1
        if sm.SPARE_WARPS:
            section = passes.section_of(problem, index)
            if section > ready:
                passes.wait_for_section(problem, section)
                ready = section
        if start < stop:  # the block of zeros that precedes the first is a step without data
            slot, parity = slot_of(step, sm.STAGES)
            mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
            mbarrier.arrive(sm.q_full.index(slot), count=1)
            step += 1
        if problem.TWO_SIDED and (sm.ORDERED or sm.DESCENDING):
            for i in range(count):
                begin, end, masked = problem.stretch(first + count - 1 - i)
                for j in range(end - begin):
                    block = end - 1 - j
                    for g in range(problem.group):
                        slot, parity = slot_of(step, sm.STAGES)
                        mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
                        send_number(sm.begin.index(slot), block * 2 + masked)
                        if sm.DESCENDING:
                            row = problem.dq_row(batch, first_head + g) + block * 64
                            send_number(sm.begin.index(sm.STAGES + slot), row)
                        _load_queries(sm, problem, descs, batch, first_head + g, block, step)
                        step += 1
        elif sm.ORDERED:
            g = 0
            block = stop - 1
            for _ in range((stop - start) * problem.group):
                slot, parity = slot_of(step, sm.STAGES)
                mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
                masked = (block < full_start) | (block >= full_stop)
                send_number(sm.begin.index(slot), block * 2 + masked.to(gl.int32))
                _load_queries(sm, problem, descs, batch, first_head + g, block, step)
                step += 1
                g, block = problem.descend(g, block)
        else:
            step = load_in_rounds(sm, problem, _load_queries, descs, batch, first_head, start, stop, first, count, step)
        if sm.PERSISTENT:
            index = draw(drawn_ptr)
        else:
            index += gl.num_programs(0)
    if sm.PERSISTENT:
        mbarrier.wait(sm.kv_empty.index(0), (round & 1) ^ 1)
        _hand_on(drawn_ptr, index)
        mbarrier.arrive(sm.kv_full.index(0), count=1)
        end_of_draws(passes, problem, drawn_ptr, sm.SPARE_WARPS)


@gluon.jit
def take_turn(token, W: gl.constexpr):
    """Wait until the other consumer has passed the turn to consumer W."""
    named_barrier(token, 8 + W, 256, False)


@gluon.jit
def pass_turn(token, W: gl.constexpr):
    """Let the other consumer start a step."""
    named_barrier(token, 9 - W, 256, True)


@gluon.constexpr_function
def _only_v(rest, in_registers):
    """Return True if V is in registers, but K is not: at head_dim 96 with 3.9, where ptxas would spill dozens."""
    return bool(MANY_ADDRESSES and rest and in_registers)


@gluon.jit
def dq_columns(sm, half, W: gl.constexpr):
    """Return K of one consumer's keys, the columns whose dQ consumer W computes: half of them, or a piece."""
    if sm.REST == 0:
        k = sm.k0.index(half).reshape([64, sm.SPLIT]).slice(W * (sm.SPLIT // 2), sm.SPLIT // 2, dim=1)
    elif W == 0:
        k = sm.k0.index(half).reshape([64, sm.SPLIT])
    else:
        k = sm.k1.index(half).reshape([64, sm.REST])
    return k


@gluon.jit
def dq_mma(sm, buffer, W: gl.constexpr):
    """Issue dQ = dS K over both consumers' keys, for the columns of consumer W."""
    HIDDEN: gl.constexpr = _only_v(sm.REST, sm.KV_IN_REGISTERS)
    k = dq_columns(sm, opaque(0) if HIDDEN else 0, W)
    N: gl.constexpr = k.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    ds = sm.ds.index(buffer * 2).permute((1, 0))
    dq = warpgroup_mma(ds, k, gl.zeros([64, N], gl.float32, layout), use_acc=False, is_async=True)
    k = dq_columns(sm, opaque(1) if HIDDEN else 1, W)
    return warpgroup_mma(sm.ds.index(buffer * 2 + 1).permute((1, 0)), k, dq, is_async=True)


@gluon.jit
def _step(sm, problem, dq_desc, dk0, dk1, dv0, dv1, k, v, step, block, key, seen, masked, dq_row, W: gl.constexpr):
    """Process one block of queries: P, dV, dS and dK of this block, and dQ of the previous one, at `dq_row`.

    If ORDERED or TWO_SIDED, the producer says which block it is and whether it is masked. If DESCENDING, it also says
    where dQ goes, which is returned for the next step; otherwise the block is. If ORDERED, the writers know.

    Args:
        k, v: K and V of this consumer's keys in registers, if KV_IN_REGISTERS; otherwise not read.
        step: number of the step since the CTA began, which selects stages and buffers.
        key: first key of the tile.
        seen: rows [first, stop) that see each of this consumer's keys; read if BOUNDS.
    """
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.REST
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout0, 2)
    dtype: gl.constexpr = sm.q0.dtype
    slot, parity = slot_of(step, sm.STAGES)
    current = step & 1  # buffer of this block's dS
    last, last_parity = slot_of(step - 1, 2)
    q0 = sm.q0.index(slot).reshape([64, C])
    dout0 = sm.dout0.index(slot).reshape([64, C])
    stats = sm.stats.index(slot).reshape([2, 64])
    zeros = gl.zeros([64, 64], gl.float32, s_layout)
    if R:
        layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
        operand1: gl.constexpr = gl.DotOperandLayout(0, layout1, 2)
        k1 = sm.k1.index(opaque(W)).reshape([64, R])
        v1 = sm.v1.index(opaque(W)).reshape([64, R])
        q1 = sm.q1.index(slot).reshape([64, R])
        dout1 = sm.dout1.index(slot).reshape([64, R])

    if not sm.KV_IN_REGISTERS:
        # Without a fixed order dQ leaves by TMA, and is 5 to 10% faster if only V's place is hidden.
        k = sm.k0.index(opaque(W) if sm.ORDERED else W).reshape([64, C])
        v = sm.v0.index(opaque(W)).reshape([64, C])
    if _only_v(R, sm.KV_IN_REGISTERS):
        k = sm.k0.index(W).reshape([64, C])

    # S^T = K Q^T and dP^T = V dO^T
    wait_for_buffer(sm, step - 1, W)
    take_turn(step, W)
    mbarrier.wait(sm.q_full.index(slot), parity)
    s = warpgroup_mma(k, q0.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if R:
        s = warpgroup_mma(k1, q1.permute((1, 0)), s, is_async=True)
    dp = warpgroup_mma(v, dout0.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if R:
        dp = warpgroup_mma(v1, dout1.permute((1, 0)), dp, is_async=True)

    # P = exp(S - lse)
    lse = stats.slice(0, 1, dim=0).load(s_layout)
    s = warpgroup_mma_wait(2 if R else 1, deps=(s,))
    if sm.ORDERED or problem.TWO_SIDED:
        number = receive_number(sm.begin.index(slot))
        block = number >> 1
        masked = (number & 1) != 0
    if sm.DESCENDING:
        next_row = receive_number(sm.begin.index(sm.STAGES + slot))
    if masked:  # a second, masked loop would make ptxas spill in the first
        if problem.BOUNDS:
            first_row, stop_row = seen
        else:
            keys = key + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            first_row, stop_row = problem.rows_seeing(keys)
        columns = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
        # Two ways to write one mask. In these cases the first makes ptxas spill less, or is faster.
        if R or (MANY_ADDRESSES and not sm.ORDERED and not (sm.KV_IN_REGISTERS and problem.TWO_SIDED)):
            inside = problem.within(block * 64 + columns, first_row, stop_row)
        else:
            inside = problem.within_block(block * 64, columns, first_row, stop_row)
        if problem.BEGINS:
            begins = sm.begins.index(slot).reshape([64]).load(gl.SliceLayout(0, s_layout))
            keys = key + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            inside = inside & (keys[:, None] >= begins[None, :])
        s = gl.where(inside, s, float("-inf"))
    p = gl.exp2(s * problem.scale_log2 - lse)
    p = arrive_after(p, 32, sm.TURN_AFTER, 9 - W, 256)  # `pass_turn` at a place that ptxas does not choose
    p_bits = p.to(dtype)
    p0 = gl.convert_layout(p_bits, operand)
    delta = stats.slice(1, 1, dim=0).load(s_layout)

    # dV += P^T dO, dQ of the previous block; this wait also keeps ptxas from moving exp past the wgmma wait
    mbarrier.wait(sm.ds_full.index(last), last_parity)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    if _only_v(R, sm.KV_IN_REGISTERS):
        dp, delta = settled(dp - delta), 0.0  # subtract now: P in 16 bits needs delta's registers, or ptxas spills
    dv0 = warpgroup_mma(p0, dout0, dv0, is_async=True)
    if R:
        p1 = gl.convert_layout(p_bits, operand1)
        dv1 = warpgroup_mma(p1, dout1, dv1, is_async=True)
    dq = dq_mma(sm, last, W)

    # dS = P (dP - delta), dK += dS^T Q
    ds = (p * (dp - delta)).to(dtype)
    ds0 = gl.convert_layout(ds, operand)
    dk0 = warpgroup_mma(ds0, q0, dk0, is_async=True)
    if R:
        ds1 = gl.convert_layout(ds, operand1)
        dk1 = warpgroup_mma(ds1, q1, dk1, is_async=True)
    staged = dq_buffer(sm, step - 1, W)
    sm.ds.index(current * 2 + W).store(ds)
    dq = warpgroup_mma_wait(2 if R else 1, deps=(dq,))
    staged.store(interleave(dq, staged.shape[1]))
    fence_async_shared()
    mbarrier.arrive(sm.ds_full.index(current), count=1)
    send_dq(sm, dq_desc, dq_row, staged, step - 1, W)
    if R:
        dk0, dk1, ds0, ds1, dv0, dv1, p0, p1 = warpgroup_mma_wait(0, deps=(dk0, dk1, ds0, ds1, dv0, dv1, p0, p1))
    else:
        dk0, ds0, dv0, p0 = warpgroup_mma_wait(0, deps=(dk0, ds0, dv0, p0))
    mbarrier.arrive(sm.q_empty.index(slot), count=1)
    if sm.DESCENDING:
        result = dk0, dk1, dv0, dv1, next_row
    else:
        result = dk0, dk1, dv0, dv1, block
    return result


@gluon.jit
def _pass_block(sm, step, W: gl.constexpr):
    """Pass a tile's first block if it sees only the other consumer's keys: dS is 0, and so is the previous dQ."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    slot, _parity = slot_of(step, sm.STAGES)
    last, last_parity = slot_of(step - 1, 2)
    take_turn(step, W)
    pass_turn(step, W)
    mbarrier.wait(sm.ds_full.index(last), last_parity)
    sm.ds.index((step & 1) * 2 + W).store(gl.zeros([64, 64], sm.ds.dtype, s_layout))
    fence_async_shared()
    mbarrier.arrive(sm.ds_full.index(step & 1), count=1)
    mbarrier.arrive(sm.q_empty.index(slot), count=1)


@gluon.jit
def _last_dq(sm, dq_desc, step, dq_row, W: gl.constexpr):
    """Compute dQ of a tile's last block, whose step is `step` - 1, and let it leave."""
    last, parity = slot_of(step - 1, 2)
    if sm.PERSISTENT:
        mbarrier.arrive(sm.kv_empty.index(0), count=1)
    mbarrier.wait(sm.ds_full.index(last), parity)
    dq = dq_mma(sm, last, W)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    if sm.PERSISTENT:
        mbarrier.arrive(sm.kv_empty.index(1), count=1)
    wait_for_buffer(sm, step - 1, W)
    staged = dq_buffer(sm, step - 1, W)
    staged.store(interleave(dq, staged.shape[1]))
    fence_async_shared()
    send_dq(sm, dq_desc, dq_row, staged, step - 1, W)
    wait_until_read(sm, step, W)


@gluon.jit
def _send(sm, desc, coord, staged, ADD: gl.constexpr):
    """Add a staged fp32 tile to dK or dV, or store it."""
    if ADD:
        tma_reduce_add(desc, coord, staged)
    else:
        tma_store(desc, coord, staged)


@gluon.jit
def _write_piece(sm, desc, x, coord, column, ADD: gl.constexpr, W: gl.constexpr):
    """Add or store 32 columns of dK or dV in fp32, staged in this consumer's V."""
    staged = reinterpret(sm.v0.index(W), gl.float32, [1, 1, 64, 32], desc.layout)
    tma_store_wait(0)
    staged.reshape([64, 32]).store(x)
    fence_async_shared()
    _send(sm, desc, [coord[0], coord[1], coord[2], column], staged, ADD)


@gluon.jit
def _write_pieces(sm, desc0, desc1, x0, x1, coord, ADD: gl.constexpr, W: gl.constexpr):
    """Add or store dK or dV in its two pieces of 64 and 32 columns (fp32: three of 32), staged in this consumer's V."""
    if desc1.dtype == gl.float32:
        left, right = halves(x0, 64)
        _write_piece(sm, desc1, left, coord, 0, ADD, W)
        _write_piece(sm, desc1, right, coord, 32, ADD, W)
        _write_piece(sm, desc1, x1, coord, 64, ADD, W)
    else:
        dtype: gl.constexpr = sm.v0.dtype
        tma_store_wait(0)
        sm.v0.index(W).reshape([64, 64]).store(x0.to(dtype))
        sm.v1.index(W).reshape([64, 32]).store(x1.to(dtype))
        fence_async_shared()
        tma_store(desc0, [coord[0], coord[1], coord[2], 0], sm.v0.index(W))
        tma_store(desc1, [coord[0], coord[1], coord[2], 64], sm.v1.index(W))


@gluon.jit
def _write_whole(sm, dk_desc, dv_desc, dk, dv, coord, ADD: gl.constexpr, W: gl.constexpr):
    """Add or store dK and dV of this consumer's 64 keys (fp32: in halves), staged in two buffers."""
    D: gl.constexpr = sm.SPLIT
    dtype: gl.constexpr = sm.v0.dtype
    at = [coord[0], coord[1], coord[2], 0]
    spare = dq_staging(sm, W)
    if sm.PERSISTENT:
        other = numbered_staging(sm, 1, W)
        tma_store_wait(0)  # the previous tile may have written without a step in between
    else:
        other = sm.v0.index(W)
    if dk_desc.dtype == gl.float32:
        left = reinterpret(other, gl.float32, [1, 1, 64, D // 2], dv_desc.layout)
        right = reinterpret(spare, gl.float32, [1, 1, 64, D // 2], dv_desc.layout)
        at_right = [coord[0], coord[1], coord[2], D // 2]
        for which in gl.static_range(2):
            x, y = halves(dk if which else dv, D)
            left.reshape([64, D // 2]).store(x)
            right.reshape([64, D // 2]).store(y)
            fence_async_shared()
            _send(sm, dk_desc if which else dv_desc, at, left, ADD)
            _send(sm, dk_desc if which else dv_desc, at_right, right, ADD)
            tma_store_wait(0)
    else:
        dv_staged = reinterpret(other, dtype, [1, 1, 64, D], dv_desc.layout)
        dk_staged = reinterpret(spare, dtype, [1, 1, 64, D], dk_desc.layout)
        dv_staged.reshape([64, D]).store(dv.to(dtype))
        dk_staged.reshape([64, D]).store(dk.to(dtype))
        fence_async_shared()
        tma_store(dv_desc, at, dv_staged)
        tma_store(dk_desc, at, dk_staged)
        if not sm.PERSISTENT:
            tma_store_wait(0)


@gluon.jit
def _write(sm, dk0_desc, dk1_desc, dv0_desc, dv1_desc, dk0, dk1, dv0, dv1, coord, ADD: gl.constexpr, W: gl.constexpr):
    """Write dK and dV of this consumer's 64 keys, or add them."""
    if sm.REST:
        _write_pieces(sm, dv0_desc, dv1_desc, dv0, dv1, coord, ADD, W)
        _write_pieces(sm, dk0_desc, dk1_desc, dk0, dk1, coord, ADD, W)
        tma_store_wait(0)
    else:
        _write_whole(sm, dk0_desc, dv0_desc, dk0, dv0, coord, ADD, W)


@gluon.jit
def _consume(sm, problem, dq_desc, dk0_desc, dk1_desc, dv0_desc, dv1_desc, sums, drawn_ptr, passes, W: gl.constexpr):
    """Consumer W: compute the gradients of 64 keys of every tile."""
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.REST
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    step = 0
    round = 0
    if W == 1:
        pass_turn(step, W)
    if sm.PERSISTENT:
        mbarrier.wait(sm.kv_full.index(0), 0)
        index = gl.load(drawn_ptr + 2 + gl.program_id(0), volatile=True)
    else:
        index = gl.program_id(0)
    while index < problem.num_works:
        key, batch, first_head, kv_head = problem.work(index)
        start, stop, full_start, full_stop, _first, _count = problem.steps(index, key)
        dk0 = gl.zeros([64, C], gl.float32, layout0)
        dv0 = gl.zeros([64, C], gl.float32, layout0)
        if R:
            layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
            dk1 = gl.zeros([64, R], gl.float32, layout1)
            dv1 = gl.zeros([64, R], gl.float32, layout1)
        else:
            dk1 = 0
            dv1 = 0
        mbarrier.wait(sm.kv_full.index(0), round & 1)
        if start < stop:
            slot, parity = slot_of(step, sm.STAGES)
            mbarrier.wait(sm.q_full.index(slot), parity)
            mbarrier.arrive(sm.q_empty.index(slot), count=1)
            if sm.PERSISTENT:
                tma_store_wait(0)  # until dK and dV of the previous tile have been read
            sm.ds.index((step & 1) * 2 + W).store(gl.zeros([64, 64], sm.ds.dtype, s_layout))
            fence_async_shared()
            mbarrier.arrive(sm.ds_full.index(step & 1), count=1)
            step += 1
            if sm.KV_IN_REGISTERS:  # at head_dim 64 shared-memory bandwidth is the limit
                k = 0 if _only_v(R, True) else sm.k0.index(W).reshape([64, C]).load(operand)
                v = sm.v0.index(W).reshape([64, C]).load(operand)
            else:
                k = 0
                v = 0
            if problem.BOUNDS:  # read once per tile: in the loop the addresses would take more registers
                seen = problem.rows_seeing(key + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout)))
            else:
                seen = (0, 0)
            if sm.ORDERED:
                for _ in range((stop - start) * problem.group):
                    dk0, dk1, dv0, dv1, _block = _step(
                        sm, problem, dq_desc, dk0, dk1, dv0, dv1, k, v, step, 0, key, seen, False, 0, W
                    )
                    step += 1
                _last_dq(sm, dq_desc, step, 0, W)
            elif sm.DESCENDING:
                dq_row = problem.dq_row(batch, first_head)
                for _ in range(stop * problem.group):
                    dk0, dk1, dv0, dv1, dq_row = _step(
                        sm, problem, dq_desc, dk0, dk1, dv0, dv1, k, v, step, 0, key, seen, False, dq_row, W
                    )
                    step += 1
                _last_dq(sm, dq_desc, step, dq_row, W)
            elif problem.TWO_SIDED:
                head_row = problem.dq_row(batch, first_head)
                dq_row = head_row
                for _g in range(problem.group):
                    for _ in range(stop):
                        dk0, dk1, dv0, dv1, block = _step(
                            sm, problem, dq_desc, dk0, dk1, dv0, dv1, k, v, step, 0, key, seen, False, dq_row, W
                        )
                        step += 1
                        dq_row = head_row + block * 64
                    head_row += problem.dq_rows
                _last_dq(sm, dq_desc, step, dq_row, W)
            else:
                head_row = problem.dq_row(batch, first_head)
                dq_row = head_row + start * 64
                for g in range(problem.group):
                    slot, parity = slot_of(step, sm.STAGES)
                    mbarrier.wait(sm.q_full.index(slot), parity)
                    block = receive_number(sm.begin.index(slot))
                    begin = start
                    # Half of a step on the diagonal. Where dK and dV are added, ptxas would spill, and loses 3%.
                    if W == 1 and not (problem.BOUNDS or sm.ACCUMULATE):
                        first_row, _stop_row = problem.rows_seeing(key + 64)
                        if (g == 0) & (first_row >= (block + 1) * 64):
                            _pass_block(sm, step, W)
                            step += 1
                            dq_row = head_row + block * 64
                            block = problem.next_block(block, start, stop)
                            begin += 1
                    for _ in range(begin, stop):
                        masked = (block < full_start) | (block >= full_stop)
                        dk0, dk1, dv0, dv1, _block = _step(
                            sm, problem, dq_desc, dk0, dk1, dv0, dv1, k, v, step, block, key, seen, masked, dq_row, W
                        )
                        step += 1
                        dq_row = head_row + block * 64
                        block = problem.next_block(block, start, stop)
                    head_row += problem.dq_rows
                _last_dq(sm, dq_desc, step, dq_row, W)
        if (not sm.ACCUMULATE) | (start < stop):
            coord = [batch, kv_head, key + W * 64]
            dk0 = dk0 * problem.softmax_scale
            if R:
                dk1 = dk1 * problem.softmax_scale
            if sm.SPLIT_WALKS:
                sum = problem.sum_of(index)
                if sum > 0:
                    at = [batch, kv_head, (sum - 1) * 128 + W * 64]
                    _write(sm, sums[0], sums[1], sums[2], sums[3], dk0, dk1, dv0, dv1, at, True, W)
                else:
                    _write(sm, dk0_desc, dk1_desc, dv0_desc, dv1_desc, dk0, dk1, dv0, dv1, coord, False, W)
            else:
                _write(sm, dk0_desc, dk1_desc, dv0_desc, dv1_desc, dk0, dk1, dv0, dv1, coord, sm.ACCUMULATE, W)
        if not sm.PERSISTENT:
            mbarrier.arrive(sm.kv_empty.index(0), count=1)
        elif start == stop:
            mbarrier.arrive(sm.kv_empty.index(0), count=1)
            mbarrier.arrive(sm.kv_empty.index(1), count=1)
        round += 1
        if sm.PERSISTENT:
            mbarrier.wait(sm.kv_full.index(0), round & 1)
            next_index = gl.load(drawn_ptr + 2 + gl.program_id(0), volatile=True)
            if sm.SPARE_WARPS:
                tma_store_complete(round)
                passes.report(problem, index)
            index = next_index
        else:
            index += gl.num_programs(0)
    if sm.PERSISTENT:
        tma_store_wait(0)
    if W == 0:
        take_turn(step, W)  # so that no barrier is left half full


@gluon.jit
def _consume_first(sm, problem, dq_desc, dk0_desc, dk1_desc, dv0_desc, dv1_desc, sums, drawn_ptr, passes):
    _consume(sm, problem, dq_desc, dk0_desc, dk1_desc, dv0_desc, dv1_desc, sums, drawn_ptr, passes, 0)


@gluon.jit
def _consume_second(sm, problem, dq_desc, dk0_desc, dk1_desc, dv0_desc, dv1_desc, sums, drawn_ptr, passes):
    _consume(sm, problem, dq_desc, dk0_desc, dk1_desc, dv0_desc, dv1_desc, sums, drawn_ptr, passes, 1)


@gluon.jit(
    do_not_specialize=[
        *KEY_TILE_ARGUMENTS, "heads_at_last",
        "numbers_ptr", "num_blocks", "first_number", "drawn_ptr", "counters_ptr", "out_ptr", "dout_ptr", "lse_ptr",
        "stats_ptr", "acc_ptr", "dq_ptr", "out_batch", "out_row", "out_head", "dout_batch", "dout_row", "dout_head",
        "lse_batch", "lse_head", "lse_row", "dq_batch", "dq_row", "dq_head", "seqlen",
    ]
)  # fmt: skip
def backward_keys(
    q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, v1_desc, dout0_desc, dout1_desc, stats_desc, dq0_desc, dq1_desc,
    dk0_desc, dk1_desc, dv0_desc, dv1_desc, dk0_sum, dk1_sum, dv0_sum, dv1_sum, begins_desc,
    first_ptr, stop_ptr, tiles_ptr, stretches_ptr,
    min_row, num_rows, num_keys, row_start, dq_rows, num_heads, num_kv_heads, num_tiles, heads_together,
    heads_at_last, num_works, group, first_shift, split, second_shift, stop_shift, period, clock_ptr, numbers_ptr,
    num_blocks, first_number, drawn_ptr, counters_ptr, out_ptr, dout_ptr, lse_ptr, stats_ptr, acc_ptr, dq_ptr,
    out_batch, out_row, out_head, dout_batch, dout_row, dout_head, lse_batch, lse_head, lse_row,
    dq_batch, dq_row, dq_head, seqlen, scale_log2, softmax_scale,
    SPLIT: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr, KV_IN_REGISTERS: gl.constexpr,
    TURN_AFTER: gl.constexpr, BOUNDS: gl.constexpr, TWO_SIDED: gl.constexpr, BEGINS: gl.constexpr,
    ORDERED: gl.constexpr, DESCENDING: gl.constexpr, DQ_BUFFERS: gl.constexpr, ACCUMULATE: gl.constexpr,
    SPLIT_WALKS: gl.constexpr,
    PERSISTENT: gl.constexpr, SPARE_WARPS: gl.constexpr,
):  # fmt: skip
    """dQ, dK and dV; launch with 4 warps on any number of CTAs up to `num_works`. See the module and `BackwardProblem`.

    DESCENDING: short walks of a two-sided mask go down from their last block, with all heads of a group at each; see
        `Walks`.
    SPLIT_WALKS: some walks are parts of a tile's, and add their dK and dV to fp32 sums.
    PERSISTENT: see the module. drawn_ptr: two int32 zeros, which are zeros again afterwards, and one number for each
        CTA.
    SPARE_WARPS: three more warps prepare and cast other heads, see `RowPasses`, whose fields are counters_ptr to
        seqlen.
    The columns of every tile are one piece (REST = 0; descriptors 1 are None) or two, of SPLIT and REST columns.
    """
    dtype: gl.constexpr = q0_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2 if PERSISTENT else 1, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(2 if PERSISTENT else 1):
        mbarrier.init(kv_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
    if ORDERED:
        dq_full = gl.allocate_shared_memory(gl.int64, [2 * WRITERS, 1], barrier)
        dq_empty = gl.allocate_shared_memory(gl.int64, [2 * DQ_BUFFERS, 1], barrier)
        for i in gl.static_range(2 * WRITERS):
            mbarrier.init(dq_full.index(i), count=1)
        for i in gl.static_range(2 * DQ_BUFFERS):
            mbarrier.init(dq_empty.index(i), count=1)
    else:
        # Not an unused pair: the compiler would reuse its memory for Q, but the hardware may still write to an
        # initialised barrier, which it does when a time slice ends.
        dq_full = ds_full
        dq_empty = ds_full
    begin = gl.allocate_shared_memory(gl.int32, [2 * STAGES if DESCENDING else STAGES, 1], NUMBER)
    if BEGINS:
        begins = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 64], begins_desc.layout)
    else:
        begins = begin
    q0 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, SPLIT], q0_desc.layout)
    dout0 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, SPLIT], dout0_desc.layout)
    k0 = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, SPLIT], k0_desc.layout)
    v0 = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, SPLIT], v0_desc.layout)
    if REST:
        q1 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, REST], q1_desc.layout)
        dout1 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, REST], dout1_desc.layout)
        k1 = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, REST], k1_desc.layout)
        v1 = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, REST], v1_desc.layout)
        dq1_columns = dq1_desc
    else:
        q1 = q0
        dout1 = dout0
        k1 = k0
        v1 = v0
        dq1_columns = dq0_desc
    dq0_buffers = gl.allocate_shared_memory(gl.float32, [DQ_BUFFERS] + dq0_desc.block_type.shape, dq0_desc.layout)
    dq1_buffers = gl.allocate_shared_memory(gl.float32, [DQ_BUFFERS] + dq1_columns.block_type.shape, dq1_columns.layout)
    sm = KeyShared(
        q0, q1, dout0, dout1, k0, k1, v0, v1,
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, 64], stats_desc.layout),
        gl.allocate_shared_memory(dtype, [4, 64, 64], ds_layout),
        dq0_buffers.index(0), dq1_buffers.index(0), kv_full, kv_empty,
        q_full, q_empty, ds_full, begin, begins, dq0_buffers, dq1_buffers, dq_full, dq_empty,
        SPLIT, REST, STAGES, KV_IN_REGISTERS, TURN_AFTER, ORDERED, DESCENDING, DQ_BUFFERS, ACCUMULATE,
        SPLIT_WALKS, PERSISTENT, SPARE_WARPS,
    )  # fmt: skip
    if not TWO_SIDED:
        tiles_ptr = first_ptr  # not read
        stretches_ptr = first_ptr
    problem = BackwardProblem(
        min_row, num_rows, num_keys, row_start, dq_rows, num_heads, num_kv_heads, num_tiles, heads_together,
        heads_at_last, num_works, group, first_shift, split, second_shift, stop_shift, period, clock_ptr, first_ptr,
        stop_ptr, tiles_ptr, stretches_ptr, scale_log2, softmax_scale, BOUNDS, TWO_SIDED, BEGINS, 64, 2 * 64,
        not (ORDERED or BOUNDS),
    )  # fmt: skip
    fence_async_shared()
    if SPLIT_WALKS:
        sums = (dk0_sum, dk1_sum, dv0_sum, dv1_sum)
    else:
        sums = 0
    if SPARE_WARPS:
        passes = RowPasses(
            out_ptr, dout_ptr, lse_ptr, stats_ptr, acc_ptr, dq_ptr, counters_ptr, out_batch, out_row, out_head,
            dout_batch, dout_row, dout_head, lse_batch, lse_head, lse_row, dq_batch, dq_row, dq_head, seqlen,
        )  # fmt: skip
    else:
        passes = 0
    load_args = (
        sm, problem, q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, v1_desc, dout0_desc, dout1_desc, stats_desc,
        begins_desc, drawn_ptr, passes,
    )  # fmt: skip
    first_args = sm, problem, dq0_desc, dk0_desc, dk1_desc, dv0_desc, dv1_desc, sums, drawn_ptr, passes
    second_args = sm, problem, dq1_columns, dk0_desc, dk1_desc, dv0_desc, dv1_desc, sums, drawn_ptr, passes
    if ORDERED:
        order = DqOrder(numbers_ptr, num_blocks, first_number)
        gl.warp_specialize(
            [
                (_consume_first, first_args),
                (_consume_second, second_args),
                (_load, load_args),
                (add_first, (sm, problem, order, dq0_desc, dq1_columns)),
                (add_second, (sm, problem, order, dq0_desc, dq1_columns)),
                (add_third, (sm, problem, order, dq0_desc, dq1_columns)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )
    elif SPARE_WARPS:
        gl.warp_specialize(
            [
                (_consume_first, first_args),
                (_consume_second, second_args),
                (_load, load_args),
                (run_passes, (passes, problem, drawn_ptr, SPLIT)),
                (run_passes, (passes, problem, drawn_ptr, SPLIT)),
                (run_passes, (passes, problem, drawn_ptr, SPLIT)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [(_consume_first, first_args), (_consume_second, second_args), (_load, load_args)], [4, 1], [240, 24]
        )
