"""The way of dQ of a block of queries out of a CTA of `backward_keys`: each consumer stages half of its columns.

The consumers add what they have staged, in any order between CTAs. If ORDERED, three additional warps add it in the
order of `order.py`. Each takes every third block, because waiting for the previous tile's dQ, adding and announcing
take longer than a step. Two or three buffers of dQ let the consumers continue meanwhile. There are two, too, if a CTA
takes several tiles (PERSISTENT): at the end of a tile, dK and dV leave from them.

`sm` is `backward.keys.KeyShared`; a block's step is that of its S and P.
"""

from ringflash_kernels.hopper.backward.problem import slot_of
from ringflash_kernels.hopper.compat import (
    gl,
    gluon,
    mbarrier,
    tma_reduce_add,
    tma_store_complete,
    tma_store_wait,
)

WRITERS = gl.constexpr(3)  # number of these warps: the other three of the producer's warpgroup


@gluon.jit
def wait_for_buffer(sm, step, W: gl.constexpr):
    """Wait until the writers have read the buffer for dQ of `step`, if there are any."""
    if sm.ORDERED:
        buffer, parity = slot_of(step, sm.DQ_BUFFERS)
        mbarrier.wait(sm.dq_empty.index(buffer * 2 + W), parity ^ 1)


@gluon.jit
def dq_buffer(sm, step, W: gl.constexpr):
    """Return the buffer in which consumer W stages its columns of dQ of `step`; see `wait_for_buffer`."""
    if sm.ORDERED:
        buffer, _parity = slot_of(step, sm.DQ_BUFFERS)
        staged = numbered_staging(sm, buffer, W)
    else:
        staged = numbered_staging(sm, step & 1, W) if sm.PERSISTENT else dq_staging(sm, W)
        tma_store_wait(1 if sm.PERSISTENT else 0)
    return staged


@gluon.jit
def send_dq(sm, dq_desc, dq_row, staged, step, W: gl.constexpr):
    """Add what consumer W has staged to dQ at `dq_row`, or let a writer do it."""
    if sm.ORDERED:
        mbarrier.arrive(sm.dq_full.index(step % WRITERS * 2 + W), count=1)
    else:
        tma_reduce_add(dq_desc, [dq_row, (sm.SPLIT // 2 if sm.REST == 0 else sm.SPLIT) * W], staged)


@gluon.jit
def wait_until_read(sm, step, W: gl.constexpr):
    """Wait until all that consumer W has staged before `step` has been read: dK leaves from the same buffers."""
    if sm.ORDERED:
        for ahead in gl.static_range(sm.DQ_BUFFERS):
            wait_for_buffer(sm, step + ahead, W)
    else:
        tma_store_wait(0)


@gluon.jit
def dq_staging(sm, W: gl.constexpr):
    """Return the buffer in which consumer W stages its columns of dQ."""
    if W == 0:
        staged = sm.dq0
    else:
        staged = sm.dq1
    return staged


@gluon.jit
def numbered_staging(sm, buffer, W: gl.constexpr):
    """Return one of several buffers in which consumer W stages its columns of dQ."""
    if W == 0:
        staged = sm.dq0_buffers.index(buffer)
    else:
        staged = sm.dq1_buffers.index(buffer)
    return staged


@gluon.jit
def _add_block(sm, problem, order, dq0_desc, dq1_desc, step, batch, head, block, tile, previous, WRITER: gl.constexpr):
    """Writer: add dQ of one block, after `previous`, if there is one, has added its own."""
    column: gl.constexpr = sm.SPLIT if sm.REST else sm.SPLIT // 2
    if step % WRITERS == WRITER:
        number = batch * problem.num_heads + head
        if previous >= 0:
            order.wait_for_tile(previous, number, block)
        row = problem.dq_row(batch, head) + block * 64
        buffer, _parity = slot_of(step, sm.DQ_BUFFERS)
        parity = step // WRITERS & 1
        mbarrier.wait(sm.dq_full.index(WRITER * 2), parity)
        tma_reduce_add(dq0_desc, [row, 0], numbered_staging(sm, buffer, 0))
        mbarrier.wait(sm.dq_full.index(WRITER * 2 + 1), parity)
        tma_reduce_add(dq1_desc, [row, column], numbered_staging(sm, buffer, 1))
        tma_store_wait(1)
        mbarrier.arrive(sm.dq_empty.index(buffer * 2), count=1)
        tma_store_wait(0)
        mbarrier.arrive(sm.dq_empty.index(buffer * 2 + 1), count=1)
        tma_store_complete(step)
        order.publish_tile(tile, number, block)


@gluon.jit
def _add_in_order(sm, problem, order, dq0_desc, dq1_desc, WRITER: gl.constexpr):
    """Writer: add dQ of every third block, each after the previous tile that sees the block has added its own."""
    step = 0
    for index in range(gl.program_id(0), problem.num_works, gl.num_programs(0)):
        key, batch, first_head, _kv_head = problem.work(index)
        if problem.TWO_SIDED:
            first, count, stop = problem.walk(index)
            start = 0
            tile = problem.rank(index)
        else:
            start, stop, _full_start, _full_stop = problem.blocks(key)
            tile = key // problem.BLOCK_N
        if start < stop:
            if not problem.TWO_SIDED:
                previous, previous_start, previous_stop = order.previous(problem, tile)
            if step % WRITERS == WRITER:  # dQ of the block of zeros is not added
                buffer, _parity = slot_of(step, sm.DQ_BUFFERS)
                for W in gl.static_range(2):
                    mbarrier.wait(sm.dq_full.index(WRITER * 2 + W), step // WRITERS & 1)
                    mbarrier.arrive(sm.dq_empty.index(buffer * 2 + W), count=1)
            step += 1
            if problem.TWO_SIDED:
                for i in range(count):
                    number = first + count - 1 - i
                    begin, end, _masked = problem.stretch(number)
                    before = problem.previous(number)
                    for j in range(end - begin):
                        for g in range(problem.group):
                            _add_block(sm, problem, order, dq0_desc, dq1_desc, step, batch, first_head + g, end - 1 - j,
                                       tile, before, WRITER)  # fmt: skip
                            step += 1
            else:
                g = 0
                block = stop - 1
                for _ in range((stop - start) * problem.group):
                    before = gl.where((previous_start <= block) & (block < previous_stop), previous, -1)
                    _add_block(sm, problem, order, dq0_desc, dq1_desc, step, batch, first_head + g, block, tile, before,
                               WRITER)  # fmt: skip
                    step += 1
                    g, block = problem.descend(g, block)


@gluon.jit
def add_first(sm, problem, order, dq0_desc, dq1_desc):
    _add_in_order(sm, problem, order, dq0_desc, dq1_desc, 0)


@gluon.jit
def add_second(sm, problem, order, dq0_desc, dq1_desc):
    _add_in_order(sm, problem, order, dq0_desc, dq1_desc, 1)


@gluon.jit
def add_third(sm, problem, order, dq0_desc, dq1_desc):
    _add_in_order(sm, problem, order, dq0_desc, dq1_desc, 2)
