"""Visible pairs of the queries of one shard and the keys of another, in local rows, computed on the host."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import repeat

import numpy as np

from ringflash.sequence.layout import Chunk
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.mask import Mask, Region


def mask_between(
    mask: SequenceMask, q_shard: tuple[Chunk, ...], k_shard: tuple[Chunk, ...], num_rows: int, num_keys: int
) -> Mask:
    """Return the visible pairs of two shards, in local rows."""
    local = Mask.of(num_rows, num_keys, joined_regions(mask, q_shard, k_shard))
    # Documents that SequenceMask has checked give valid masks for all shards: `Mask.is_two_sided` need not count pairs.
    local.cached("proven", lambda: True)
    if mask.has_columns and len(local.regions) > 1:
        local.cached("transposed", lambda: _transposed(mask, q_shard, k_shard, num_rows, num_keys))
    return local


def joined_regions(mask: SequenceMask, q_shard: tuple[Chunk, ...], k_shard: tuple[Chunk, ...]) -> tuple[Region, ...]:
    """Regions of two shards, joined into fewer and larger ones if possible."""
    lower, upper = mask.band
    plain = mask.documents is None or mask.documents.is_plain
    if q_shard == k_shard and lower is None and upper in (None, 0) and plain:
        return tuple(_own_documents(mask, q_shard, upper))
    regions = sorted(visible_regions(mask, q_shard, k_shard))
    return tuple(_joined(regions))


def visible_regions(mask: SequenceMask, q_shard: tuple[Chunk, ...], k_shard: tuple[Chunk, ...]) -> Iterator[Region]:
    """Yield the non-empty regions of two shards, in local rows: one per pair of chunks and run of a path."""
    starts = [chunk.start for chunk in k_shard]
    for q in q_shard:
        for document in range(mask.document_of(q.start), mask.document_of(q.stop - 1) + 1):
            for seen in mask.regions_of(document, q.start, q.stop):
                first = max(0, bisect_right(starts, seen.k_start) - 1)
                for k in k_shard[first : bisect_left(starts, seen.k_stop)]:
                    trimmed = _cut_to_chunks(seen, q, k).trimmed()
                    if trimmed is not None:
                        yield trimmed


def _own_documents(mask: SequenceMask, shard: tuple[Chunk, ...], upper: int | None) -> Iterator[Region]:
    """Yield the regions of a rank's own K/V without a left window: each document is one square of rows.

    Positions rise with the rows, so the rows of a document are consecutive.
    """
    start: dict[int, int] = {}
    stop: dict[int, int] = {}
    for chunk in shard:
        for document in range(mask.document_of(chunk.start), mask.document_of(chunk.stop - 1) + 1):
            first = max(mask.bounds[document], chunk.start) - chunk.start + chunk.row
            start.setdefault(document, first)
            stop[document] = min(mask.bounds[document + 1], chunk.stop) - chunk.start + chunk.row
    return (Region(start[d], stop[d], start[d], stop[d], None, upper) for d in start)


def _joined(regions: list[Region]) -> list[Region]:
    """Join neighbouring regions that one band can describe."""
    joined: list[Region] = []
    for region in regions:
        union = _union(joined[-1], region) if joined else None
        if union is None:
            joined.append(region)
        else:
            joined[-1] = union
    return joined


def _union(a: Region, b: Region) -> Region | None:
    """Union of a and b if it is a region: both are unmasked and share a side, or a is unmasked next to a diagonal."""
    if (a.lower, a.upper, b.lower) != (None, None, None):
        return None
    if a[:2] == b[:2] and a.k_stop == b.k_start and (b.upper is None or a.k_stop - 1 - a.q_start <= b.upper):
        return Region(a.q_start, a.q_stop, a.k_start, b.k_stop, None, b.upper)
    if a[2:4] == b[2:4] and a.q_stop == b.q_start and b.upper is None:
        return Region(a.q_start, b.q_stop, a.k_start, a.k_stop)
    return None


def _cut_to_chunks(seen: Region, q: Chunk, k: Chunk) -> Region:
    """Return the part of a region that is in two chunks, in local rows."""
    shift = (k.row - k.start) - (q.row - q.start)  # turns a difference of positions into one of local rows
    return Region(
        max(seen.q_start, q.start) - q.start + q.row,
        min(seen.q_stop, q.stop) - q.start + q.row,
        max(seen.k_start, k.start) - k.start + k.row,
        min(seen.k_stop, k.stop) - k.start + k.row,
        None if seen.lower is None else seen.lower + shift,
        None if seen.upper is None else seen.upper + shift,
    )


def _transposed(
    mask: SequenceMask, q_shard: tuple[Chunk, ...], k_shard: tuple[Chunk, ...], num_rows: int, num_keys: int
) -> Mask:
    """Return the transposed mask of `visible_regions`.

    A run of keys is the part of one chunk in one document. It has one region for each chunk of queries that sees it in
    part, and one region for all later queries. The latter are joined if neighbouring runs have the same queries.
    """
    bounds, q, k = np.asarray(mask.bounds), np.asarray(q_shard), np.asarray(k_shard)
    chunk, document = _expand(np.searchsorted(bounds, k[:, 0], "right") - 1, np.searchsorted(bounds, k[:, 1]))
    start, stop = np.maximum(bounds[document], k[chunk, 0]), np.minimum(bounds[document + 1], k[chunk, 1])
    two_way = np.asarray(mask.bidirectional or (False,) * (len(bounds) - 1))[document]
    # Queries [first, end) see each run of keys.
    first, end = np.where(two_way, bounds[document], start), np.asarray(mask.tree_ends)[document]
    low, high = np.searchsorted(q[:, 1], first, "right"), np.searchsorted(q[:, 0], end)
    middle = np.where(two_way, low, np.clip(np.searchsorted(q[:, 0], stop - 1), low, np.maximum(low, high)))
    q_shift, k_shift = q[:, 2] - q[:, 0], (k[:, 2] - k[:, 0])[chunk]  # from positions to rows
    # Sides of each region: k_start, k_stop, q_start, q_stop, band. First a region for each query chunk [low, middle).
    run, reader = _expand(low, np.minimum(middle, high))
    seen_from, seen_to = np.maximum(first[run], q[reader, 0]), np.minimum(end[run], q[reader, 1])
    last = np.minimum(stop[run], seen_to)
    bands = np.where(seen_from >= last - 1, None, q_shift[reader] - k_shift[run])
    near = start[run] + k_shift[run], last + k_shift[run], seen_from + q_shift[reader], seen_to + q_shift[reader], bands
    # Then one region for query chunks [middle, high), since rows of a shard ascend with their positions.
    run = np.flatnonzero(middle < high)
    after, until = middle[run], high[run] - 1
    far = [
        start[run] + k_shift[run],
        stop[run] + k_shift[run],
        np.maximum(first[run], q[after, 0]) + q_shift[after],
        np.minimum(end[run], q[until, 1]) + q_shift[until],
    ]
    begins = np.ones(len(run), dtype=bool)
    begins[1:] = (far[0][1:] != far[1][:-1]) | (far[2][1:] != far[2][:-1]) | (far[3][1:] != far[3][:-1])
    ends = np.append(begins[1:], True)[: len(run)]
    far = [far[0][begins], far[1][ends], far[2][begins], far[3][begins], np.full(begins.sum(), None)]
    sides = [np.concatenate(pair) for pair in zip(near, far, strict=True)]
    order = np.lexsort((sides[2], sides[0]))
    columns = *(x[order].tolist() for x in sides), repeat(None)
    return Mask(num_keys, num_rows, tuple(map(Region, *columns)))


def _expand(first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the ranges [first, stop); return the index of the range of each number, and the numbers."""
    counts = np.maximum(stop - first, 0)
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - (np.cumsum(counts) - counts)[index] + first[index]
