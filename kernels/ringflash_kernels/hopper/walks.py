"""Walks of the tiles under a two-sided mask: which blocks a tile visits, and which of them need no mask.

A tile is a group of rows (of queries; of keys if the mask is transposed). The columns that its rows see are cut into
blocks at multiples of a block's size. A *stretch* is a run of blocks of one kind: all rows see all of each block
(full), or not (masked). Blocks that no row sees are in no stretch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ringflash_kernels.mask import Mask, check_capture

_MAX_BLOCK = 128  # keys of a block, at most


class Walks(NamedTuple):
    """Tables of a launch, and blocks of their walks.

    tiles: (num_tiles, 4), int32, in order of the launch: tile, first stretch, number of stretches, number of blocks.
    stretches: (num_stretches, 4), int32: first block, end, 1 if masked, and if asked for the row of `tiles` of the last
        tile above that visits these blocks, or -1; ascending within a tile.
    blocks, masked: visits of all tiles, and those that are masked; longest: visits of one tile, at most.
    """

    tiles: torch.Tensor
    stretches: torch.Tensor
    blocks: int
    masked: int
    longest: int


def walks(
    mask: Mask,
    device: torch.device,
    rows: tuple[int, int],
    tile_rows: int,
    block: int,
    *,
    near: bool = False,
    ordered: bool = False,
) -> Walks:
    """Return the walks over all columns of the tiles of the rows [first, end), cached with the mask.

    Args:
        near: launch tiles that visit the same blocks together (`_near_together`); otherwise the longest tiles first.
        ordered: find the previous tile of each stretch, for sums in a fixed order.
    """
    device = torch.device(device)

    def make() -> Walks:
        check_capture(device)
        tiles, stretches = _new_walks(mask, rows, tile_rows, block)
        order = _near_together(tiles, stretches, tile_rows // block + 1) if near else _longest_first(tiles[:, 3])
        tiles = tiles[order].contiguous()
        blocks = stretches[:, 1] - stretches[:, 0]
        totals = int(blocks.sum()), int((blocks * stretches[:, 2]).sum()), int(tiles[:, 3].max())
        if ordered:
            tiles, stretches = _with_previous(tiles, stretches, -(-mask.seqlen_k // block))
        return Walks(tiles.to(device), stretches.to(device), *totals)

    return mask.cached(("walks", device, rows, tile_rows, block, near, ordered), make)


class Limits(NamedTuple):
    """Tables of a two-sided mask, int32: the end of each key, (1, keys), and the keys [start, stop) that each row sees.

    Rows are counted from the first of a launch; both sides are padded to whole tiles.
    """

    ends: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor


def limits(mask: Mask, device: torch.device, rows_per_tile: int, rows: tuple[int, int]) -> Limits:
    """Return the limits of the rows [first, end), cached with the mask."""

    def make() -> Limits:
        check_capture(device)
        start, stop = (x[slice(*rows)] for x in (mask.begins(), mask.bounds()[1]))
        parts = ((mask.ends() - rows[0], _MAX_BLOCK), (start, rows_per_tile), (stop, rows_per_tile))
        ends, start, stop = (torch.nn.functional.pad(x, (0, -len(x) % size)).to(device) for x, size in parts)
        return Limits(ends[None], start, stop)

    return mask.cached(("limits", torch.device(device), rows_per_tile, rows), make)


def has_begins(mask: Mask) -> bool:
    """Return whether some row sees only a part of the keys in whose interval of rows it is, as under a window."""

    def make() -> bool:
        first, stop = mask.cached("transposed", mask.transposed).bounds()
        return int((stop - first).sum()) != mask.num_visible

    return mask.cached("has begins", make)


def _longest_first(blocks: torch.Tensor) -> torch.Tensor:
    return torch.argsort(blocks, descending=True, stable=True)


def _near_together(tiles: torch.Tensor, stretches: torch.Tensor, shared: int) -> torch.Tensor:
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


def _with_previous(tiles: torch.Tensor, stretches: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut stretches so that all blocks of each have one previous tile, which is its last column."""
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


def _new_walks(mask: Mask, rows: tuple[int, int], tile_rows: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
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
