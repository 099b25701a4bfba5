"""Kernel of dQ for wide heads, with a fixed order of sums: one CTA holds 128 queries and streams the keys past them.

Each element of the dQ accumulator is written once per hop: the first hop stores it, if it covers all queries; later
hops add to it. S and dP are computed a second time (7 products per tile instead of 5).
`BackwardProblem` is read with queries and keys exchanged: its "keys" are the queries held, its "rows" the keys that
are streamed.

A producer warp loads by TMA; two consumers of four warps own 64 queries each. K and V of a block of keys alternate in
one ring of buffers: V is released after dP, K after dQ += dS K, so three buffers are enough if no more fit
(head_dim 256). A step is dP and S, exp, dQ; with EXP_UNDER_DP it is S and dP, exp while dP is in flight, dQ.
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
    named_barrier,
    opaque,
    start_of,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@aggregate
class QueryShared:
    """Shared memory of a CTA, operands in two pieces of columns (0 and 1), and compile-time choices for every role.

    q, dout           Q and dO of 64 queries for each consumer; q_full and q_empty are their mbarriers
    kv                ring of SLOTS blocks of 64 keys, K and V in turn (`_slots`), with the mbarriers full and empty
    begin             with K under a two-sided mask: its block, and whether that is masked
    ends              with K under a two-sided mask: the end of each key
    """

    q0: gl.shared_memory_descriptor
    q1: gl.shared_memory_descriptor
    dout0: gl.shared_memory_descriptor
    dout1: gl.shared_memory_descriptor
    kv0: gl.shared_memory_descriptor
    kv1: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    begin: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor
    SPLIT: gl.constexpr
    REST: gl.constexpr
    VALUE_REST: gl.constexpr
    SLOTS: gl.constexpr
    EXP_UNDER_DP: gl.constexpr
    TURNS: gl.constexpr
    HELD: gl.constexpr
    ADD: gl.constexpr


@gluon.jit
def _tile_of(problem, index):
    """Return first query, batch, head and KV head of a work item. The last queries, longest if causal, go first."""
    row, batch, head, kv_head = problem.work(index)
    if not problem.TWO_SIDED:
        row = (problem.num_tiles - 1) * problem.BLOCK_N - row
    return row, batch, head, kv_head


@gluon.jit
def _slots(sm, step):
    """Return the buffers of K and of V of a step, and the parities of their barriers in that step."""
    if sm.EXP_UNDER_DP:
        k_slot, k_parity = slot_of(2 * step, sm.SLOTS)
        v_slot, v_parity = slot_of(2 * step + 1, sm.SLOTS)
    else:
        v_slot, v_parity = slot_of(2 * step, sm.SLOTS)
        k_slot, k_parity = slot_of(2 * step + 1, sm.SLOTS)
    return k_slot, k_parity, v_slot, v_parity


@gluon.jit
def _load_block(sm, desc0, desc1, coord, slot, parity, OTHERS: gl.constexpr, R: gl.constexpr):
    """Fill a buffer of the ring once both consumers have released it; OTHERS: bytes of other loads."""
    full = sm.full.index(slot)
    mbarrier.wait(sm.empty.index(slot), parity ^ 1)
    mbarrier.expect(full, desc0.block_type.nbytes + (desc1.block_type.nbytes if R else 0) + OTHERS)
    tma_load(desc0, [coord[0], coord[1], coord[2], 0], full, sm.kv0.index(slot))
    if R:
        tma_load(desc1, [coord[0], coord[1], coord[2], sm.SPLIT], full, sm.kv1.index(slot))


@gluon.jit
def _load_both(sm, problem, k0_desc, k1_desc, v0_desc, v1_desc, ends_desc, batch, kv_head, block, masked, step):
    """Load K and V of a block; under a two-sided mask K comes with its ends, and with what the step is."""
    R: gl.constexpr = sm.REST
    VR: gl.constexpr = sm.VALUE_REST
    OTHERS: gl.constexpr = 64 * 4 if problem.TWO_SIDED else 0
    coord = [batch, kv_head, block * 64]
    k_slot, k_parity, v_slot, v_parity = _slots(sm, step)
    if not sm.EXP_UNDER_DP:
        _load_block(sm, v0_desc, v1_desc, coord, v_slot, v_parity, 0, VR)
    if problem.TWO_SIDED:
        mbarrier.wait(sm.empty.index(k_slot), k_parity ^ 1)
        send_number(sm.begin.index(k_slot), block * 2 + masked)
    _load_block(sm, k0_desc, k1_desc, coord, k_slot, k_parity, OTHERS, R)
    if problem.TWO_SIDED:
        tma_load(ends_desc, [0, block * 64], sm.full.index(k_slot), sm.ends.index(k_slot))
    if sm.EXP_UNDER_DP:
        _load_block(sm, v0_desc, v1_desc, coord, v_slot, v_parity, 0, VR)


@gluon.jit
def _load_keys(sm, problem, q0_desc, q1_desc, dout0_desc, dout1_desc, k0_desc, k1_desc, v0_desc, v1_desc, ends_desc):
    """Producer: load Q and dO of each tile, then K and V block by block."""
    C: gl.constexpr = sm.SPLIT
    VR: gl.constexpr = sm.VALUE_REST
    nbytes: gl.constexpr = q0_desc.block_type.nbytes + q1_desc.block_type.nbytes
    value_nbytes: gl.constexpr = dout0_desc.block_type.nbytes + (dout1_desc.block_type.nbytes if VR else 0)
    step = 0
    round = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        row, batch, head, kv_head = _tile_of(problem, index)
        start, stop, _full_start, _full_stop, first, count = problem.steps(index, row)
        if (not sm.ADD) | (start < stop):
            full = sm.q_full.index(0)
            mbarrier.wait(sm.q_empty.index(0), (round & 1) ^ 1)
            mbarrier.expect(full, 2 * (nbytes + value_nbytes))
            for half in gl.static_range(2):
                at = row + half * 64
                tma_load(q0_desc, [batch, head, at, 0], full, sm.q0.index(half))
                tma_load(dout0_desc, [batch, head, at, 0], full, sm.dout0.index(half))
                tma_load(q1_desc, [batch, head, at, C], full, sm.q1.index(half))
                if VR:
                    tma_load(dout1_desc, [batch, head, at, C], full, sm.dout1.index(half))
            round += 1
        if problem.TWO_SIDED:
            for i in range(count):
                begin, end, masked = problem.stretch(first + i)
                for block in range(begin, end):
                    _load_both(
                        sm, problem, k0_desc, k1_desc, v0_desc, v1_desc, ends_desc, batch, kv_head, block, masked, step
                    )
                    step += 1
        else:
            for block in range(start, stop):
                _load_both(sm, problem, k0_desc, k1_desc, v0_desc, v1_desc, ends_desc, batch, kv_head, block, 0, step)
                step += 1


@gluon.jit
def _take_turn(sm, token, W: gl.constexpr):
    """Wait until the other consumer has passed the turn to consumer W."""
    if sm.TURNS:
        named_barrier(token, 8 + W, 256, False)


@gluon.jit
def _pass_turn(sm, token, W: gl.constexpr):
    """Let the other consumer issue its products."""
    if sm.TURNS:
        named_barrier(token, 9 - W, 256, True)


@gluon.jit
def _register_operand(sm, piece, W: gl.constexpr):
    """Load the first HELD columns of Q or dO as a register operand: then only the keys are read from shared memory."""
    if sm.HELD:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        part = piece.index(W).reshape([64, sm.SPLIT]).slice(0, sm.HELD, dim=1)
        held = part.load(gl.DotOperandLayout(0, layout, 2))
    else:
        held = 0
    return held


@gluon.jit
def _product(sm, held, piece0, piece1, slot, parity, R: gl.constexpr, W: gl.constexpr):
    """Issue S (of Q and K in `slot`) or dP (of dO and V) of consumer W's queries."""
    C: gl.constexpr = sm.SPLIT
    H: gl.constexpr = sm.HELD
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mbarrier.wait(sm.full.index(slot), parity)
    x = gl.zeros([64, 64], gl.float32, layout)
    # At head_dim 256 the addresses of Q and dO would take registers, from which each product's has to be moved (R2UR).
    rows = piece0.index(W if sm.EXP_UNDER_DP else opaque(W)).reshape([64, C])
    keys = sm.kv0.index(slot).reshape([64, C])
    if H:
        x = warpgroup_mma(held, keys.slice(0, H, dim=1).permute((1, 0)), x, use_acc=False, is_async=True)
        keys = keys.slice(H, C - H, dim=1)
        x = warpgroup_mma(rows.slice(H, C - H, dim=1), keys.permute((1, 0)), x, is_async=True)
    else:
        x = warpgroup_mma(rows, keys.permute((1, 0)), x, use_acc=False, is_async=True)
    if R:
        rest = piece1.index(W if sm.EXP_UNDER_DP else opaque(W))
        last = sm.kv1.index(slot).reshape([64, R]).permute((1, 0))
        x = warpgroup_mma(rest.reshape([64, R]), last, x, is_async=True)
    return x


