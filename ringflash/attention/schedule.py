"""Keys that each rank gathers, computed on the host, and the same on every rank.

At distance t round the ring, rank r needs the K/V of rank (r - t) mod cp_size, and rank (r + t) mod cp_size needs the
K/V of rank r. Below are four ranks under a causal mask in the zigzag layout. A column is a distance; a cell has the
rank's chunks of queries that see keys, the owner of the keys, and the chunks of keys that are seen. From distance 1 on,
every cell has the same number of query-key pairs, half of those of two chunks of queries and two of keys:

    distance 0      distance 1           distance 2           distance 3
    r0  q0 q7|k0 k7   q7    | r3: k3 k4    q7    | r2: k2 k5    q7    | r1: k1 k6
    r1  q1 q6|k1 k6   q1 q6 | r0: k0       q6    | r3: k3 k4    q6    | r2: k2 k5
    r2  q2 q5|k2 k5   q2 q5 | r1: k1       q2 q5 | r0: k0       q5    | r3: k3 k4
    r3  q3 q4|k3 k4   q3 q4 | r2: k2       q3 q4 | r1: k1       q3 q4 | r0: k0

If a rank sees no key of another one under the mask, nothing is sent or computed for this pair.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from ringflash.attention.shard_masks import mask_between
from ringflash.sequence.layout import DOCUMENT_LAYOUTS, Chunk, chunks
from ringflash.sequence.mask import SequenceMask
from ringflash.sequence.paths import MASKS_KEPT
from ringflash_kernels.mask import Mask


@lru_cache(MASKS_KEPT)
def plan_own_keys(mask: SequenceMask, layout: str) -> Mask:
    """Return the visible pairs of a single process, which holds all rows and keys."""
    (own,) = _shards(mask, 1, layout)
    return mask_between(mask, own, own, mask.seqlen, mask.seqlen)


@lru_cache(maxsize=64)
def active_distances(mask: SequenceMask, cp_size: int, layout: str) -> tuple[int, ...]:
    """Return the distances at which any rank sees a key, ascending; 0 is always one of them."""
    shards = _shards(mask, cp_size, layout)
    owned = sorted((chunk, rank) for rank, shard in enumerate(shards) for chunk in shard)
    starts = [chunk.start for chunk, _ in owned]
    active: set[int] = set()
    for chunk, rank in reversed(owned):  # under a causal mask the last chunk sees keys at all distances
        for first, stop in mask.visible_ranges(chunk.start, chunk.stop):
            for _, owner in owned[bisect_right(starts, first) - 1 : bisect_left(starts, stop)]:
                active.add((rank - owner) % cp_size)
        if len(active) == cp_size:
            break
    return tuple(sorted(active))


@lru_cache(maxsize=64)
def chunks_are_multiples(mask: SequenceMask, cp_size: int, layout: str, multiple: int) -> bool:
    """Return True if every chunk of every rank begins and ends at a position that is a multiple of `multiple`."""
    return not any(bound % multiple for shard in _shards(mask, cp_size, layout) for chunk in shard for bound in chunk)


class Segment(NamedTuple):
    """Keys that a rank gathers together or not at all: rows [start, start + size) of the owner's shard.

    Args:
        owner: rank whose keys they are.
        start: their first row in the owner's shard.
        row: their first row among the keys that the reading rank gathers.
        owner_row: their first row among the keys that the owner itself gathers.
    """

    owner: int
    start: int
    row: int
    size: int
    owner_row: int


class Reader(NamedTuple):
    """A rank that gathers a segment, and the first row at which it does."""

    rank: int
    row: int


class SeenKeys:
    """Positions of keys that a rank sees: disjoint ranges [first, stop), ascending."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self.firsts, self.stops = [first for first, _ in ranges], [stop for _, stop in ranges]
        self._before = [0, *accumulate(stop - first for first, stop in ranges)]

    def __contains__(self, position: int) -> bool:
        index = bisect_right(self.firsts, position) - 1
        return index >= 0 and position < self.stops[index]

    def row(self, position: int) -> int:
        """Return the number of these keys before a position: the row at which the position is gathered."""
        index = bisect_right(self.firsts, position) - 1
        return 0 if index < 0 else self._before[index] + min(position, self.stops[index]) - self.firsts[index]

    @property
    def num_rows(self) -> int:
        return self._before[-1]


