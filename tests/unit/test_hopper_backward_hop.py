"""Masks as the Hopper backward hands them to its kernels, replayed on the host against the dense mask; no GPU."""

import random

import pytest
import torch

pytest.importorskip("triton")

from ringflash_kernels.hopper.backward.host import heads_at_last, hop_of
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
