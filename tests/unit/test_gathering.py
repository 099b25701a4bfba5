"""Keys that a rank gathers from the others, for random masks and layouts. CPU, one process."""

import sys
from collections import defaultdict
from itertools import accumulate
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ringflash.attention import gathered_buffers, gradient_return, sections, transfers
from ringflash.attention.schedule import (
    KeyBlock,
    active_distances,
    chunks_are_multiples,
    plan_blocks,
    plan_single_block,
)
from ringflash.comm.transport import NcclGather, PointToPoint, buffers
from ringflash.sequence.layout import chunks
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.mask import Mask
from tests.two_sided.forests import FAMILIES
from tests.two_sided.kernel_masks import sequence_mask
from tests.unit.test_schedule import held, problems, three_zigzags, visible  # noqa: F401, a fixture of every test here

Problem = tuple[SequenceMask, int, str]


@given(problems())
@settings(max_examples=50, deadline=None)
def test_records_are_gathered_whole(problem: Problem) -> None:
    """Every cut of a chunk is at a multiple of the keys of a record, and no visible key is left out."""
    mask, cp_size, layout = problem
    bounds = None if mask.cu_seqlens is None else tuple(16 * bound for bound in mask.cu_seqlens)
    counts = mask.global_tokens and tuple(16 * count for count in mask.global_tokens)
    relations = mask.parents, mask.bidirectional, counts
    mask = SequenceMask(16 * mask.seqlen, mask.causal, mask.window_size, bounds, *relations)
    assume(chunks_are_multiples(mask, cp_size, layout, 16))
    for rank in range(cp_size):
        records, keys = (plan_single_block(mask, cp_size, rank, layout, multiple) for multiple in (16, 1))
        places = [place for x in records.segments for place in (x.start, x.row, x.size, x.owner_row)]
        assert not any(place % 16 for place in (*places, records.capacity, records.num_rows))
        assert records.mask.num_visible == keys.mask.num_visible


def assert_kernels_read(mask: Mask) -> None:
    """Assert that what the kernels read is the mask.

    The forward reads an interval of keys for each query and an end for each key; the backward an interval of queries
    for each key and a first key for each query.
    """
    rows, keys, side = torch.arange(mask.seqlen_q)[:, None], torch.arange(mask.seqlen_k), mask.transposed()
    assert side.num_visible == mask.num_visible and torch.equal(side.dense().T, mask.dense())
    (start, stop), (first, last) = mask.bounds(), side.bounds()
    assert torch.equal((keys >= start[:, None]) & (keys < stop[:, None]) & (rows < mask.ends()), mask.dense())
    assert torch.equal((rows >= first) & (rows < last) & (keys >= mask.begins()[:, None]), mask.dense())


def of_all(problem: Problem) -> list[KeyBlock]:
    """Return the single block of every rank."""
    mask, cp_size, layout = problem
    return [plan_single_block(mask, cp_size, rank, layout) for rank in range(cp_size)]


SHORT, LONG = problems(), problems(range(1, 4), (63, 64, 127, 130, 200))  # 64ths of a chunk are a row, or some


@given(SHORT | LONG)
@settings(max_examples=200, deadline=None)
def test_every_visible_key_in_order(problem: Problem) -> None:
    """All visible pairs, at the right positions, and no segment of which a rank sees nothing."""
    check_gathered(problem)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_visible_key_of_trees(name: str) -> None:
    for place in ((1, "contiguous"), (2, "zigzag"), (4, "zigzag"), (4, "balanced"), (3, "contiguous")):
        check_gathered((sequence_mask(FAMILIES[name]), *place))


