"""Walks of the tiles under a two-sided mask: which blocks a tile visits, and which of them need no mask.

A tile is a group of rows (of queries; of keys if the mask is transposed). The columns that its rows see are cut into
blocks at multiples of a block's size. A run of visible columns may instead be cut from its first column on, if it then
has fewer blocks. A *stretch* is a run of blocks of one kind: full, if all rows see all of each block, or masked. Blocks
that no row sees are in no stretch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringflash_kernels.mask import Mask, upload

_MAX_BLOCK = 128  # keys of a block, at most
# Blocks that are not at multiples of their size are at multiples of this many keys: TMA reads the ends of a block's
# keys, int32, only from addresses that are multiples of 16 bytes.
_SHIFT = 8
LONG_WALK = 64  # a walk of more blocks is long
_MASKED_COST = 0.2  # additional time of a masked block in the forward, in full blocks


class Walks(NamedTuple):
    """Tables of a launch, and blocks of their walks.

    tiles: (num_walks, 4), int32, in order of the launch: tile, first stretch, number of stretches, number of blocks.
    stretches: (num_stretches, 4), int32, ascending within a tile: first block, end, 1 if masked, and
        - `shifted`: columns by which its blocks are after the multiples of their size;
        - `ordered`: the row of `tiles` of the last tile above that visits these blocks, or -1;
        - `part`: in the first stretch of a part of a walk 1 + the tile's place among those of `summed`, else 0.
    blocks, masked: visits of all tiles, and those that are masked; longest: visits of one tile, at most; mean: length
        of a walk, averaged over visits, so that long walks weigh more; of_long: visits of tiles with more than
        LONG_WALK.
    summed: rows of the tiles whose walks are cut into parts, ascending, or None if there are none.
    """

    tiles: Tensor
    stretches: Tensor
    blocks: int
    masked: int
    longest: int
    mean: int
    of_long: int
    summed: Tensor | None = None


def walks(
    mask: Mask,
    device: torch.device,
    rows: tuple[int, int],
    tile_rows: int,
    block: int,
    *,
    near: bool = False,
    ordered: bool = False,
    shifted: bool = False,
    part: int | None = None,
) -> Walks:
    """Return the walks over all columns of the tiles of the rows [first, end), cached with the mask.

    Args:
        near: launch tiles that visit the same blocks together (`_near_together`); otherwise the longest tiles first.
        ordered: find the previous tile of each stretch, for sums in a fixed order.
        shifted: blocks may begin anywhere.
        part: cut walks of more than twice as many blocks into parts of at most these, and launch all in the order of
            their first blocks.
    """
    device = torch.device(device)

    def make() -> Walks:
        if shifted:
            tiles, stretches = _new_shifted_walks(mask, rows, tile_rows, block)
        else:
            tiles, stretches = _new_walks(mask, rows, tile_rows, block)
        summed = None
        if part is not None:
            tiles, stretches, cut = _in_parts(tiles, stretches, part)
            summed = (rows[0] + cut[:, None] * tile_rows + torch.arange(tile_rows, device="cpu")).flatten()
            summed = upload(device, summed[summed < rows[1]])[0] if len(cut) else None
            begins = torch.nn.functional.pad(stretches[:, 0], (0, 1), value=1 << 30)
            order = begins[torch.where(tiles[:, 2] > 0, tiles[:, 1], len(stretches)).long()].argsort(stable=True)
        elif near:
            order = _near_together(tiles, stretches, -(-tile_rows // block) + 1)
        else:
            order = _longest_first(tiles[:, 3])
        tiles = tiles[order].contiguous()
        blocks = stretches[:, 1] - stretches[:, 0]
        of_tile, total = tiles[:, 3].long(), int(blocks.sum())
        mean, of_long = int((of_tile**2).sum()) // max(total, 1), int(of_tile[of_tile > LONG_WALK].sum())
        totals = total, int((blocks * stretches[:, 2]).sum()), int(of_tile.max()), mean, of_long
        if ordered:
            tiles, stretches = _with_previous(tiles, stretches, -(-mask.seqlen_k // block))
        return Walks(*upload(device, tiles, stretches), *totals, summed)

    return mask.cached(("walks", device, rows, tile_rows, block, near, ordered, shifted, part), make)


class Limits(NamedTuple):
    """Tables of a two-sided mask, int32: the end of each key, (1, keys), and the keys [start, stop) that each row sees.

    Rows are counted from the first of a launch; both sides are padded to whole tiles.
    """

    ends: Tensor
    start: Tensor
    stop: Tensor


def limits(mask: Mask, device: torch.device, rows_per_tile: int, rows: tuple[int, int]) -> Limits:
    """Return the limits of the rows [first, end), cached with the mask."""
    device = torch.device(device)

    def make() -> Limits:
        start, stop = (x[slice(*rows)] for x in (mask.begins(), mask.bounds()[1]))
        parts = ((mask.ends() - rows[0], _MAX_BLOCK), (start, rows_per_tile), (stop, rows_per_tile))
        padded = (torch.nn.functional.pad(x, (0, -len(x) % size)) for x, size in parts)
        ends, start, stop = upload(device, *padded)
        return Limits(ends[None], start, stop)

    return mask.cached(("limits", device, rows_per_tile, rows), make)


def has_begins(mask: Mask) -> bool:
    """Return whether some key is not seen by all rows of its interval: a window also limits what a row sees."""

    def make() -> bool:
        first, stop = mask.cached("transposed", mask.transposed).bounds()
        return int((stop - first).sum()) != mask.num_visible

    return mask.cached("has begins", make)


def _longest_first(blocks: Tensor) -> Tensor:
    """Return the indices of tiles, (num_tiles,), by falling number of blocks."""
    return torch.argsort(blocks, descending=True, stable=True)


def _near_together(tiles: Tensor, stretches: Tensor, shared: int) -> Tensor:
    """Return an order of tiles: as they are, but the tree with the longest tile first.

    So tiles that run at the same time read the same rows from L2, and no long tile is started last.

    Args:
        shared: blocks that tiles of two trees may share, where one tree ends inside of a tile.
    """
    _, first, count, blocks = tiles.long().unbind(1)
    visits = count > 0
    begin = torch.where(visits, stretches[first.clamp(max=len(stretches) - 1), 0].long(), 0)
    end = torch.where(visits, stretches[(first + count - 1).clamp(min=0), 1].long(), 0)
    reached = torch.cat([end.new_zeros(1), end.cummax(0).values[:-1]])
    tree = (visits & (begin + shared >= reached)).cumsum(0)
    longest = torch.zeros(int(tree[-1]) + 1, dtype=torch.int64, device="cpu").scatter_reduce_(0, tree, blocks, "amax")
    return _longest_first(longest[tree])


def _in_parts(tiles: Tensor, stretches: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut walks of more than 2 * `most` blocks into equal parts of at most `most`.

    Returns:
        tiles, stretches: as `Walks`, a row of `tiles` for each part, in no order of launch.
        cut: (num_cut,), int64, the tiles whose walks were cut, ascending.
    """
    number, _, _, blocks = tiles.long().unbind(1)
    begin, end, masked, _ = stretches.unbind(1)
    places = torch.nn.functional.pad((end - begin).cumsum(0), (1, 0))  # of stretches in all walks, one after the other
    starts = blocks.cumsum(0) - blocks
    counts = torch.where(blocks > 2 * most, -(-blocks // most), 1)
    walk = torch.repeat_interleave(torch.arange(len(tiles), device="cpu"), counts)
    part = torch.arange(len(walk), device="cpu") - (counts.cumsum(0) - counts)[walk]
    starts = starts[walk] + blocks[walk] * part // counts[walk]
    edges = torch.cat([places, starts]).unique()
    of = torch.searchsorted(places, edges[:-1], right=True) - 1
    begin = begin[of] + edges[:-1] - places[of]
    first = torch.searchsorted(edges, starts)
    stretches = torch.stack([begin, begin + edges.diff(), masked[of], torch.zeros_like(begin)], 1).int()
    is_part = counts[walk] > 1
    stretches[first[is_part], 3] = ((counts > 1).cumsum(0)[walk])[is_part].int()
    sizes = (torch.cat([x, x.new_tensor([last])]).diff() for x, last in ((first, len(stretches)), (starts, edges[-1])))
    return torch.stack([number[walk], first, *sizes], 1).int(), stretches.contiguous(), number[counts > 1]


def _with_previous(tiles: Tensor, stretches: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Cut stretches so that all blocks of each have one previous tile, and write that tile to their last column."""
    last = np.full(num_blocks, -1, dtype=np.int32)
    new_tiles, new_stretches = tiles.numpy().copy(), []
    for rank, (_, first, count, _) in enumerate(tiles.tolist()):
        new_tiles[rank, 1] = len(new_stretches)
        for begin, end, masked, _ in stretches[first : first + count].tolist():
            cuts = [0, *(np.flatnonzero(np.diff(last[begin:end])) + 1).tolist(), end - begin]
            new_stretches += [(begin + a, begin + b, masked, int(last[begin + a])) for a, b in pairwise(cuts)]
            last[begin:end] = rank
        new_tiles[rank, 2] = len(new_stretches) - new_tiles[rank, 1]
    return torch.from_numpy(new_tiles), torch.tensor(new_stretches, dtype=torch.int32, device="cpu")


def _new_walks(mask: Mask, rows: tuple[int, int], tile_rows: int, block: int) -> tuple[Tensor, Tensor]:
    """Return `tiles` and `stretches` of `Walks`, with blocks at multiples of their size; all tiles in their own order.

    Each region is cut into one piece per tile. A sweep over a tile's blocks counts the pieces that touch a block, and
    the rows that see all of it. These two counts tell if the block is seen by no row, full, or masked.
    """
    num_tiles, width = -(-(rows[1] - rows[0]) // tile_rows), -(-mask.seqlen_k // block) + 1
    q_start, q_stop, k_start, k_stop, lower, upper = torch.from_numpy(mask.table).unbind(1)
    # One piece for each region and tile that share rows.
    first_tile, last_tile = (q_start - rows[0]) // tile_rows, (q_stop - 1 - rows[0]) // tile_rows
    counts = last_tile - first_tile + 1
    of = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    tile = torch.arange(len(of), device="cpu") - (counts.cumsum(0) - counts)[of] + first_tile[of]
    top = torch.maximum(q_start[of], tile * tile_rows + rows[0])
    bottom = torch.minimum(q_stop[of], (tile + 1) * tile_rows + rows[0]) - 1
    # Columns that some row of the piece sees, and that all of its rows see.
    some = torch.maximum(k_start[of], top + lower[of]), torch.minimum(k_stop[of], bottom + upper[of] + 1)
    every = torch.maximum(k_start[of], bottom + lower[of]), torch.minimum(k_stop[of], top + upper[of] + 1)
    some_blocks = some[0] // block, -(-some[1] // block)
    full_blocks = -(-every[0] // block), every[1] // block
    touched, filled = some[0] < some[1], (full_blocks[0] < full_blocks[1])
    num_rows = bottom - top + 1
    # Sweep over the blocks of each tile: pieces that touch a block, and rows that see all of it.
    ends = [
        (some_blocks[0], touched, 1, 0), (some_blocks[1], touched, -1, 0),
        (full_blocks[0], filled, 0, 1), (full_blocks[1], filled, 0, -1),
    ]  # fmt: skip
    place = torch.cat([(tile * width + at)[kept] for at, kept, *_ in ends])
    touch = torch.cat([torch.full_like(tile, step)[kept] for _, kept, step, _ in ends])
    fill = torch.cat([(num_rows * step)[kept] for _, kept, _, step in ends])
    place, order = place.sort()
    last = torch.ones_like(place, dtype=torch.bool)
    last[:-1] = place[1:] != place[:-1]
    place, touch, fill = place[last], touch[order].cumsum(0)[last], fill[order].cumsum(0)[last]
    tile_size = torch.minimum(rows[1] - rows[0] - place // width * tile_rows, torch.tensor(tile_rows, device="cpu"))
    kind = torch.where(touch > 0, 1 + (fill < tile_size).long(), 0)  # 0 none, 1 full, 2 masked
    changes = torch.ones_like(last[: len(kind)])
    changes[1:] = kind[1:] != kind[:-1]
    place, kind = place[changes], kind[changes]
    begins = kind.nonzero().flatten()
    tile, begin, end, masked = (
        place[begins] // width,
        place[begins] % width,
        place[begins + 1] % width,
        kind[begins] - 1,
    )
    stretches = torch.stack([begin, end, masked, torch.zeros_like(begin)], 1).int()
    number = torch.zeros(num_tiles, dtype=torch.int64, device="cpu").index_add_(0, tile, torch.ones_like(tile))
    blocks = torch.zeros_like(number).index_add_(0, tile, end - begin)
    tiles = torch.stack([torch.arange(num_tiles, device="cpu"), number.cumsum(0) - number, number, blocks], 1).int()
    return tiles, stretches.contiguous()


def _new_shifted_walks(mask: Mask, rows: tuple[int, int], tile_rows: int, block: int) -> tuple[Tensor, Tensor]:
    """Return walks over blocks that begin at multiples of their size, or with the first column of their run.

    A run has gaps of less than a block, so that the blocks of two runs have no visible column in common.
    """
    tiles, fine = _new_walks(mask, rows, tile_rows, _SHIFT)
    begin, end, masked, _ = fine.long().unbind(1)
    begin, end, full = begin * _SHIFT, end * _SHIFT, masked == 0
    tile = torch.repeat_interleave(torch.arange(len(tiles), device="cpu"), tiles[:, 2].long())
    is_first = torch.ones(len(fine), dtype=torch.bool, device="cpu")
    is_first[1:] = (tile[1:] != tile[:-1]) | (begin[1:] - end[:-1] >= block)
    run, is_last = is_first.cumsum(0) - 1, is_first.roll(-1)
    first, stop, tile = begin[is_first], end[is_last], tile[is_first]

    def cut(start: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the blocks of each run, from `start` on; and the run, first block and end of pieces that are full."""
        low, high = -(-(begin - start[run]) // block), (end - start[run]) // block
        kept = full & (low < high)
        return -(-(stop - start) // block), run[kept], low[kept], high[kept]

    def cost(start: Tensor) -> Tensor:
        blocks, of, low, high = cut(start)
        return (1 + _MASKED_COST) * blocks - _MASKED_COST * torch.zeros_like(blocks).index_add_(0, of, high - low)

    grid = first // block * block
    start = torch.where(cost(first) < cost(grid), first, grid)
    blocks, of, low, high = cut(start)
    # Each run: a masked stretch before each full one, and one after the last; empty ones are dropped.
    order = torch.cat([of * 2, torch.arange(len(first), device="cpu") * 2 + 1]).argsort(stable=True)
    of = torch.cat([of, torch.arange(len(first), device="cpu")])[order]
    low, high = torch.cat([low, blocks])[order], torch.cat([high, blocks])[order]
    previous = torch.where(of == of.roll(1), high.roll(1), 0)
    previous[:1] = 0
    edges = torch.stack([previous, low, high], 1)
    begin, end = edges[:, :2].flatten(), edges[:, 1:].flatten()
    masked = torch.tensor([1, 0], device="cpu").repeat(len(of))
    kept = begin < end
    of, begin, end, masked = of.repeat_interleave(2)[kept], begin[kept], end[kept], masked[kept]
    at = start[of] // block
    stretches = torch.stack([at + begin, at + end, masked, start[of] % block], 1).int()
    number = torch.zeros(len(tiles), dtype=torch.int64, device="cpu").index_add_(0, tile[of], torch.ones_like(of))
    visits = torch.zeros_like(number).index_add_(0, tile[of], end - begin)
    tiles = torch.stack([torch.arange(len(tiles), device="cpu"), number.cumsum(0) - number, number, visits], 1).int()
    return tiles, stretches.contiguous()