@gluon.jit
def _probabilities(sm, problem, s, lse, first, stop, slot, row, block, masked):
    """Return P = exp(S - lse) of the 64 queries from `row` on and the K in `slot`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    if problem.TWO_SIDED:
        number = receive_number(sm.begin.index(slot))
        block = number >> 1
        masked = (number & 1) != 0
    if masked:  # a second, masked loop would make ptxas spill in the first
        keys = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
        s = gl.where(problem.within(keys, first, stop), s, float("-inf"))
        if problem.TWO_SIDED:
            rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
            ends = sm.ends.index(slot).reshape([64]).load(gl.SliceLayout(0, layout))
            s = gl.where(rows[:, None] < ends[None, :], s, float("-inf"))
    return gl.exp2(s * problem.scale_log2 - lse[:, None])


@gluon.jit
def _add_product(sm, ds, dq0, dq1, slot):
    """Compute dQ += dS K and release the buffer of K."""
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.REST
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    ds0 = gl.convert_layout(ds, gl.DotOperandLayout(0, layout0, 2))
    dq0 = warpgroup_mma(ds0, sm.kv0.index(slot).reshape([64, C]), dq0, is_async=True)
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    ds1 = gl.convert_layout(ds, gl.DotOperandLayout(0, layout1, 2))
    dq1 = warpgroup_mma(ds1, sm.kv1.index(slot).reshape([64, R]), dq1, is_async=True)
    dq0, dq1, ds0, ds1 = warpgroup_mma_wait(0, deps=(dq0, dq1, ds0, ds1))
    mbarrier.arrive(sm.empty.index(slot), count=1)
    return dq0, dq1


@gluon.jit
def _step(sm, problem, q, dout, dq0, dq1, lse, delta, first_seen, stop_seen, step, row, block, masked, W: gl.constexpr):
    """Add the dQ of one block of keys."""
    k_slot, k_parity, v_slot, v_parity = _slots(sm, step)
    _take_turn(sm, step, W)
    if sm.EXP_UNDER_DP:
        products_of_dp: gl.constexpr = (2 if sm.HELD else 1) + (1 if sm.VALUE_REST else 0)
        s = _product(sm, q, sm.q0, sm.q1, k_slot, k_parity, sm.REST, W)
        dp = _product(sm, dout, sm.dout0, sm.dout1, v_slot, v_parity, sm.VALUE_REST, W)
        s = warpgroup_mma_wait(products_of_dp, deps=(s,))
        _pass_turn(sm, step, W)
        p = _probabilities(sm, problem, s, lse, first_seen, stop_seen, k_slot, row + W * 64, block, masked)
        # This wait ends the basic block (K has arrived), or ptxas would move exp past the wait for dP.
        mbarrier.wait(sm.full.index(k_slot), k_parity)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(sm.empty.index(v_slot), count=1)
    else:
        dp = _product(sm, dout, sm.dout0, sm.dout1, v_slot, v_parity, sm.VALUE_REST, W)
        s = _product(sm, q, sm.q0, sm.q1, k_slot, k_parity, sm.REST, W)
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        mbarrier.arrive(sm.empty.index(v_slot), count=1)
        _pass_turn(sm, step, W)
        p = _probabilities(sm, problem, s, lse, first_seen, stop_seen, k_slot, row + W * 64, block, masked)
    ds = (p * (dp - delta[:, None])).to(sm.q0.dtype)
    return _add_product(sm, ds, dq0, dq1, k_slot)


@gluon.jit
def _write_chunk(sm, dq_desc, x, at, column, buffer: gl.constexpr, W: gl.constexpr):
    """Write half of a first piece of dQ, staged in this consumer's Q or dO; the previous chunk may be in flight."""
    N: gl.constexpr = sm.SPLIT // 2
    if buffer == 0:
        staged = start_of(sm.q0.index(W), dq_desc)
    else:
        staged = start_of(sm.dout0.index(W), dq_desc)
    tma_store_wait(1)
    if dq_desc.dtype == gl.float32:
        staged.reshape([64, N]).store(interleave(x, N))
    else:
        staged.reshape([64, N]).store(x.to(dq_desc.dtype))
    fence_async_shared()
    if dq_desc.dtype != gl.float32:
        tma_store(dq_desc, [at[0], at[1], at[2], column], staged)
    elif sm.ADD:
        tma_reduce_add(dq_desc, [at[0], at[1], column], staged)
    else:
        tma_store(dq_desc, [at[0], at[1], column], staged)