def check_gathered(problem: Problem) -> None:
    mask, cp_size, layout = problem
    want = visible(mask)
    positions = [held(mask, cp_size, rank, layout) for rank in range(cp_size)]
    ranks = of_all(problem)
    for rank, found in enumerate(ranks):
        keys_of = [positions[segment.owner][segment.start : segment.start + segment.size] for segment in found.segments]
        assert [segment.row for segment in found.segments] == [0, *accumulate(map(len, keys_of))][:-1]
        assert all(want[positions[rank]][:, keys].any() for keys in keys_of)
        keys = torch.cat(keys_of)
        assert (keys[1:] > keys[:-1]).all()
        assert torch.equal(found.mask.dense(), want[positions[rank]][:, keys])
        assert_kernels_read(found.mask)
        assert found.mask.num_visible == int(want[positions[rank]].sum())
    assert all(found.capacity == max(other.num_rows for other in ranks) for found in ranks)
    assert mask.num_visible == int(want.sum()) and {found.pairs for found in ranks} == {int(want.sum()) // cp_size}


@given(SHORT | LONG)
@settings(max_examples=100, deadline=None)
def test_readers_are_who_gathers(problem: Problem) -> None:
    mask, cp_size, layout = problem
    ranks = of_all(problem)
    for rank, found in enumerate(ranks):
        assert [row for segment in found.own_segments for row in range(segment.row, segment.row + segment.size)] == [
            row
            for chunk in chunks(mask.seqlen, cp_size, rank, layout, mask.documents)
            for row in range(chunk.row, chunk.row + chunk.size)
        ]
        for segment, readers in zip(found.own_segments, found.readers, strict=True):
            want = [
                (reader, needed.row)
                for reader, other in enumerate(ranks)
                for needed in other.segments
                if (needed.owner, needed.start, needed.size) == (rank, segment.row, segment.size)
            ]
            assert list(readers) == want and rank in dict(want)
        assert all(x.owner_row == dict(rows_of(ranks[x.owner]))[x.owner, x.start] for x in found.segments)
    arriving = [
        sum(x.size * (len(readers) - 1) for x, readers in zip(found.own_segments, found.readers, strict=True))
        for found in ranks
    ]
    assert all(found.returned_rows == max(arriving) for found in ranks)


def rows_of(found: KeyBlock) -> list[tuple[tuple[int, int], int]]:
    """Rows at which a rank has what it gathers, by owner and first row there."""
    return [((segment.owner, segment.start), segment.row) for segment in found.segments]


def test_a_window_gathers_what_it_sees() -> None:
    """A rank gathers the window of the chunk before its own, to a 64th of a chunk, and few rows more."""
    ranks = of_all((SequenceMask(1 << 16, window_size=(300, 0)), 4, "zigzag"))
    assert [found.num_rows for found in ranks] == [16384 + 384, 16384 + 768, 16384 + 768, 16384 + 384]
    assert all(len(found.mask.regions) <= 2 for found in ranks)
    counts = [[len(readers) for readers in found.readers] for found in ranks]
    assert counts == [[1, 2, 1], [1, 2, 1, 2], [1, 2, 1, 2], [1, 1, 2]]


@given(SHORT | LONG | problems((16,), (1, 2, 64)), st.booleans())
@settings(max_examples=30, deadline=None)
def test_transfers_of_two_ranks_pair_up(problem: Problem, buffered: bool) -> None:
    """One rank sends to another in the order in which that one receives, from the rows that the other would pull."""
    pair_up(of_all(problem), buffered)


def messages(rank: int, k: torch.Tensor) -> NcclGather:
    """The areas of a rank that sends nothing."""
    return NcclGather(cast(PointToPoint, SimpleNamespace(name="nccl", rank=rank, group=None, members=())), k.device)


def pair_up(ranks: list[KeyBlock], buffered: bool) -> None:
    """Assert that what ranks send of a block is what the others receive, row by row, and not to themselves.

    Rows that arrive are disjoint and nearest first; received gradients fill the rows that are counted for them.
    """
    keys, grads = (defaultdict[tuple[int, int], list[tuple[int, int]]](list) for _ in range(2))
    for rank, found in enumerate(ranks):
        pulls = transfers.key_pulls(found, rank, buffered=buffered, own_in_place=True)
        returned = transfers.gradient_pulls(found, rank, 2)
        for way, listed in ((keys, pulls), (grads, returned)):
            owners = [pull.peer for pull in listed]  # each rank begins with another one, who else would send to all
            assert owners == sorted(owners, key=lambda owner: (owner < rank, owner))
            for pull in listed:
                way[pull.peer, rank].append((pull.peer_row, pull.num_rows))
        rows = [row for pull in pulls for row in range(pull.row, pull.row + pull.num_rows)]
        own = sum(segment.size for segment in found.segments if segment.owner == rank)
        assert len({*rows}) == len(rows) == found.num_rows - own
        rows = [row for pull in returned for row in range(pull.row, pull.row + 2 * pull.num_rows)]
        assert sorted(rows) == [*range(sum(transfers.arriving_rows(found, rank, 2)))]
    for rank, found in enumerate(ranks):
        for way, sends in (
            (keys, transfers.key_sends(found, rank, buffered=buffered)),
            (grads, transfers.gradient_sends(found, rank)),
        ):
            for peer in range(len(ranks)):
                sent = [(send.row, send.num_rows) for send in sends if send.peer == peer]
                assert sent == way.get((rank, peer), []) and not (sent and peer == rank)


@given(SHORT | LONG, st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_blocks_have_every_key_once(problem: Problem, most: int) -> None:
    """Own keys first; the pairs of all blocks are those of one; what a block sends is what others receive with it."""
    mask, cp_size, layout = problem
    others = len(active_distances(mask, cp_size, layout)) - 1
    sizes = (1, *[most] * (others // most), *[others % most] * (others % most > 0))
    ranks = [plan_blocks(mask, cp_size, rank, layout, sizes) for rank in range(cp_size)]
    for rank, (blocks, whole) in enumerate(zip(ranks, of_all(problem), strict=True)):
        assert {segment.owner for segment in blocks[0].segments} == {rank} and blocks[0].num_rows == whole.mask.seqlen_q
        assert all(segment.start == segment.row == segment.owner_row for segment in blocks[0].segments)
        columns = {(segment.owner, segment.start): segment.row for segment in whole.segments}
        found = torch.zeros_like(whole.mask.dense())
        for block in blocks:
            assert block.num_rows <= block.capacity
            assert_kernels_read(block.mask)
            for segment in block.segments:
                first = columns.pop((segment.owner, segment.start))
                found[:, first : first + segment.size] = block.mask.dense()[:, segment.row : segment.row + segment.size]
        assert not columns and torch.equal(found, whole.mask.dense())
    for block in zip(*ranks, strict=True) if len(sizes) > 1 else ():
        pair_up([*block], buffered=True)


@given(SHORT | LONG, st.booleans())
@example((SequenceMask(2048, cu_seqlens=(0, 929, 2048)), 16, "zigzag"), True)  # more arrive at rank 15 than any gathers
@settings(max_examples=40, deadline=None)
def test_no_rank_gathers_into_more_than_was_said(problem: Problem, turns: bool) -> None:
    """The number by which all ranks alike choose to gather by heads; of some documents more return than are sent."""
    chosen = sections.Sections((1, 3), (1, 2, 1))
    ranks, whole = of_all(problem), 0 if turns else sections.MAX_UNBUFFERED_KV_BYTES
    k = torch.empty(1, ranks[0].mask.seqlen_q, 4, 2, dtype=torch.bfloat16)
    said = set()
    for rank, block in enumerate(ranks):
        areas = messages(rank, k)
        with (
            mock.patch.object(sections, "MAX_UNBUFFERED_KV_BYTES", whole),
            mock.patch.object(sections, "choose_sections", lambda *_: chosen),
            mock.patch.object(buffers, "_storage", {}),
        ):
            said.add(sections.gather_bytes(sections.GatherSizes.of([block], k.shape, 4, k.dtype)))
            ways = [gathered_buffers.GatheredKV.of(areas, (block,), k, 4, heads) for heads in chosen]
            gradient_return.GradientReturn.of(ways[1], k)
            assert areas.num_bytes() + buffers.buffer_bytes() - 2 * k.nbytes * turns <= max(said)
    assert len(said) == 1


def test_planning_does_not_compare_all_ranks_with_all() -> None:
    """Packed data bring a new mask with every step: hundreds of function calls for each rank, not for each pair."""
    bounds, num_calls = tuple(range(0, 1 << 24, 1 << 11)), 0

    def count(frame: object, event: str, _: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        found = plan_single_block.__wrapped__(
            SequenceMask(1 << 24, False, (1 << 20, 300), (*bounds, 1 << 24)), 1024, 7, "zigzag"
        )
        plan_single_block.__wrapped__(SequenceMask(1 << 24, False), 1024, 7, "zigzag")
    finally:
        sys.setprofile(None)
    assert num_calls < 400 * 1024 and len(found.segments) < 10
