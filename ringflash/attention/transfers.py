"""Transfers of an all-gather by heads, as rows of each rank's memory: pure functions of a block of keys and a rank.

    K/V        owner -> reader   from the owner's area into the reader's area or buffer
    gradients  reader -> owner   from the reader's buffer into the owner's received rows

All sections of heads have the same rows. Two ranks list what passes between them in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

from ringflash.attention.schedule import Gathering, Segment


class Pull(NamedTuple):
    """Rows that this rank receives: [here, here + size) of its memory, from [there, there + size) of the peer's."""

    peer: int
    here: int
    there: int
    size: int


class Send(NamedTuple):
    """Rows [here, here + size) of this rank's memory, which it sends to a peer."""

    peer: int
    here: int
    size: int


def nearest_first(peer: int, rank: int) -> tuple[bool, bool, int]:
    """Return the sort key of a peer: from the next rank round to this one. Ranks must not all read from rank 0 first.

    A rank's own rows are last, since their copies need SMs.
    """
    return peer <= rank, peer == rank, peer


def area_row(segment: Segment, buffered: bool) -> int:
    """Return the first row of a segment in its owner's area.

    Args:
        buffered: areas hold the shard of their rank only, in its order. Otherwise keys are gathered in the area.
    """
    return segment.start if buffered else segment.owner_row


def key_pulls(keys: Gathering, rank: int, *, buffered: bool, own_in_place: bool) -> list[Pull]:
    """List the K/V that arrive for a block of keys, in the order of the pulls.

    Args:
        buffered: as `area_row`.
        own_in_place: kernels read this rank's own keys where it published them.
    """
    segments = [segment for segment in keys.segments if segment.owner != rank or not own_in_place]
    segments.sort(key=lambda segment: nearest_first(segment.owner, rank))
    return [Pull(segment.owner, segment.row, area_row(segment, buffered), segment.size) for segment in segments]


def key_sends(keys: Gathering, rank: int, *, buffered: bool) -> list[Send]:
    """List the K/V of this rank that others receive with a block of keys."""
    sends = []
    for segment, readers in zip(keys.own_segments, keys.readers, strict=True):
        first = segment.row if buffered else dict(readers)[rank]
        sends += [Send(reader.rank, first, segment.size) for reader in readers if reader.rank != rank]
    return sends


def owners(keys: Gathering, rank: int) -> list[int]:
    """List the other ranks whose keys this rank gathers."""
    return sorted({segment.owner for segment in keys.segments} - {rank})


def readers(keys: Gathering, rank: int) -> list[int]:
    """List the other ranks that gather keys of this rank with a block."""
    return sorted({reader.rank for row in keys.readers for reader in row} - {rank})


def arriving_rows(keys: Gathering, rank: int, batch: int) -> list[int]:
    """Return the rows of gradients that arrive for each segment of this rank, from all readers and for the batch."""
    return [
        batch * segment.size * sum(reader.rank != rank for reader in row)
        for segment, row in zip(keys.own_segments, keys.readers, strict=True)
    ]


def gradient_pulls(keys: Gathering, rank: int, batch: int) -> list[Pull]:
    """List the gradients of this rank's keys that arrive from readers, in the order of the pulls.

    Received rows are stored by segment, reader and sequence of the batch; `here` is the row of the first sequence, and
    `there` a row of the buffer of each sequence.
    """
    pulls, here = [], 0
    for segment, row in zip(keys.own_segments, keys.readers, strict=True):
        for reader in row:
            if reader.rank != rank:
                pulls.append(Pull(reader.rank, here, reader.row, segment.size))
                here += batch * segment.size
    return sorted(pulls, key=lambda pull: nearest_first(pull.peer, rank))


def gradient_sends(keys: Gathering, rank: int) -> list[Send]:
    """List the gradients that other owners receive from this rank."""
    return [Send(segment.owner, segment.row, segment.size) for segment in keys.segments if segment.owner != rank]
