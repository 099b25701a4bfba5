"""Device code that the backward kernels share: the description of a hop, its key tiles and query blocks.

A hop is one rectangle of query rows and keys, addressed by descriptors that begin at its corner. Each key
is seen by one interval of query rows: computed from two shifts (a diagonal band) or loaded (packed
documents). The ends of the intervals never decrease from key to key, so those of a tile's first and last key
bound the query blocks to visit and the blocks that need no mask.

Under a two-sided mask, the blocks to visit are listed in stretches (`hopper.walks`). If such a mask also has a window
(BEGINS), each row has a first key: of the keys whose interval holds the row, it sees only those from this one on.
"""

from ringflash_kernels.hopper.backward.tiles import SMS
from ringflash_kernels.hopper.compat import aggregate, gl, gluon, mbarrier

_SMS = gl.constexpr(SMS)
_TICK = gl.constexpr(16)

# Arguments whose values do not make triton compile another kernel: of kernels whose CTAs hold keys, and queries.
KEY_TILE_ARGUMENTS = (
    "first_ptr", "stop_ptr", "tiles_ptr", "stretches_ptr", "min_row", "num_rows", "num_keys", "row_start", "dq_rows",
    "num_heads", "num_kv_heads", "num_tiles", "heads_together", "num_works", "group", "first_shift", "split",
    "second_shift", "stop_shift", "period", "clock_ptr",
)  # fmt: skip
QUERY_TILE_ARGUMENTS = (
    "stats_ptr", "first_ptr", "stop_ptr", "tiles_ptr", "stretches_ptr", "stats_stride", "row_start", "dq_rows",
    "num_rows", "num_keys", "num_heads", "num_kv_heads", "num_tiles", "heads_together", "num_works", "first_shift",
    "stop_shift",
)  # fmt: skip


