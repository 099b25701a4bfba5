"""Masks as the Hopper backward hands them to its kernels, replayed on the host against the dense mask; no GPU."""

import random

import pytest
import torch

pytest.importorskip("triton")

from ringflash.attention.schedule import plan_single_block
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.hopper.backward.host import heads_at_last, hop_of
from ringflash_kernels.hopper.forward import host as forward
from ringflash_kernels.hopper.fp8.tiles import FP8_TILES
from ringflash_kernels.mask import Mask, Region


def visible(hop, num_rows, num_keys):
    """Return the pairs that a kernel sees: per key of the rectangle, the rows of `BackwardProblem.rows_seeing`."""
    dense = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    for key in range(hop.num_keys):
        if hop.has_bounds:
            first, stop = int(hop.bounds[0][key]), int(hop.bounds[1][key])
        else:
            first, stop = hop.rows_seeing(key)
        if first < stop:
            dense[hop.q_start + first : hop.q_start + stop, hop.k_start + key] = True
    return dense


def check(mask):
    cpu = torch.device("cpu")
    dense = mask.dense()
    assert torch.equal(visible(hop_of(mask, cpu), mask.seqlen_q, mask.seqlen_k), dense)
    assert torch.equal(visible(hop_of(mask, cpu, transposed=True), mask.seqlen_k, mask.seqlen_q), dense.T)


@pytest.mark.parametrize("seed", range(8))
def test_random_rectangles(seed):
    pick = random.Random(seed)
    for _ in range(40):
        seqlen_q, seqlen_k = pick.randint(1, 60), pick.randint(1, 60)
        rows, keys = (sorted(pick.sample(range(n + 1), 2)) for n in (seqlen_q, seqlen_k))
        upper = pick.choice([None, pick.randint(-20, 50)])
        lower = pick.choice([None, (50 if upper is None else upper) - pick.randint(0, 60)])
        check(Mask.of(seqlen_q, seqlen_k, [Region(*rows, *keys, lower, upper)]))


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal):
    check(Mask.documents([0, 5, 6, 20, 33], causal=causal))


@pytest.mark.parametrize("seed", range(4))
def test_two_bands(seed):
    """A zigzag shard sees the keys of all ranks without a table of bounds."""
    pick = random.Random(seed)
    for _ in range(40):
        size, first = pick.randint(1, 9), pick.randint(0, 5)
        chunks = first, pick.randint(first + 1, 8)
        regions = [
            Region(row, row + size, 0, (chunk + 1) * size, None, chunk * size - row)
            for row, chunk in zip((0, size), chunks, strict=True)
        ]
        mask = Mask.of(2 * size, 9 * size, regions)
        assert len(mask.regions) < 2 or size == 1 or not hop_of(mask, torch.device("cpu")).has_bounds
        check(mask)


def test_rows_start_on_16_bytes():
    """The copy engine cannot read the statistics from an odd row; the rectangle grows, the mask does not."""
    hop = hop_of(Mask.of(50, 60, [Region(13, 40, 2, 57)]), torch.device("cpu"))
    assert hop.q_start == 12 and hop.min_row == 1


@pytest.mark.parametrize("seqlen, num_groups, expected", [(49152, 3, 2), (32768, 8, 1), (20480, 8, 4)])
def test_heads_at_last(seqlen, num_groups, expected):
    """With one head at a time, SMs would wait 3% of the time in the first case, and 4% in the last."""
    hop = hop_of(Mask.band(seqlen, seqlen, causal=True), torch.device("cpu"))
    assert hop.steps_of_tiles(128) == list(range(seqlen // 64, 0, -2))
    assert heads_at_last(hop, 128, num_groups, 24 // num_groups, 1) == expected


def test_heads_at_last_of_a_forward():
    """Tiles cost what the dense mask shows. One KV head at a time, the SMs of a zigzag shard would wait 3 to 5%."""
    tiles, rows = FP8_TILES[128], 3 * 128
    masks = [zigzag_mask(rank, 1024) for rank in (0, 1)] + [Mask.band(rows, 900, causal=True, window_size=(200, -1))]
    for mask in masks:
        costs = forward.tile_costs(mask.regions, tiles, mask.q_span)
        tiled = [x.any(0).nonzero()[[0, -1], 0].tolist() for x in mask.dense().split(tiles.rows)]
        assert [*costs] == sorted((-(-(last + 1 - first) // 128) + 2 for first, last in tiled), reverse=True)
    for rank in (0, 1):
        mask = zigzag_mask(rank, 8192)
        assert forward.heads_at_last(mask.regions, tiles, mask.q_span, 28, 4, 132) == 12
    documents = Mask.documents([0, 100, 200, 300])
    assert forward.heads_at_last(documents.regions, tiles, documents.q_span, 28, 4, 132) == 4


def zigzag_mask(rank, rows):
    """Return the mask of a shard of this many rows, of one of two ranks."""
    return plan_single_block(SequenceMask(2 * rows, True, (-1, -1)), 2, rank, "zigzag", 128).mask
