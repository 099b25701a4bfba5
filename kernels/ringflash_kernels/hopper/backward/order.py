"""A fixed order of the additions to dQ: a block of queries gets those of its key tiles in the order of the tiles.

Each block has a number in device memory, that of the last tile whose dQ it contains. A tile adds its dQ to a block once
the block has the number of the previous tile that sees it, and then writes its own. CTAs start in the order of their
index, and so of their tiles (decoupled look-back, as in scans, relies on this, too): a tile waits only for tiles that
have started. A tile takes its blocks from the last to the first, and all heads of a group at each, so that tiles which
start together are at the same block, an addition apart, also if a causal mask shows them fewer and fewer blocks.
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
        """Return the last tile before `tile` that queries see, and its blocks [start, stop), none if there is none."""
        tile -= 1
        start, stop, _full_start, _full_stop = problem.blocks(gl.maximum(tile, 0) * problem.BLOCK_N)
        while (tile > 0) & (start == stop):  # in a gap that bounds may leave: such a tile writes no number
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