@gluon.jit
def slot_of(step, STAGES: gl.constexpr):
    """Return the buffer of a pipeline step and the parity of its barriers in that step."""
    if STAGES == 1:
        return 0, step & 1
    if STAGES == 2:
        return step & 1, (step >> 1) & 1
    if STAGES == 4:
        return step & 3, (step >> 2) & 1
    return step % STAGES, (step // STAGES) & 1


NUMBER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # of one int32 in shared memory


@gluon.jit
def send_number(slot, number):
    """Store a number, by one warp; visible after waiting for a barrier at which this warp arrives afterwards."""
    slot.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def receive_number(slot):
    """Load a number that `send_number` stored, by four warps."""
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def interleave(x, N: gl.constexpr, J: gl.constexpr = 4):
    """Permute columns (j, t, e) of each 8 J to (t, j, e), sizes J, 4, 2: a thread's 2 J values become neighbours.

    No data moves between threads, and the stores to shared memory are 16 bytes wide without bank conflicts, with 4 for
    fp32 and 8 for 16 bits. The dQ accumulator keeps this order; the postprocess kernel undoes it.
    """
    R: gl.constexpr = J if J * 8 <= N else N // 8
    return x.reshape([64, N // (8 * R), R, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, N])


@gluon.jit
def halves(x, D: gl.constexpr):
    """Return the left and the right half of the columns; no data moves between threads."""
    return x.reshape([64, 2, D // 2]).permute([0, 2, 1]).split()


@aggregate
class BackwardProblem:
    """Sizes, mask and scales of one hop.

    Args:
        num_rows, num_keys: extent of the hop's rectangle; rows before min_row see nothing.
        row_start: first query row of the rectangle in the statistics and in the dQ accumulator, a multiple of 4
            (16 bytes); dq_rows: rows of one head there.
        num_tiles: key tiles of one head; group: query heads that one tile processes, with one dK and dV.
        heads_together: heads (with group > 1, groups of heads) whose tiles alternate in launch order; if
            MORE_AT_LAST the last heads_at_last, a multiple, do together.
        first_shift, stop_shift: key j is seen by the rows [j + first_shift, j + stop_shift) of the rectangle ...
        split, second_shift: ... and, of the rows from `split` on, by those from j + second_shift on.
        first_ptr, stop_ptr: (num_keys,), int32; used instead of the shifts if BOUNDS.
        tiles_ptr, stretches_ptr: see `Walks`; used if TWO_SIDED. BEGINS: each row has a first key besides.
        period, clock_ptr: see `meeting_block` and `meeting_stretch`; the clock is one int32 with any initial value, and
            shows blocks below `period`. If that is 0, CTAs may be at different blocks.
    """

    min_row: gl.tensor
    num_rows: gl.tensor
    num_keys: gl.tensor
    row_start: gl.tensor
    dq_rows: gl.tensor
    num_heads: gl.tensor
    num_kv_heads: gl.tensor
    num_tiles: gl.tensor
    heads_together: gl.tensor
    heads_at_last: gl.tensor
    num_works: gl.tensor
    group: gl.tensor
    first_shift: gl.tensor
    split: gl.tensor
    second_shift: gl.tensor
    stop_shift: gl.tensor
    period: gl.tensor
    clock_ptr: gl.tensor
    first_ptr: gl.tensor
    stop_ptr: gl.tensor
    tiles_ptr: gl.tensor
    stretches_ptr: gl.tensor
    scale_log2: gl.tensor
    softmax_scale: gl.tensor
    BOUNDS: gl.constexpr
    TWO_SIDED: gl.constexpr
    BEGINS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    MORE_AT_LAST: gl.constexpr

    @gluon.jit
    def work(self, index):
        """Return first key, batch, first query head and KV head of a work item.

        Order: section of heads, key tile (the longest first under a causal mask), head within the section.
        """
        first_head = 0
        together = self.heads_together
        if self.MORE_AT_LAST:
            before = self.num_works - self.num_tiles * self.heads_at_last
            is_last = index >= before
            first_head = gl.where(is_last, before // self.num_tiles, 0)
            together = gl.where(is_last, self.heads_at_last, together)
            index -= gl.where(is_last, before, 0)
        section = index // (self.num_tiles * together)
        rest = index - section * self.num_tiles * together
        tile = rest // together
        head = first_head + section * together + rest - tile * together
        if self.TWO_SIDED:
            tile = gl.load(self.tiles_ptr + tile * 4)
        key = tile * self.BLOCK_N
        heads = self.num_heads // self.group
        first_head = (head % heads) * self.group
        return key, head // heads, first_head, first_head // (self.num_heads // self.num_kv_heads)

    @gluon.jit
    def walk(self, index):
        """Return first stretch, number of stretches and number of blocks of a work item under a two-sided mask."""
        entry = self.tiles_ptr + self.rank(index) * 4
        return gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)

    @gluon.jit
    def steps(self, index, tile):
        """Return the steps of a work item for one head, and the stretches that they walk under a two-sided mask.

        Returns:
            start, stop, full_start, full_stop: as of `blocks`; under a two-sided mask the steps are counted from 0, and
                the stretches say which are full.
            first, count: first stretch and number of stretches; 0 without a two-sided mask.
        """
        if self.TWO_SIDED:
            first, count, stop = self.walk(index)
            start, full_start, full_stop = 0, 0, 0
        else:
            start, stop, full_start, full_stop = self.blocks(tile)
            first, count = 0, 0
        return start, stop, full_start, full_stop, first, count

    @gluon.jit
    def rank(self, index):
        """Return the place of the tile of a work item in the order of the launch."""
        return index % (self.num_tiles * self.heads_together) // self.heads_together

    @gluon.jit
    def sum_of(self, index):
        """Return 1 + the place in the sums of a work item that is a part of a tile's walk, or 0."""
        entry = self.tiles_ptr + self.rank(index) * 4
        first = gl.load(entry + 1)
        count = gl.load(entry + 2)
        return gl.load(self.stretches_ptr + first * 4 + 3, mask=count > 0, other=0)

    @gluon.jit
    def previous(self, number):
        """Return the rank of the last tile before that visits the blocks of a stretch, or -1; see `walks`."""
        return gl.load(self.stretches_ptr + number * 4 + 3)

    @gluon.jit
    def stretch(self, number):
        """Return the first block of a stretch, its end, and whether it is masked."""
        entry = self.stretches_ptr + number * 4
        return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)

    @gluon.jit
    def next_step(self, number, block, end, masked, first, count):
        """Return stretch, block, end and kind of the step after `block` in a round over a walk."""
        block += 1
        if block == end:
            number = gl.where(number + 1 == first + count, first, number + 1)
            block, end, masked = self.stretch(number)
        return number, block, end, masked

    @gluon.jit
    def meeting_stretch(self, number, block, first, count):
        """Return the stretch and the block at which to start a round: see `meeting_block`."""
        if self.period != 0:
            now = self.mean_block()
            for i in range(count):
                begin, end, _masked = self.stretch(first + i)
                hit = (begin <= now) & (now < end)
                number = gl.where(hit, first + i, number)
                block = gl.where(hit, now, block)
        return number, block

    @gluon.jit
    def dq_row(self, batch, head):
        """Return the row of the dQ accumulator at which the rectangle begins; rows past its end get zeros added."""
        return (batch * self.num_heads + head) * self.dq_rows + self.row_start

    @gluon.jit
    def rows_seeing(self, key):
        """Return the query rows [first, stop) that see `key`, a number or a tensor; none for a key past the end."""
        inside = key < self.num_keys
        if self.BOUNDS:
            first = gl.load(self.first_ptr + key, mask=inside, other=0)
            stop = gl.load(self.stop_ptr + key, mask=inside, other=0)
        else:
            first = gl.minimum(gl.maximum(key + self.first_shift, self.min_row), self.split)
            first += gl.minimum(gl.maximum(key + self.second_shift, self.split), self.num_rows) - self.split
            stop = gl.where(inside, gl.minimum(gl.maximum(key + self.stop_shift, 0), self.num_rows), 0)
        return first, stop

    @gluon.jit
    def visible(self, keys, rows):
        """Return which pairs of `keys` (a column of indices) and `rows` (a row of indices) are visible."""
        first, stop = self.rows_seeing(keys)
        return self.within(rows, first, stop)

    @gluon.jit
    def within(self, rows, first, stop):
        """Return which of `rows` (a row of indices) are in which interval [first, stop) (a column each)."""
        # One unsigned comparison for both ends: a negative difference is large.
        passed = (rows[None, :] - first[:, None]).to(gl.uint32, bitcast=True)
        return passed < gl.maximum(stop - first, 0).to(gl.uint32, bitcast=True)[:, None]

    @gluon.jit
    def within_block(self, row, columns, first, stop):
        """Return which of the 64 rows from `row` on, numbered by `columns`, are in which interval [first, stop).

        In an accumulator a thread's columns are one of 0, 2, 4, 6 plus constants. Added last, the constants need no
        registers, which ptxas would else compute again for each column (triton 3.8).
        """
        own = (row + (columns & 6))[None, :] - first[:, None]
        passed = (own + (columns & 57)[None, :]).to(gl.uint32, bitcast=True)
        return passed < gl.maximum(stop - first, 0).to(gl.uint32, bitcast=True)[:, None]

    @gluon.jit
    def blocks(self, key):
        """Return the query blocks [start, stop) that see the tile at `key`; [full_start, full_stop) see all of it."""
        last = gl.minimum(key + self.BLOCK_N, self.num_keys) - 1
        first_row, full_stop_row = self.rows_seeing(key)
        full_start_row, stop_row = self.rows_seeing(last)
        full_stop_row = gl.where(key + self.BLOCK_N <= self.num_keys, full_stop_row, 0)
        start = first_row // self.BLOCK_M
        stop = gl.where(first_row < stop_row, gl.cdiv(stop_row, self.BLOCK_M), start)
        return start, stop, gl.cdiv(full_start_row, self.BLOCK_M), full_stop_row // self.BLOCK_M

    @gluon.jit
    def tick(self, step):
        """Advance the clock, a counter in device memory of the steps of all CTAs' producers."""
        if (self.period != 0) & (step % _TICK == 0):
            gl.atomic_add(self.clock_ptr, _TICK)

    @gluon.jit
    def meeting_block(self, block, start, stop):
        """Return the block at which to start a round over the query blocks [start, stop) of a head.

        Any order of the blocks is correct. But if concurrent CTAs are at the same block, its Q, dO and dQ are fetched
        into L2 once for all of them, and not once for each. So all start at `mean_block`, or at `block` if the tile
        does not visit that one.
        """
        if self.period != 0:
            now = self.mean_block()
            block = gl.where((start <= now) & (now < stop), now, block)
        return block

    @gluon.jit
    def mean_block(self):
        """Return the block at which CTAs are on average: the clock, divided by their number, modulo `period`."""
        # A load, since the broadcast of an atomic's result to the warp made ptxas spill in the other warps.
        steps = gl.load(self.clock_ptr, volatile=True).to(gl.uint32, bitcast=True)
        running = gl.minimum(gl.num_programs(0), _SMS).to(gl.uint32)
        return (steps // running % self.period.to(gl.uint32)).to(gl.int32)

    @gluon.jit
    def next_block(self, block, start, stop):
        """Return the block after `block` in that round."""
        return gl.where(block + 1 == stop, start, block + 1)

    @gluon.jit
    def descend(self, g, block):
        """Return the next head of the group and its block, if the blocks go from the last to the first."""
        last = g + 1 == self.group
        return gl.where(last, 0, g + 1), gl.where(last, block - 1, block)


@gluon.jit
def load_in_rounds(sm, problem, load: gl.constexpr, descs, batch, first_head, start, stop, first, count, step):
    """Producer: load what a tile of keys needs of each head of a group, block by block from where other CTAs are.

    Args:
        load: function that loads the rows of a block: (sm, problem, descs, batch, head, block, step).
        start, stop: blocks of the walk; of a two-sided one 0 and their number.
        first, count: stretches of a two-sided walk.
    Returns:
        step: number of the step after the walk.
    """
    if problem.TWO_SIDED:
        number = first
        block, end, masked = problem.stretch(number)
        for g in range(problem.group):
            number, block = problem.meeting_stretch(number, block, first, count)
            _begin, end, masked = problem.stretch(number)
            for _ in range(stop):
                slot, parity = slot_of(step, sm.STAGES)
                mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
                send_number(sm.begin.index(slot), block * 2 + masked)
                load(sm, problem, descs, batch, first_head + g, block, step)
                number, block, end, masked = problem.next_step(number, block, end, masked, first, count)
                step += 1
                problem.tick(step)
    else:
        block = start
        for g in range(problem.group):
            if start < stop:
                block = problem.meeting_block(block, start, stop)
                slot, parity = slot_of(step, sm.STAGES)
                mbarrier.wait(sm.q_empty.index(slot), parity ^ 1)
                send_number(sm.begin.index(slot), block)
            for _ in range(start, stop):
                load(sm, problem, descs, batch, first_head + g, block, step)
                block = problem.next_block(block, start, stop)
                step += 1
                problem.tick(step)
    return step
