"""Passes over query rows, before and after the tiles of their heads, by three spare warps of `backward_keys`.

The heads run in sections. While the tiles of one section run, these warps prepare later sections (row statistics, zeros
for dQ), and scale and cast the dQ of earlier ones. Separate kernels (`preprocess.py`) prepare the first section and
cast the last one.

A job is 64 rows of a head. The jobs prepare section 1, and then for m = 0, 1, ... prepare m + 2 and cast m. They are
taken from a counter, as the tiles are, and each waits only for tiles and jobs that were taken earlier. So it is correct
for any number of CTAs to run at a time.
"""

from ringflash_kernels.hopper.compat import aggregate, count_up, draw, gl, gluon, wait_for

HELPERS = gl.constexpr(3)  # number of these warps: the other three of the producer's warpgroup
REPORTS = gl.constexpr(8)  # number of warps of the consumers, each of which reports the end of a tile


@aggregate
class RowPasses:
    """Operands of the passes, and counters.

    Args:
        out_ptr, dout_ptr, dq_ptr: addressed by strides (batch, row, head) in 8 elements, 16 bytes.
        lse_ptr: with its strides (batch, head, row).
        stats_ptr: (heads, 2, padded); acc_ptr: (heads, seqlen, head_dim), dQ in fp32.
        counters_ptr: zeros, which are zeros again afterwards: jobs drawn, then for each section the jobs that have
            prepared it, and reports of its tiles.
    """

    out_ptr: gl.tensor
    dout_ptr: gl.tensor
    lse_ptr: gl.tensor
    stats_ptr: gl.tensor
    acc_ptr: gl.tensor
    dq_ptr: gl.tensor
    counters_ptr: gl.tensor
    out_batch: gl.tensor
    out_row: gl.tensor
    out_head: gl.tensor
    dout_batch: gl.tensor
    dout_row: gl.tensor
    dout_head: gl.tensor
    lse_batch: gl.tensor
    lse_head: gl.tensor
    lse_row: gl.tensor
    dq_batch: gl.tensor
    dq_row: gl.tensor
    dq_head: gl.tensor
    seqlen: gl.tensor

    @gluon.jit
    def jobs(self, problem):
        """Return the jobs that prepare a section."""
        return gl.cdiv(self.seqlen, 64) * problem.heads_together * problem.group

    @gluon.jit
    def sections(self, problem):
        """Return the number of sections."""
        return problem.num_works // (problem.num_tiles * problem.heads_together)

    @gluon.jit
    def section_of(self, problem, index):
        """Return the section of a tile."""
        return index // (problem.num_tiles * problem.heads_together)

    @gluon.jit
    def wait_for_section(self, problem, section):
        """Wait until a section is prepared."""
        wait_for(self.counters_ptr + 1 + section * 2, self.jobs(problem))

    @gluon.jit
    def report(self, problem, index):
        """Count a tile whose dQ is complete, by each warp of the consumers; nobody waits for the last section."""
        section = self.section_of(problem, index)
        if section + 1 < self.sections(problem):
            count_up(self.counters_ptr + 2 + section * 2)

    @gluon.jit
    def clear(self, problem):
        """Set the counters to zero."""
        for i in range(1 + 2 * self.sections(problem)):
            gl.store(self.counters_ptr + i, 0)