@gluon.jit
def _write_queries(sm, dq_desc, dq0, dq1, at, W: gl.constexpr):
    """Add dQ of consumer W's 64 queries to the accumulator, or store it there, or as the result."""
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.REST
    left, right = halves(dq0, C)
    _write_chunk(sm, dq_desc, left, at, 0, 0, W)
    _write_chunk(sm, dq_desc, right, at, C // 2, 1, W)
    if R == C:
        left, right = halves(dq1, R)
        _write_chunk(sm, dq_desc, left, at, C, 0, W)
        _write_chunk(sm, dq_desc, right, at, C + C // 2, 1, W)
    else:
        gl.static_assert(R == C // 2)
        _write_chunk(sm, dq_desc, dq1, at, C, 0, W)
    tma_store_wait(0)


@gluon.jit
def _hold(sm, problem, stats_ptr, stats_stride, dq_desc, W: gl.constexpr):
    """Consumer W: compute dQ of 64 queries of every tile."""
    C: gl.constexpr = sm.SPLIT
    R: gl.constexpr = sm.REST
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    step = 0
    round = 0
    if W == 1:
        _pass_turn(sm, step, W)
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        row, batch, head, kv_head = _tile_of(problem, index)
        start, stop, full_start, full_stop, _first, _count = problem.steps(index, row)
        if (not sm.ADD) | (start < stop):
            batch_head = batch * problem.num_heads + head
            rows = row + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            first_seen, stop_seen = problem.rows_seeing(rows)
            inside = rows < problem.num_keys
            stats = stats_ptr + batch_head.to(gl.int64) * 2 * stats_stride + problem.row_start
            lse = gl.load(stats + rows, mask=inside, other=float("inf"))
            delta = gl.load(stats + stats_stride + rows, mask=inside, other=0.0)
            dq0 = gl.zeros([64, C], gl.float32, layout0)
            layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
            dq1 = gl.zeros([64, R], gl.float32, layout1)
            mbarrier.wait(sm.q_full.index(0), round & 1)
            q = _register_operand(sm, sm.q0, W)
            dout = _register_operand(sm, sm.dout0, W)
            for block in range(start, stop):
                if problem.TWO_SIDED:  # the producer says which block it is
                    masked = False
                else:
                    masked = (block < full_start) | (block >= full_stop)
                dq0, dq1 = _step(
                    sm, problem, q, dout, dq0, dq1, lse, delta, first_seen, stop_seen, step, row, block, masked, W
                )
                step += 1
            row += problem.row_start + W * 64
            if dq_desc.dtype == gl.float32:
                _write_queries(sm, dq_desc, dq0, dq1, [batch_head, row], W)
            else:
                dq0 *= problem.softmax_scale
                dq1 *= problem.softmax_scale
                _write_queries(sm, dq_desc, dq0, dq1, [batch, head, row], W)
            mbarrier.arrive(sm.q_empty.index(0), count=1)
            round += 1
    if W == 0:
        _take_turn(sm, step, W)  # so that no barrier is left half full


@gluon.jit
def _hold_first(sm, problem, stats_ptr, stats_stride, dq_desc):
    _hold(sm, problem, stats_ptr, stats_stride, dq_desc, 0)


@gluon.jit
def _hold_second(sm, problem, stats_ptr, stats_stride, dq_desc):
    _hold(sm, problem, stats_ptr, stats_stride, dq_desc, 1)


@gluon.jit(do_not_specialize=QUERY_TILE_ARGUMENTS)
def backward_queries(
    q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, v1_desc, dout0_desc, dout1_desc, dq_desc, ends_desc,
    stats_ptr, first_ptr, stop_ptr, tiles_ptr, stretches_ptr, stats_stride, row_start, dq_rows, num_rows,
    num_keys, num_heads, num_kv_heads, num_tiles, heads_together, num_works, first_shift, stop_shift, scale_log2,
    softmax_scale,
    SPLIT: gl.constexpr, REST: gl.constexpr, VALUE_REST: gl.constexpr, SLOTS: gl.constexpr,
    EXP_UNDER_DP: gl.constexpr, TURNS: gl.constexpr, HELD: gl.constexpr, BOUNDS: gl.constexpr,
    TWO_SIDED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Only dQ; launch with 4 warps on any number of CTAs up to `num_works`. See the module and `BackwardProblem`.

    The columns of Q and K are two pieces, of SPLIT and REST columns; those of dO and V are SPLIT and VALUE_REST, which
    may be 0. TURNS: the consumers issue their products alternately. HELD: columns of the first piece of Q and dO that
    are kept in registers. ADD: add to the accumulator instead of storing. A dq_desc that is not fp32 is not that of the
    accumulator, but of the result.
    """
    dtype: gl.constexpr = q0_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    q0 = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, SPLIT], q0_desc.layout)
    dout0 = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, SPLIT], dout0_desc.layout)
    kv0 = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, 64, SPLIT], k0_desc.layout)
    q1 = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, REST], q1_desc.layout)
    if VALUE_REST:
        dout1 = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, VALUE_REST], dout1_desc.layout)
    else:
        dout1 = dout0
    kv1 = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, 64, REST], k1_desc.layout)
    if TWO_SIDED:
        begin = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], NUMBER)
        ends = gl.allocate_shared_memory(gl.int32, [SLOTS] + ends_desc.block_shape, ends_desc.layout)
    else:
        begin = full  # not read
        ends = full
        tiles_ptr = first_ptr
        stretches_ptr = first_ptr
    sm = QueryShared(
        q0, q1, dout0, dout1, kv0, kv1, q_full, q_empty, full, empty, begin, ends, SPLIT, REST, VALUE_REST, SLOTS,
        EXP_UNDER_DP, TURNS, HELD, ADD,
    )  # fmt: skip
    problem = BackwardProblem(
        gl.to_tensor(0), num_rows, num_keys, row_start, dq_rows, num_heads, num_kv_heads, num_tiles, heads_together,
        heads_together, num_works, gl.to_tensor(1),
        first_shift, num_rows, num_rows, stop_shift,  # one band: no second one, which would begin at `split`
        gl.to_tensor(0), first_ptr,  # no clock
        first_ptr, stop_ptr, tiles_ptr, stretches_ptr, scale_log2, softmax_scale, BOUNDS, TWO_SIDED, False,
        64, 2 * 64, False,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_hold_first, (sm, problem, stats_ptr, stats_stride, dq_desc)),
            (_hold_second, (sm, problem, stats_ptr, stats_stride, dq_desc)),
            (
                _load_keys,
                (sm, problem, q0_desc, q1_desc, dout0_desc, dout1_desc, k0_desc, k1_desc, v0_desc, v1_desc, ends_desc),
            ),
        ],
        [4, 1],
        [240, 24],
    )
