"""Distribution of packed documents over the ranks: each on few ranks, with equal tokens and equal causal work.

Documents are ordered by length, longest first. The work of a token is half of its document's length on average, so
work per token decreases in this order. Rank r takes consecutive tokens from each end of what the previous ranks have
left: together seqlen / cp_size tokens, and 1 / cp_size of the work. Four ranks:

    longest document                                                    shortest
    |aaaaaaaaaaaaaaaaaaaaaa|bbbbbbbbbbbb|ccccccccc|dddddd|eeee|fff|ggg|hh|ii|jj|
    |--- r0 ---|--- r1 ---|----- r2 ----|---- r3 ------|-- r2 ---|- r1 -|- r0 -|

Most documents are whole on one rank. A document that a cut divides is shared in mirrored pairs, as zigzag does for a
whole sequence: a rank takes a chunk near its start and one near its end, with the document's mean work per token.

Documents that continue others are ordered by their work per token, which counts the tokens before them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.sequence.mask import Documents
from ringflash.sequence.paths import MASKS_KEPT, paths_of, tree_ends

# A cut is moved to a document's bound if the work of ranks 0 to r then differs by at most 1/100 of one rank's work.
_TOLERANCE = 100
_TREES_OF_RANK = 16  # a tree of at most 1/16 of a rank's tokens is placed as one unit
_FLAT_OF_RANK = 64  # a bidirectional document of more than 1/64 of a rank's tokens is a unit of its own
_TILE_TOKENS = 256  # one tile of a kernel for each chunk of a pair: segments are multiples of it if work allows


class BalancedChunks(NamedTuple):
    """Chunks of all ranks, (num_chunks,) int64 each, by rank and then by position; adjacent ones are joined."""

    rank: Tensor
    start: Tensor
    size: Tensor


@lru_cache(MASKS_KEPT)
def balanced_chunks(documents: Documents, cp_size: int) -> BalancedChunks:
    """Distribute documents over ranks, the same on every rank.

    Args:
        documents: their bounds from 0 to the length of the sequence, which must be divisible by cp_size.
    """
    starts, lengths, work = _units(documents, cp_size)
    order = torch.argsort(work.double() / lengths, descending=True, stable=True)
    starts, lengths, work = starts[order], lengths[order], work[order]
    ends, cuts = lengths.cumsum(0), torch.tensor(_Order(lengths, work).cut(cp_size), device="cpu")
    edges = torch.cat([cuts, ends]).sort().values.unique_consecutive()
    segments = edges.diff()  # each segment belongs to one document and to one rank
    document = torch.searchsorted(ends, edges[:-1], right=True)
    turn = torch.searchsorted(cuts, edges[:-1], right=True) - 1
    rank = torch.minimum(turn, 2 * cp_size - 2 - turn)
    whole = segments == lengths[document]
    chunks = [torch.stack([rank[whole], starts[document[whole]], segments[whole]], 1)]
    divided = list(zip(*(x[~whole].tolist() for x in (document, rank, segments)), strict=True))
    if divided:
        chunks.append(torch.tensor(list(_mirrored(divided, starts.tolist())), device="cpu"))
    return _joined(torch.cat(chunks), documents.bounds[-1])


def _units(documents: Documents, cp_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return start, length and work of the units, which are placed whole if possible: documents, chains, small trees.

    Work is twice the number of visible pairs. A small tree is one unit, since most of its documents see the same keys.
    A document and its only continuation are one unit, unless one of them is bidirectional and long, since the work of
    its tokens does not grow.
    """
    bounds = torch.tensor(documents.bounds, device="cpu")
    starts, lengths = bounds[:-1], bounds.diff()
    shifts = paths_of(documents.bounds, documents.parents).shifts
    before = starts - torch.tensor(shifts, device="cpu")  # number of tokens of the documents that each one continues
    per_token = lengths + 1 + 2 * before
    if documents.bidirectional is not None:
        per_token += torch.tensor(documents.bidirectional, device="cpu") * (lengths - 1)
    work = lengths * per_token
    if documents.parents is None:
        return starts, lengths, work
    ends = tree_ends(documents.bounds, documents.parents)
    of_rank = documents.bounds[-1] // cp_size
    both = documents.bidirectional or (False,) * len(ends)
    flat = (torch.tensor(both, device="cpu") & (lengths > of_rank // _FLAT_OF_RANK)).tolist()
    limit, first, firsts = of_rank // _TREES_OF_RANK, 0, []
    for index, end in enumerate(ends):
        if documents.bounds[index] >= first:
            follows = index > 0 and documents.parents[index] == index - 1 and end == ends[index - 1]
            if not follows or flat[index] or flat[index - 1]:
                firsts.append(index)
            small = end - documents.bounds[index] <= limit
            first = end if small else documents.bounds[index + 1]
    heads = torch.tensor(firsts, device="cpu")
    unit = torch.bucketize(torch.arange(len(ends), device="cpu"), heads, right=True) - 1
    lengths, work = (torch.zeros_like(heads).index_add_(0, unit, x) for x in (lengths, work))
    return starts[heads], lengths, work


class _Order:
    """Documents in order of their work per token, with the work of any consecutive tokens in this order.

    Args:
        lengths: (num_documents,), int64.
        work: (num_documents,), int64, twice the visible pairs of each document.
    """

    def __init__(self, lengths: Tensor, work: Tensor) -> None:
        self.starts = [0, *lengths.cumsum(0).tolist()]
        self._before = [0, *work.cumsum(0).tolist()]

    def work(self, position: int) -> int:
        """Return twice the number of visible pairs of the tokens before a position."""
        document = bisect_right(self.starts, position) - 1
        rest = position - self.starts[document]
        if not rest:
            return self._before[document]
        whole = self._before[document + 1] - self._before[document]
        return self._before[document] + whole * rest // (self.starts[document + 1] - self.starts[document])

    def cut(self, cp_size: int) -> list[int]:
        """Cut the order into 2 * cp_size - 1 sequences of tokens, of ranks 0, 1, ..., cp_size - 1, ..., 1, 0."""
        size, total = self.starts[-1] // cp_size, self.work(self.starts[-1])
        front, back, done = [0], [self.starts[-1]], 0
        for rank in range(1, cp_size):
            first, last = front[-1], back[-1] - size
            base = done - self.work(first) + self.work(back[-1]) - total * rank // cp_size
            cut, excess = self._cut_front(first, size, base, last - first, total // cp_size // _TOLERANCE)
            front.append(cut)
            back.append(last + cut - first)
            done = total * rank // cp_size + excess
        return [*front, *reversed(back)]

    def _cut_front(self, first: int, size: int, base: int, shift: int, slack: int) -> tuple[int, int]:
        """Find the end of a rank's tokens from the front; its remaining tokens are taken from the back.

        Returns:
            cut: in [first, first + size].
            excess: the work up to this rank beyond its share; at most `slack` if possible.
        """

        def excess(cut: int) -> int:
            return base + self.work(cut) - self.work(shift + cut)

        low, high = first, first + size + 1  # tokens from the front have more work
        while high - low > 1:
            cut = (low + high) // 2
            surplus = excess(cut)
            low, high = (low, cut) if surplus > 0 else (cut, high)
            if -slack < 4 * surplus <= 0:
                break
        document = bisect_right(self.starts, low) - 1
        start, stop = self.starts[document], self.starts[min(document + 1, len(self.starts) - 1)]
        tile = start + round((low - start) / _TILE_TOKENS) * _TILE_TOKENS
        for cut in (stop, start, tile):
            if first <= cut <= min(stop, first + size) and abs(surplus := excess(cut)) <= slack:
                return cut, surplus
        return low, excess(low)


def _mirrored(segments: list[tuple[int, int, int]], starts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, start, size) of the chunks of divided documents.

    Args:
        segments: document, rank and number of tokens of each segment, by document.
    """
    shares: dict[int, dict[int, int]] = {}
    for document, rank, size in segments:
        ranks = shares.setdefault(document, {})
        ranks[rank] = ranks.get(rank, 0) + size
    for document, ranks in shares.items():
        first, last = starts[document], starts[document] + sum(ranks.values())
        for rank, size in sorted(ranks.items(), key=lambda item: (-item[1], item[0])):  # the outermost sees most keys
            grain = min(_TILE_TOKENS // 2, 1 << max(0, size.bit_length() - 9))  # at most a 256th of the segment
            head = size // 2 // grain * grain
            yield rank, first, head
            yield rank, last - (size - head), size - head
            first, last = first + head, last - (size - head)


def _joined(chunks: Tensor, seqlen: int) -> BalancedChunks:
    """Sort chunks, and join adjacent chunks of one rank."""
    chunks = chunks[chunks[:, 2] > 0]
    rank, start, size = chunks[torch.argsort(chunks[:, 0] * seqlen + chunks[:, 1])].unbind(1)
    begins = torch.ones_like(rank, dtype=torch.bool)
    begins[1:] = (rank[1:] != rank[:-1]) | (start[1:] != start[:-1] + size[:-1])
    group = begins.cumsum(0) - 1
    joined = size.new_zeros(int(begins.sum())).index_add_(0, group, size)
    return BalancedChunks(rank[begins], start[begins], joined)
