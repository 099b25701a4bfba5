"""A fixed order of the additions to dQ: key tiles add to a block of queries in the order of the tiles.

Each block has a number in device memory: the last tile whose dQ it contains. A tile waits until the block has the
number of the previous tile that sees it, adds its dQ, and writes its own number. CTAs start in the order of their
index, and so of their tiles (decoupled look-back of scans relies on this, too): a tile waits only for tiles that have
started. A tile visits its blocks from the last to the first, and all heads of a group at each. So tiles that start
together are at the same block, one addition apart, even if a causal mask gives later tiles fewer blocks.
"""

from ringflash_kernels.hopper.compat import aggregate, gl, gluon, publish, wait_for


@aggregate
class DqOrder:
    """Numbers of the blocks of queries.

    Args:
        numbers_ptr: (heads, num_blocks), int32.
        first_number: number of tile 0 in this launch. Launches that share `numbers_ptr` share no number.
    """

    numbers_ptr: gl.tensor
    num_blocks: gl.tensor
    first_number: gl.tensor

    @gluon.jit
    def previous(self, problem, tile):
        """Return the last tile before `tile` that a query sees, and its blocks [start, stop); none if there is none."""
        tile -= 1
        start, stop, _full_start, _full_stop = problem.blocks(gl.maximum(tile, 0) * problem.BLOCK_N)
        while (tile > 0) & (start == stop):  # a tile in a gap between bounds writes no number
            tile -= 1
            start, stop, _full_start, _full_stop = problem.blocks(tile * problem.BLOCK_N)
        return tile, start, gl.where(tile < 0, start, stop)

    @gluon.jit
    def wait_for_tile(self, tile, head, block):
        """Wait until `tile` has added its dQ to a block."""
        wait_for(self.numbers_ptr + head * self.num_blocks + block, self.first_number + tile)

    @gluon.jit
    def publish_tile(self, tile, head, block):
        """Let the next tile add its dQ to a block: that of `tile` is complete."""
        publish(self.numbers_ptr + head * self.num_blocks + block, self.first_number + tile)