@dataclass(frozen=True)
class KeyBlock:
    """Keys that one rank gathers from the owners at some distances round the ring, in the order of their positions.

    A single block has the keys of all owners. If a call is cut into several, the first has the rank's own keys only.

    Args:
        segments: the keys of the block. Chunks are cut into segments so that a rank needs all of one or none.
        mask: visible pairs of local query rows and gathered rows.
        own_segments: segments of this rank's own shard, as its rows.
        readers: ranks that gather each of these segments with this block, by rank.
        capacity: upper bound on the rows that any rank gathers in this block. All ranks compute the same value and size
            their buffers by it.
        returned_rows: upper bound on the rows of gradients that any rank receives for this block, also the same on all.
        pairs: visible pairs of the whole sequence, divided by the number of ranks.
    """

    segments: tuple[Segment, ...]
    mask: Mask
    own_segments: tuple[Chunk, ...]
    readers: tuple[tuple[Reader, ...], ...]
    capacity: int
    returned_rows: int
    pairs: int

    @property
    def num_rows(self) -> int:
        """Rows that this rank gathers."""
        return self.mask.seqlen_k


@lru_cache(MASKS_KEPT)
def plan_single_block(mask: SequenceMask, cp_size: int, cp_rank: int, layout: str, multiple: int = 1) -> KeyBlock:
    """Find the keys that one rank gathers, its own and those of other ranks, as one block.

    Args:
        multiple: segments begin and end at multiples of it: 128 for records in FP8, which hold 128 keys, otherwise 1.
    Raises:
        ValueError: the layout cannot divide the sequence evenly.
    """
    shards = _shards(mask, cp_size, layout)
    seen = [_visible_keys(mask, shard, layout, multiple) for shard in shards]
    segments = list(_segments(shards, seen))
    limits = max(keys.num_rows for keys in seen), _max_returned_rows(segments, seen)
    return _key_block(mask, shards, cp_rank, segments, dict(enumerate(seen)), *limits, whole=True)


@lru_cache(MASKS_KEPT)
def plan_blocks(
    mask: SequenceMask, cp_size: int, cp_rank: int, layout: str, sizes: tuple[int, ...], multiple: int = 1
) -> tuple[KeyBlock, ...]:
    """Cut the keys that one rank gathers into blocks: first its own keys, then keys of increasingly distant owners.

    A block covers the same ring distances on every rank, so all ranks send and receive at the same time.

    Args:
        sizes: number of distances of each block, in the order of `active_distances`; the first of several blocks has
            one.
        multiple: as `plan_single_block`.
    """
    if len(sizes) == 1:
        return (plan_single_block(mask, cp_size, cp_rank, layout, multiple),)
    active = active_distances(mask, cp_size, layout)
    assert sizes[0] == 1 and sum(sizes) == len(active)
    shards, whole = _shards(mask, cp_size, layout), plan_single_block(mask, cp_size, cp_rank, layout, multiple)
    seen = [_visible_keys(mask, shard, layout, multiple) for shard in shards]
    segments = list(_segments(shards, seen))
    owned: list[list[Chunk]] = [[] for _ in shards]
    for owner, segment in segments:
        owned[owner].append(segment)
    blocks, ends = [], [0, *accumulate(sizes)]
    for distances in (active[first:stop] for first, stop in pairwise(ends)):
        of_block = {}
        for rank in sorted({cp_rank, *((cp_rank + distance) % cp_size for distance in distances)}):
            keys = sorted(chunk for distance in distances for chunk in owned[(rank - distance) % cp_size])
            of_block[rank] = SeenKeys([(chunk.start, chunk.stop) for chunk in keys if chunk.start in seen[rank]])
        rows = len(distances) * mask.seqlen // cp_size
        limits = min(rows, whole.capacity), min(rows, whole.returned_rows)
        blocks.append(_key_block(mask, shards, cp_rank, segments, of_block, *limits))
    return tuple(blocks)


