"""Keys that a rank gathers from the others, for random masks and layouts. CPU, one process."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import accumulate
from types import SimpleNamespace
from typing import cast
from unittest import mock

import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ringflash.attention import gathered_buffers, gradient_return, sections
from ringflash.attention.schedule import Gathering, active_steps, chunks_are_multiples, plan_blocks, plan_gather
from ringflash.comm.transport import NcclGather, PointToPoint, buffers
from ringflash.comm.transport.areas import Incoming, Outgoing
from ringflash.sequence.layout import chunks
from ringflash.sequence.mask import SequenceMask
from tests.helpers import dense
from tests.unit.test_schedule import held, problems, three_zigzags  # noqa: F401, a fixture of every test here

Problem = tuple[SequenceMask, int, str]


@given(problems())
@settings(max_examples=50, deadline=None)
def test_records_are_gathered_whole(problem: Problem) -> None:
    """Every cut of a chunk is at a multiple of the keys of a record, and no visible key is left out."""
    mask, cp_size, layout = problem
    bounds = None if mask.cu_seqlens is None else tuple(16 * bound for bound in mask.cu_seqlens)
    mask = SequenceMask(16 * mask.seqlen, mask.causal, mask.window_size, bounds)
    assume(chunks_are_multiples(mask, cp_size, layout, 16))
    for rank in range(cp_size):
        records, keys = (plan_gather(mask, cp_size, rank, layout, multiple) for multiple in (16, 1))
        places = [place for piece in records.pieces for place in (piece.start, piece.row, piece.size, piece.owner_row)]
        assert not any(place % 16 for place in (*places, records.capacity, records.num_rows))
        assert records.mask.num_visible == keys.mask.num_visible


def of_all(problem: Problem) -> list[Gathering]:
    """Return the gatherings of all ranks."""
    mask, cp_size, layout = problem
    return [plan_gather(mask, cp_size, rank, layout) for rank in range(cp_size)]


SHORT, LONG = problems(), problems(range(1, 4), (63, 64, 127, 130, 200))  # 64ths of a chunk are a row, or some


@given(SHORT | LONG)
@settings(max_examples=200, deadline=None)
def test_every_visible_key_in_order(problem: Problem) -> None:
    """All visible pairs, at the right positions, and no segment of which a rank sees nothing."""
    mask, cp_size, layout = problem
    position = torch.arange(mask.seqlen)
    want = dense.visible(
        position, position, causal=mask.causal, window_size=mask.window_size, cu_seqlens=mask.cu_seqlens
    )
    positions = [held(mask, cp_size, rank, layout) for rank in range(cp_size)]
    ranks = of_all(problem)
    for rank, found in enumerate(ranks):
        piece_keys = [positions[piece.owner][piece.start : piece.start + piece.size] for piece in found.pieces]
        assert [piece.row for piece in found.pieces] == [0, *accumulate(map(len, piece_keys))][:-1]
        assert all(want[positions[rank]][:, keys].any() for keys in piece_keys)
        keys = torch.cat(piece_keys)
        assert (keys[1:] > keys[:-1]).all()
        assert torch.equal(found.mask.dense(), want[positions[rank]][:, keys])
        assert found.mask.num_visible == int(want[positions[rank]].sum())
    assert all(found.capacity == max(other.num_rows for other in ranks) for found in ranks)
    assert mask.num_visible == int(want.sum()) and {found.pairs for found in ranks} == {int(want.sum()) // cp_size}


@given(SHORT | LONG)
@settings(max_examples=100, deadline=None)
def test_readers_are_who_gathers(problem: Problem) -> None:
    mask, cp_size, layout = problem
    ranks = of_all(problem)
    for rank, found in enumerate(ranks):
        assert [row for segment in found.segments for row in range(segment.row, segment.row + segment.size)] == [
            row
            for chunk in chunks(mask.seqlen, cp_size, rank, layout, mask.cu_seqlens)
            for row in range(chunk.row, chunk.row + chunk.size)
        ]
        for segment, readers in zip(found.segments, found.readers, strict=True):
            want = [
                (reader, piece.row)
                for reader, other in enumerate(ranks)
                for piece in other.pieces
                if (piece.owner, piece.start, piece.size) == (rank, segment.row, segment.size)
            ]
            assert list(readers) == want and rank in dict(want)
        assert all(
            piece.owner_row == dict(rows_of(ranks[piece.owner]))[piece.owner, piece.start] for piece in found.pieces
        )
    arriving = [
        sum(segment.size * (len(readers) - 1) for segment, readers in zip(found.segments, found.readers, strict=True))
        for found in ranks
    ]
    assert all(found.returned_rows == max(arriving) for found in ranks)


def rows_of(found: Gathering) -> list[tuple[tuple[int, int], int]]:
    """Rows at which a rank has what it gathers, by owner and first row there."""
    return [((piece.owner, piece.start), piece.row) for piece in found.pieces]


def test_causal_zigzag_gathers_no_later_chunk() -> None:
    ranks = of_all((SequenceMask(64), 4, "zigzag"))
    assert [found.num_rows // 8 for found in ranks] == [8, 7, 6, 5]
    assert [len(readers) for readers in ranks[0].readers] == [4, 1]


def test_a_window_gathers_what_it_sees() -> None:
    """A rank gathers the window of the chunk before its own, to a 64th of a chunk, and few rows more."""
    ranks = of_all((SequenceMask(1 << 16, window_size=(300, 0)), 4, "zigzag"))
    assert [found.num_rows for found in ranks] == [16384 + 384, 16384 + 768, 16384 + 768, 16384 + 384]
    assert all(len(found.mask.regions) <= 2 for found in ranks)
    assert [[len(readers) for readers in found.readers] for found in ranks] == [
        [1, 2, 1],
        [1, 2, 1, 2],
        [1, 2, 1, 2],
        [1, 1, 2],
    ]


@given(SHORT | LONG | problems((16,), (1, 2, 64)), st.booleans())
@settings(max_examples=30, deadline=None)
def test_messages_of_two_ranks_pair_up(problem: Problem, turns: bool) -> None:
    """One rank sends to another in the order in which that one receives: K/V there, gradients home."""
    mask, cp_size, layout = problem
    k, whole = torch.empty(2, mask.seqlen // cp_size, 3, 1), 0 if turns else sections.MAX_UNBUFFERED_KV_BYTES
    with mock.patch.object(sections, "MAX_UNBUFFERED_KV_BYTES", whole), mock.patch.object(buffers, "_storage", {}):
        there = [
            gathered_buffers.GatheredKV(messages(rank, k), (gathering,), k, 3, (1, 2))
            for rank, gathering in enumerate(of_all(problem))
        ]
        home = [gradient_return.GradientReturn(gathered, k) for gathered in there]
    for section in range(2):
        pair_up([way.sends[section] for way in there], [way.pulls[section] for way in there])
        pair_up([way.sends[section] for way in home], [way.pulls[section] for way in home])
        for way in (there, home):
            for rank, part in enumerate(way):
                nearest_first(rank, [pull.rank for pull in part.pulls[section] if pull.rank != rank])


def nearest_first(rank: int, owners: list[int]) -> None:
    """Assert that each rank begins with another owner: all with the same one would share what that one can send."""
    assert owners == sorted(owners, key=lambda owner: (owner < rank, owner))


def messages(rank: int, k: torch.Tensor) -> NcclGather:
    """The areas of a rank that sends nothing."""
    return NcclGather(cast(PointToPoint, SimpleNamespace(name="nccl", rank=rank, group=None, members=())), k.device)


def pair_up(sends: list[list[Outgoing]], pulls: list[list[Incoming]]) -> None:
    """Assert that what ranks send is what the others receive, pair by pair, and not to themselves."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, (outgoing, incoming) in enumerate(zip(sends, pulls, strict=True)):
        for tensor, reader in outgoing:
            sent[rank, reader].append((tensor.is_contiguous(), tensor.shape))
        for target, owner, source in incoming:
            if source is None:
                received[owner, rank].append((target.is_contiguous(), target.shape))
    assert sent == received and all(one != other for one, other in sent)
    assert all(contiguous for messages in (*sent.values(), *received.values()) for contiguous, _ in messages)


