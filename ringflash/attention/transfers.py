"""Transfers of an all-gather by heads, as rows of each rank's memory: pure functions of a block of keys and a rank.

    K/V        owner -> reader   from the owner's area into the reader's area or buffer
    gradients  reader -> owner   from the reader's buffer into the owner's received rows

The rows are the same for every section of heads. For any two ranks, the sender's and the receiver's list have the same
order, because messages are matched by their order.
"""

from __future__ import annotations

from typing import NamedTuple

from ringflash.attention.schedule import KeyBlock, Segment


class Pull(NamedTuple):
    """Rows [row, row + num_rows) of this rank's memory, which it receives from the peer's rows from peer_row on."""

    peer: int
    row: int
    peer_row: int
    num_rows: int


class Send(NamedTuple):
    """Rows [row, row + num_rows) of this rank's memory, which it sends to a peer."""

    peer: int
    row: int
    num_rows: int


def nearest_first(peer: int, rank: int) -> tuple[bool, bool, int]:
    """Return the sort key of a peer: ranks after this one first, then ranks 0, 1, ..., and this one last.

    Ranks must not all read from rank 0 first. A rank's own rows are last, since their copies need SMs.
    """
    return peer <= rank, peer == rank, peer


def area_row(segment: Segment, buffered: bool) -> int:
    """Return the first row of a segment in its owner's area.

    Args:
        buffered: areas hold the shard of their rank only, in its order. Otherwise keys are gathered in the area.
    """
    return segment.start if buffered else segment.owner_row


def key_pulls(block: KeyBlock, rank: int, *, buffered: bool, own_in_place: bool) -> list[Pull]:
    """List the K/V that arrive for a block of keys, in the order of the pulls.

    Args:
        buffered: as `area_row`.
        own_in_place: kernels read this rank's own keys where it published them.
    """
    segments = [segment for segment in block.segments if segment.owner != rank or not own_in_place]
    segments.sort(key=lambda segment: nearest_first(segment.owner, rank))
    return [Pull(segment.owner, segment.row, area_row(segment, buffered), segment.size) for segment in segments]


def key_sends(block: KeyBlock, rank: int, *, buffered: bool) -> list[Send]:
    """List the K/V of this rank that others receive with a block of keys."""
    sends = []
    for segment, readers in zip(block.own_segments, block.readers, strict=True):
        first = segment.row if buffered else dict(readers)[rank]
        sends += [Send(reader.rank, first, segment.size) for reader in readers if reader.rank != rank]
    return sends


def owner_ranks(block: KeyBlock, rank: int) -> list[int]:
    """List the other ranks whose keys this rank gathers."""
    return sorted({segment.owner for segment in block.segments} - {rank})


def reader_ranks(block: KeyBlock, rank: int) -> list[int]:
    """List the other ranks that gather keys of this rank with a block."""
    return sorted({reader.rank for of_segment in block.readers for reader in of_segment} - {rank})


def arriving_rows(block: KeyBlock, rank: int, batch: int) -> list[int]:
    """Return the rows of gradients that arrive for each segment of this rank, from all readers and for the batch."""
    return [
        batch * segment.size * sum(reader.rank != rank for reader in readers)
        for segment, readers in zip(block.own_segments, block.readers, strict=True)
    ]


def gradient_pulls(block: KeyBlock, rank: int, batch: int) -> list[Pull]:
    """List the gradients of this rank's keys that arrive from readers, in the order of the pulls.

    Received rows are stored by segment, reader and sequence of the batch. A pull's `row` is that of the first sequence;
    its `peer_row` is a row of the buffer of each sequence.
    """
    pulls, row = [], 0
    for segment, readers in zip(block.own_segments, block.readers, strict=True):
        for reader in readers:
            if reader.rank != rank:
                pulls.append(Pull(reader.rank, row, reader.row, segment.size))
                row += batch * segment.size
    return sorted(pulls, key=lambda pull: nearest_first(pull.peer, rank))


def gradient_sends(block: KeyBlock, rank: int) -> list[Send]:
    """List the gradients that other owners receive from this rank."""
    return [Send(segment.owner, segment.row, segment.size) for segment in block.segments if segment.owner != rank]