def _key_block(
    mask: SequenceMask,
    shards: list[tuple[Chunk, ...]],
    cp_rank: int,
    segments: list[tuple[int, Chunk]],
    seen: dict[int, SeenKeys],
    capacity: int,
    returned_rows: int,
    *,
    whole: bool = False,
) -> KeyBlock:
    """Return one block of keys of one rank.

    Args:
        seen: by rank, ascending: keys of the block that the rank sees, for this rank and the readers of its keys.
        whole: this is the only block of the call.
    """
    gathered, positions, mine = [], [], seen[cp_rank]
    for owner, segment in segments:
        if segment.start in mine:
            row = mine.row(segment.start)
            owner_row = seen[owner].row(segment.start) if whole else segment.row
            gathered.append(Segment(owner, segment.row, row, segment.size, owner_row))
            positions.append(Chunk(segment.start, segment.stop, row))
    rows, keys = tuple(_joined_chunks(shards[cp_rank])), tuple(_joined_chunks(positions))
    visible = mask_between(mask, rows, keys, mask.seqlen // len(shards), mine.num_rows)
    own = tuple(segment for owner, segment in segments if owner == cp_rank)
    readers = tuple(
        tuple(Reader(rank, keys.row(segment.start)) for rank, keys in seen.items() if segment.start in keys)
        for segment in own
    )
    pairs = mask.num_visible // len(shards)
    return KeyBlock(tuple(gathered), visible, own, readers, capacity, returned_rows, pairs)


def _visible_keys(mask: SequenceMask, shard: tuple[Chunk, ...], layout: str, multiple: int) -> SeenKeys:
    """Return the keys that a shard sees, in multiples of `multiple`, and of a 64th of a chunk if chunks are equal."""
    size = shard[0].size
    # Bounds of documents would otherwise make many segments of a few rows, each of which is a separate copy.
    grain = 1 if layout in DOCUMENT_LAYOUTS else max(1, size // 64)
    grain -= grain % 16 if grain > 16 else 0  # kernels are compiled for lengths divisible by 16 and others
    grain = -(-grain // multiple) * multiple
    ranges: list[tuple[int, int]] = []
    found = [seen for chunk in shard for seen in mask.visible_ranges(chunk.start, chunk.stop)]
    for first, stop in sorted(found):
        begin, end = first // size * size, (stop - 1) // size * size  # starts of the outermost chunks of keys
        first = begin + (first - begin) // grain * grain
        stop = min(end - (end - stop) // grain * grain, end + size)
        if ranges and first <= ranges[-1][1]:
            first, stop = ranges[-1][0], max(ranges.pop()[1], stop)
        ranges.append((first, stop))
    return SeenKeys(ranges)


def _segments(shards: list[tuple[Chunk, ...]], seen: list[SeenKeys]) -> Iterator[tuple[int, Chunk]]:
    """Yield (owner, segment) by position: all chunks, cut at positions where a rank's visible keys start or end."""
    cuts = sorted({position for keys in seen for position in (*keys.firsts, *keys.stops)})
    owned = sorted((chunk.start, rank, chunk) for rank, shard in enumerate(shards) for chunk in shard)
    for _, owner, chunk in owned:
        inside = cuts[bisect_right(cuts, chunk.start) : bisect_left(cuts, chunk.stop)]
        for start, stop in pairwise((chunk.start, *inside, chunk.stop)):
            yield owner, Chunk(start, stop, chunk.row + start - chunk.start)


def _max_returned_rows(segments: list[tuple[int, Chunk]], seen: list[SeenKeys]) -> int:
    """Return the largest number of gradient rows that any rank receives."""
    firsts = sorted(first for keys in seen for first in keys.firsts)
    stops = sorted(stop for keys in seen for stop in keys.stops)
    rows = [0] * len(seen)
    for owner, segment in segments:
        readers = bisect_right(firsts, segment.start) - bisect_right(stops, segment.start)
        rows[owner] += (readers - 1) * segment.size
    return max(rows)


def _joined_chunks(found: Iterable[Chunk]) -> list[Chunk]:
    """Join chunks with consecutive positions."""
    joined: list[Chunk] = []
    for chunk in found:
        if joined and joined[-1].stop == chunk.start:
            joined[-1] = joined[-1]._replace(stop=chunk.stop)
        else:
            joined.append(chunk)
    return joined


def _shards(mask: SequenceMask, cp_size: int, layout: str) -> list[tuple[Chunk, ...]]:
    return [chunks(mask.seqlen, cp_size, rank, layout, mask.documents) for rank in range(cp_size)]
