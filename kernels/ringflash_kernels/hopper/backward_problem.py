"""What every backward kernel is told about a hop, and the arithmetic on key tiles and query blocks.

A hop is one rectangle of query rows and keys, seen through descriptors that begin at its corner. Each key
is seen by one interval of query rows: computed from two shifts (a diagonal band) or loaded (packed
documents). The intervals' ends never decrease from key to key, so those of a tile's first and last key
bound the query blocks to visit and the blocks that need no mask.
"""

from ringflash_kernels.hopper.compat import aggregate, gl, gluon


@gluon.jit
def slot_of(step, STAGES: gl.constexpr):
    """Buffer of a pipeline step, and the parity its barriers have then."""
    if STAGES == 1:
        return 0, step & 1
    if STAGES == 2:
        return step & 1, (step >> 1) & 1
    if STAGES == 4:
        return step & 3, (step >> 2) & 1
    return step % STAGES, (step // STAGES) & 1


@aggregate
class Problem:
    """Sizes, mask and scales of one hop.

    Args:
        num_rows, num_keys: extent of the hop's rectangle; its rows before min_row see nothing.
        row_start: first query row of the rectangle in the statistics and in the dQ accumulator, a multiple of 4
            (16 bytes); dq_rows: rows of one head there.
        num_tiles: key tiles of one head; group: query heads that one tile walks, sharing one dK and dV.
        heads_together: heads (with group > 1: groups of them) whose tiles take turns in the order of the launch.
        first_shift, stop_shift: key j is seen by the rows [j + first_shift, j + stop_shift) of the rectangle ...
        split, second_shift: ... and, of the rows from `split` on, by those from j + second_shift on.
        first_ptr, stop_ptr: instead of the shifts when BOUNDS: (num_keys,), int32.
        begin_ptr: query block at which a tile begins its round over those of a head, (num_works, group), int32; read
            only if has_begins, else the first that it sees.
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
    num_works: gl.tensor
    group: gl.tensor
    first_shift: gl.tensor
    split: gl.tensor
    second_shift: gl.tensor
    stop_shift: gl.tensor
    has_begins: gl.tensor
    begin_ptr: gl.tensor
    first_ptr: gl.tensor
    stop_ptr: gl.tensor
    scale_log2: gl.tensor
    softmax_scale: gl.tensor
    BOUNDS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        min_row,
        num_rows,
        num_keys,
        row_start,
        dq_rows,
        num_heads,
        num_kv_heads,
        num_tiles,
        heads_together,
        num_works,
        group,
        first_shift,
        split,
        second_shift,
        stop_shift,
        has_begins,
        begin_ptr,
        first_ptr,
        stop_ptr,
        scale_log2,
        softmax_scale,
        BOUNDS,
        BLOCK_M,
        BLOCK_N,
    ):
        self.min_row = min_row
        self.num_rows = num_rows
        self.num_keys = num_keys
        self.row_start = row_start
        self.dq_rows = dq_rows
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_tiles = num_tiles
        self.heads_together = heads_together
        self.num_works = num_works
        self.group = group
        self.first_shift = first_shift
        self.split = split
        self.second_shift = second_shift
        self.stop_shift = stop_shift
        self.has_begins = has_begins
        self.begin_ptr = begin_ptr
        self.first_ptr = first_ptr
        self.stop_ptr = stop_ptr
        self.scale_log2 = scale_log2
        self.softmax_scale = softmax_scale
        self.BOUNDS = gl.constexpr(BOUNDS)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)

    @gluon.jit
    def work(self, index):
        """First key, batch, first query head and KV head of a work item.

        Order: section of heads, key tile (the longest first under a causal mask), head within the section.
        """
        section = index // (self.num_tiles * self.heads_together)
        rest = index - section * self.num_tiles * self.heads_together
        tile = rest // self.heads_together
        head = section * self.heads_together + rest - tile * self.heads_together
        key = tile * self.BLOCK_N
        heads = self.num_heads // self.group
        first_head = (head % heads) * self.group
        return key, head // heads, first_head, first_head // (self.num_heads // self.num_kv_heads)

    @gluon.jit
    def dq_row(self, batch, head):
        """Row of the dQ accumulator where the rectangle begins; rows past its end get zeros added."""
        return (batch * self.num_heads + head) * self.dq_rows + self.row_start

    @gluon.jit
    def rows_seeing(self, key):
        """The query rows [first, stop) that see `key`, a number or a tensor; none for a key past the end."""
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
        """Which of `rows` (a row of numbers) see which of `keys` (a column)."""
        first, stop = self.rows_seeing(keys)
        return self.within(rows, first, stop)

    @gluon.jit
    def within(self, rows, first, stop):
        """Which of `rows` (a row of numbers) lie in [first, stop) (a column each)."""
        # One unsigned comparison for both ends: a negative difference is large.
        passed = (rows[None, :] - first[:, None]).to(gl.uint32, bitcast=True)
        return passed < gl.maximum(stop - first, 0).to(gl.uint32, bitcast=True)[:, None]

    @gluon.jit
    def blocks(self, key):
        """Query blocks [start, stop) that the tile at `key` visits; [full_start, full_stop) see all its keys."""
        last = gl.minimum(key + self.BLOCK_N, self.num_keys) - 1
        first_row, full_stop_row = self.rows_seeing(key)
        full_start_row, stop_row = self.rows_seeing(last)
        full_stop_row = gl.where(key + self.BLOCK_N <= self.num_keys, full_stop_row, 0)
        start = first_row // self.BLOCK_M
        stop = gl.where(first_row < stop_row, gl.cdiv(stop_row, self.BLOCK_M), start)
        return start, stop, gl.cdiv(full_start_row, self.BLOCK_M), full_stop_row // self.BLOCK_M

    @gluon.jit
    def first_block(self, index, head, start):
        """Where a tile begins its round over the query blocks of a head of its group."""
        return gl.load(self.begin_ptr + index * self.group + head, mask=self.has_begins != 0, other=start)

    @gluon.jit
    def next_block(self, block, start, stop):
        """The block after `block` on that round."""
        return gl.where(block + 1 == stop, start, block + 1)
