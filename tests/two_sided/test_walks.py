"""Stretches of blocks against the dense mask."""

from __future__ import annotations

import pytest
import torch

from ringflash_kernels.hopper.walks import walks
from ringflash_kernels.mask import Mask
from tests.two_sided.forests import Forest, block_diffusion, images, random_forest, rollouts
from tests.two_sided.kernel_masks import mask_of, one_by_one, sequence_mask


def _masks(number: int = 10) -> list[Mask]:
    forests = [rollouts(300, [50, 170, 90, 33]), images([(30, 100)] * 4, left=90), block_diffusion(8, 40)]
    forests += [random_forest(seed, 480) for seed in range(number)]
    found = [mask_of(forest) for forest in forests]
    even = [sequence_mask(f) for f in forests if f.seqlen % 4 == 0]
    found += [block.mask for mask in even for block in one_by_one(mask, 2, 1, "zigzag")]
    return [m for m in found if m.regions]


@pytest.mark.parametrize("tile_rows, block", [(128, 64), (32, 16), (192, 128)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("number", [6, pytest.param(60, marks=pytest.mark.nightly)])
def test_walks(tile_rows: int, block: int, transposed: bool, number: int) -> None:
    for mask in _masks(number):
        mask = mask.cached("transposed", mask.transposed) if transposed else mask
        dense = mask.dense()
        for rows in ((0, mask.seqlen_q), mask.q_span):
            found = walks(mask, torch.device("cpu"), rows, tile_rows, block)
            assert sorted(found.tiles[:, 0].tolist()) == list(range(-(-(rows[1] - rows[0]) // tile_rows)))
            assert (found.tiles[1:, 3] <= found.tiles[:-1, 3]).all()
            for tile, first, count, blocks in found.tiles.tolist():
                seen = dense[rows[0] + tile * tile_rows : min(rows[0] + (tile + 1) * tile_rows, rows[1])]
                kinds = {}
                for begin, end, masked, _ in found.stretches[first : first + count].tolist():
                    kinds |= dict.fromkeys(range(begin, end), masked)
                assert len(kinds) == blocks and list(kinds) == sorted(kinds)
                for j in range(-(-mask.seqlen_k // block)):
                    part = seen[:, j * block : (j + 1) * block]
                    if j not in kinds:
                        assert not part.any()
                    elif not kinds[j]:
                        assert part.all() and part.shape[1] == block
                    else:
                        assert part.any(), "an empty block is visited"


@pytest.mark.parametrize("tile_rows, block", [(128, 64), (32, 16)])
def test_shifted_walks(tile_rows: int, block: int) -> None:
    """Every visible pair is in one block, and there are fewer blocks than at multiples of their size."""
    saved = 0
    for mask in _masks(6):
        dense = mask.dense()
        grid, found = (
            walks(mask, torch.device("cpu"), mask.q_span, tile_rows, block, shifted=x) for x in (False, True)
        )
        assert found.blocks <= grid.blocks
        saved += grid.blocks - found.blocks
        for tile, first, count, blocks in found.tiles.tolist():
            start = mask.q_span[0] + tile * tile_rows
            seen = dense[start : min(start + tile_rows, mask.q_span[1])]
            visits = torch.zeros(mask.seqlen_k, dtype=torch.int64)
            keys = []
            for begin, end, masked, shift in found.stretches[first : first + count].tolist():
                for key in range(begin * block + shift, end * block + shift, block):
                    keys.append(key)
                    part = seen[:, key : key + block]
                    visits[key : key + block] += 1
                    assert part.any() if masked else part.all() and part.shape[1] == block
            assert len(keys) == blocks and keys == sorted(keys)
            assert (visits[seen.any(0)] == 1).all()
    assert saved > 0


def test_near_tiles_are_launched_together() -> None:
    """Tiles stay in place, but the tree with the longest tile comes first; there is the same walk for each."""
    small, large = rollouts(100, [120, 80]), rollouts(260, [190, 130])
    forest = Forest((*small.lengths, *large.lengths), (*small.parents, -1, 3, 3), (False,) * (len(small.lengths) + 3))
    mask = mask_of(forest)
    near, longest = (walks(mask.transposed(), torch.device("cpu"), (0, 880), 64, 32, near=x) for x in (True, False))
    assert near.tiles[:, 0].tolist() == [*range(4, 13), *range(4), 13]  # 4 is of both trees
    assert sorted(near.tiles.tolist()) == sorted(longest.tiles.tolist())
    blocks = longest.tiles[:, 3]
    assert near.longest == int(blocks[0]) and near.blocks == int(blocks.sum())
    assert near.mean == int((blocks**2).sum()) // near.blocks and near.of_long == 0


def test_masked_blocks_are_few() -> None:
    """Blocks that are visited with a mask although all of it is visible: only where two pieces of keys meet."""
    needless = visited = 0
    for mask in _masks():
        dense = mask.dense()
        found = walks(mask, torch.device("cpu"), (0, mask.seqlen_q), 32, 16)
        for tile, first, count, _ in found.tiles.tolist():
            for begin, end, masked, _ in found.stretches[first : first + count].tolist():
                visited += end - begin
                for j in range(begin, end):
                    part = dense[tile * 32 : (tile + 1) * 32, j * 16 : (j + 1) * 16]
                    needless += int(masked and bool(part.all()) and part.shape[1] == 16)
    assert needless < 0.01 * visited