@given(SHORT | LONG, st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_blocks_have_every_key_once(problem: Problem, most: int) -> None:
    """Own keys first; the pairs of all blocks are those of one; what a block sends is what others receive with it."""
    mask, cp_size, layout = problem
    others = len(active_steps(mask, cp_size, layout)) - 1
    sizes = (1, *[most] * (others // most), *[others % most] * (others % most > 0))
    ranks = [plan_blocks(mask, cp_size, rank, layout, sizes) for rank in range(cp_size)]
    for rank, (blocks, whole) in enumerate(zip(ranks, of_all(problem), strict=True)):
        assert {piece.owner for piece in blocks[0].pieces} == {rank} and blocks[0].num_rows == whole.mask.seqlen_q
        assert all(piece.start == piece.row == piece.owner_row for piece in blocks[0].pieces)
        columns = {(piece.owner, piece.start): piece.row for piece in whole.pieces}
        found = torch.zeros_like(whole.mask.dense())
        for block in blocks:
            assert block.num_rows <= block.capacity
            for piece in block.pieces:
                first = columns.pop((piece.owner, piece.start))
                found[:, first : first + piece.size] = block.mask.dense()[:, piece.row : piece.row + piece.size]
        assert not columns and torch.equal(found, whole.mask.dense())
    if len(sizes) == 1:
        return
    k = torch.empty(2, mask.seqlen // cp_size, 3, 1)
    with mock.patch.object(buffers, "_storage", {}):
        there = [
            gathered_buffers.GatheredKV(messages(rank, k), blocks, k, 3, (1, 2)) for rank, blocks in enumerate(ranks)
        ]
        home = [gradient_return.GradientReturn(gathered, k) for gathered in there]
    for index, unit in enumerate(there[0].units):
        pair_up([way.sends[index] for way in there], [way.pulls[index] for way in there])
        assert unit.transfer is not None or not any(way.sends[index] or way.pulls[index] for way in there)
    for stage in range(len(there[0].travelling)):
        pair_up([way.sends[stage] for way in home], [way.pulls[stage] for way in home])


@given(SHORT | LONG, st.booleans())
@example((SequenceMask(2048, cu_seqlens=(0, 929, 2048)), 16, "zigzag"), True)  # more come to rank 15 than any gathers
@settings(max_examples=40, deadline=None)
def test_no_rank_gathers_into_more_than_was_said(problem: Problem, turns: bool) -> None:
    """The number by which all ranks alike choose to gather by heads; of some documents more come home than go out."""
    chosen = sections.Sections((1, 3), (1, 2, 1))
    ranks, whole = of_all(problem), 0 if turns else sections.MAX_UNBUFFERED_KV_BYTES
    k = torch.empty(1, ranks[0].mask.seqlen_q, 4, 2, dtype=torch.bfloat16)
    said = set()
    for rank, gathering in enumerate(ranks):
        memory = messages(rank, k)
        with (
            mock.patch.object(sections, "MAX_UNBUFFERED_KV_BYTES", whole),
            mock.patch.object(sections, "choose_sections", lambda *_: chosen),
            mock.patch.object(buffers, "_storage", {}),
        ):
            said.add(
                sections.gather_bytes(k.shape, 4, gathering.capacity, gathering.returned_rows, gathering.pairs, k.dtype)
            )
            ways = [gathered_buffers.GatheredKV(memory, (gathering,), k, 4, heads) for heads in chosen]
            gradient_return.GradientReturn(ways[1], k)
            assert memory.num_bytes() + buffers.buffer_bytes() - 2 * k.nbytes * turns <= max(said)
    assert len(said) == 1


def test_a_thousand_ranks_take_the_host_no_longer_than_a_kernel_or_two() -> None:
    """Packed data bring a new mask with every step: 0.03 s, where comparing all ranks with all took seconds."""
    bounds = tuple(range(0, 1 << 24, 1 << 11))
    begun = time.process_time()
    found = plan_gather.__wrapped__(SequenceMask(1 << 24, False, (1 << 20, 300), (*bounds, 1 << 24)), 1024, 7, "zigzag")
    plan_gather.__wrapped__(SequenceMask(1 << 24, False), 1024, 7, "zigzag")
    assert time.process_time() - begun < 1 and len(found.pieces) < 10