@gluon.jit
def _start(pointer, of_batch, of_row, of_head, passes, problem, head, row):
    """Return where a row of a head begins; strides are multiples of 8 elements, and given in these."""
    batch = (head // problem.num_heads).to(gl.int64)
    eighths = batch * of_batch + (head % problem.num_heads).to(gl.int64) * of_head + row.to(gl.int64) * of_row
    return gl.multiple_of(pointer + eighths * 8, 16)


@gluon.jit
def _prepare(passes, problem, head, row, D: gl.constexpr):
    """Write (lse * log2(e), delta) and zeros of dQ for 64 rows of a head, as `preprocess` does."""
    ROWS: gl.constexpr = 256 // D  # at a time: 8 columns a lane
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [ROWS, D // 8], [1, 1], [1, 0])
    out = _start(passes.out_ptr, passes.out_batch, passes.out_row, passes.out_head, passes, problem, head, row)
    dout = _start(passes.dout_ptr, passes.dout_batch, passes.dout_row, passes.dout_head, passes, problem, head, row)
    lse = passes.lse_ptr + (head // problem.num_heads).to(gl.int64) * passes.lse_batch
    lse += (head % problem.num_heads).to(gl.int64) * passes.lse_head + row.to(gl.int64) * passes.lse_row
    padded = gl.cdiv(passes.seqlen, 64) * 64
    stats = passes.stats_ptr + head.to(gl.int64) * 2 * padded + row
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    left = passes.seqlen - row  # rows of the head
    for i in range(0, 64, ROWS):
        inside = i + rows < left
        o = gl.load(out + ((i + rows) * passes.out_row * 8)[:, None] + columns, mask=inside[:, None], other=0.0)
        d = gl.load(dout + ((i + rows) * passes.dout_row * 8)[:, None] + columns, mask=inside[:, None], other=0.0)
        logarithm = gl.load(lse + (i + rows) * passes.lse_row, mask=inside, other=float("-inf"))
        delta = gl.sum(o.to(gl.float32) * d.to(gl.float32), 1)
        empty = logarithm == float("-inf")
        gl.store(stats + i + rows, gl.where(empty, float("inf"), logarithm * 1.4426950408889634))
        gl.store(stats + padded + i + rows, gl.where(empty, 0.0, delta))
    acc = gl.multiple_of(passes.acc_ptr + (head.to(gl.int64) * passes.seqlen + row) * D, 16)
    zeros = gl.zeros([ROWS, D], gl.float32, layout)
    for i in range(0, 64, ROWS):
        gl.store(acc + ((i + rows) * D)[:, None] + columns, zeros, mask=(i + rows < left)[:, None])


@gluon.jit
def _cast(passes, problem, head, row, D: gl.constexpr):
    """Scale and cast dQ of 64 rows of a head, its columns back in order, as `postprocess` does."""
    ROWS: gl.constexpr = 256 // D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [ROWS, D // 8], [1, 1], [1, 0])
    acc = gl.multiple_of(passes.acc_ptr + (head.to(gl.int64) * passes.seqlen + row) * D, 16)
    dq = _start(passes.dq_ptr, passes.dq_batch, passes.dq_row, passes.dq_head, passes, problem, head, row)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    left = passes.seqlen - row
    for i in range(0, 64, ROWS):
        # Other thread blocks have added to it: not from L1.
        x = gl.load(
            acc + ((i + rows) * D)[:, None] + columns, mask=(i + rows < left)[:, None], other=0.0, cache_modifier=".cg"
        )
        x = (x * problem.softmax_scale).reshape([ROWS, D // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, D])
        x = x.to(passes.dq_ptr.dtype.element_ty)
        own = i + gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout))
        at = (own * passes.dq_row * 8)[:, None] + gl.arange(0, D, layout=gl.SliceLayout(0, x.type.layout))[None, :]
        gl.store(dq + at, x, mask=(own < left)[:, None])


@gluon.jit
def run_passes(passes, problem, drawn_ptr, D: gl.constexpr):
    """Do jobs until none is left."""
    jobs = passes.jobs(problem)
    sections = passes.sections(problem)
    job = draw(passes.counters_ptr)
    while job < jobs * (2 * sections - 1):
        phase = job // jobs
        heads = problem.heads_together * problem.group
        block = (job - phase * jobs) // heads
        head = job - phase * jobs - block * heads
        if (phase > 0) & (phase % 2 == 0):
            section = phase // 2 - 1
            wait_for(passes.counters_ptr + 2 + section * 2, problem.num_tiles * problem.heads_together * REPORTS)
            _cast(passes, problem, section * heads + head, block * 64, D)
        else:
            section = gl.where(phase == 0, 1, (phase + 3) // 2)
            if section < sections:
                _prepare(passes, problem, section * heads + head, block * 64, D)
                count_up(passes.counters_ptr + 1 + section * 2)
        job = draw(passes.counters_ptr)
    end_of_draws(passes, problem, drawn_ptr, True)


@gluon.jit
def end_of_draws(passes, problem, drawn_ptr, SPARE_WARPS: gl.constexpr):
    """Set the counters of a launch to zero when all warps that draw from them have ended, by the last one."""
    WARPS: gl.constexpr = 1 + HELPERS if SPARE_WARPS else 1
    if draw(drawn_ptr + 1) == gl.num_programs(0) * WARPS - 1:
        gl.store(drawn_ptr, 0)
        gl.store(drawn_ptr + 1, 0)
        if SPARE_WARPS:
            passes.clear(problem)
