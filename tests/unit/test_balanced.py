"""Layout `balanced`: which documents are cut, work and tokens of each rank, any bounds. CPU, one process."""

import math
import random
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash
from ringflash.attention.schedule import plan_single_block
from ringflash.sequence.balanced import balanced_chunks
from ringflash.sequence.layout import chunks
from ringflash.sequence.mask import SequenceMask

TOKENS = 4096  # a rank


def pack(seed: int, seqlen: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Return the bounds of documents of log-uniform lengths."""
    chance, bounds = random.Random(seed), [0]
    while bounds[-1] < seqlen:
        length = math.exp(chance.uniform(math.log(shortest), math.log(longest)))
        bounds.append(min(seqlen, bounds[-1] + round(length)))
    return tuple(bounds)


def work(bounds: tuple[int, ...], cp_size: int) -> list[int]:
    """Visible pairs of the tokens of each rank under a causal mask, counted token by token."""
    documents, counts = torch.tensor(bounds), []
    for rank in range(cp_size):
        held = ringflash.local_positions(bounds[-1], cp_size, rank, "balanced", documents)
        first = documents[torch.searchsorted(documents, held, right=True) - 1]
        counts.append(int((held - first + 1).sum()))
    return counts


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_every_token_once_and_as_many_on_each_rank(lengths: list[int], cp_size: int) -> None:
    lengths.append(-sum(lengths) % cp_size or cp_size)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    seqlen = int(bounds[-1])
    held = [ringflash.local_positions(seqlen, cp_size, rank, "balanced", bounds) for rank in range(cp_size)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(seqlen))
    for rank, positions in enumerate(held):
        assert positions.dtype == torch.int64 and positions.shape == (seqlen // cp_size,)
        assert bool((positions.diff() > 0).all())
        parts = chunks(seqlen, cp_size, rank, "balanced", tuple(bounds.tolist()))
        assert torch.equal(positions, torch.cat([torch.arange(part.start, part.stop) for part in parts]))
        assert [part.row for part in parts] == [0, *torch.tensor([p.size for p in parts]).cumsum(0).tolist()][:-1]
        assert all(first.stop < second.start for first, second in pairwise(parts))  # neighbours are joined


@pytest.mark.parametrize("cp_size", [2, 8, 64])
@pytest.mark.parametrize("longest", [1 / 8, 1 / 4, 2, 64])
def test_work_is_equal_and_few_documents_are_cut(cp_size: int, longest: float) -> None:
    """Within 3%, for documents much shorter and much longer than what a rank holds; two cuts a rank at most."""
    for seed in range(3):
        bounds = pack(seed, cp_size * TOKENS, TOKENS // 128, int(longest * TOKENS))
        counts = work(bounds, cp_size)
        mean = sum(counts) / cp_size
        assert max(counts) <= 1.03 * mean and min(counts) >= 0.97 * mean, (seed, counts)
        cuts = set()
        for rank in range(cp_size):
            for part in chunks(bounds[-1], cp_size, rank, "balanced", bounds):
                cuts |= {part.start, part.stop} - set(bounds)
        assert len(cuts) <= 8 * (cp_size - 1)  # a part of a document is two segments


@pytest.mark.parametrize("cp_size", [2, 8, 64])
def test_work_is_equal_with_global_tokens(cp_size: int) -> None:
    """Within 2%, for documents of 16 windows and more; the order of `balanced` does not know windows."""
    bounds = pack(0, cp_size * TOKENS, TOKENS // 2, 4 * TOKENS)
    mask = SequenceMask(bounds[-1], True, (127, -1), bounds, global_tokens=(8,) * (len(bounds) - 1))
    for layout in ("balanced", "zigzag"):
        counts = [plan_single_block(mask, cp_size, rank, layout).mask.num_visible for rank in range(cp_size)]
        assert sum(counts) == mask.num_visible >= 0.98 * cp_size * max(counts)


def test_extremes() -> None:
    """One document is a zigzag; equal ones of a rank's size stay whole; one long one leaves room for many short."""
    one = [ringflash.local_positions(64, 4, rank, "balanced", torch.tensor([0, 64])) for rank in range(4)]
    assert [x.tolist() for x in one] == [ringflash.local_positions(64, 4, rank).tolist() for rank in range(4)]
    for rank in range(8):
        assert [chunk.size for chunk in chunks(8 * 96, 8, rank, "balanced", tuple(range(0, 8 * 96 + 1, 96)))] == [96]
    bounds = (0, 3000, *range(3001, 8 * 1024 + 1))
    counts = work(bounds, 8)
    assert max(counts) <= 1.03 * sum(counts) / 8 and min(counts) >= 0.97 * sum(counts) / 8


def test_the_default_device_of_torch_is_not_used() -> None:
    """A script with torch.set_default_device("cuda") has the same shards."""
    bounds = pack(0, 8 * TOKENS, 64, TOKENS)
    want = [chunks(bounds[-1], 8, rank, "balanced", bounds) for rank in range(8)]
    balanced_chunks.cache_clear()
    with torch.device("meta"):
        assert [chunks(bounds[-1], 8, rank, "balanced", bounds) for rank in range(8)] == want


def test_only_cut_documents_are_sent() -> None:
    """A rank needs keys of others for the documents that are cut, and of no other document.

    The rank that needs all keys of one, for its last token, holds most of them.
    """
    bounds = pack(0, 8 * TOKENS, 64, TOKENS)
    mask = SequenceMask(bounds[-1], cu_seqlens=bounds)
    held: dict[int, Counter[int]] = defaultdict(Counter)
    last: dict[int, int] = {}
    for rank in range(8):
        for chunk in chunks(bounds[-1], 8, rank, "balanced", bounds):
            for document in range(mask.document_of(chunk.start), mask.document_of(chunk.stop - 1) + 1):
                start, stop = bounds[document], bounds[document + 1]
                held[document][rank] += min(chunk.stop, stop) - max(chunk.start, start)
                if chunk.stop >= stop:
                    last[document] = rank
    for rank in range(8):
        found = plan_single_block(mask, 8, rank, "balanced")
        sent = sum(segment.size for segment in found.segments if segment.owner != rank)
        shared = [document for document, ranks in held.items() if rank in ranks and len(ranks) > 1]
        assert 0 < sent <= sum(bounds[document + 1] - bounds[document] for document in shared)
        assert len(shared) <= 4
    assert all(ranks[last[document]] == max(ranks.values()) for document, ranks in held.items())
