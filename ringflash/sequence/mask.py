"""Mask in global coordinates: which keys of the whole sequence each query sees.

Documents form trees. A document may *continue* an earlier one, its parent: its queries then also see the keys of the
parent and of the parent's ancestors. Documents without parents do not see each other. The *path* of a document consists
of its ancestors, oldest first, and the document itself.

    prompt [0, 4), two answers [4, 7) and [7, 9) that continue it: cu_seqlens (0, 4, 7, 9), parents (-1, 0, 0)
    positions in the path: 0 1 2 3, 4 5 6, 4 5

Trees are stored depth first: all documents that continue a document, directly or not, follow it before any other. So
the queries that see a key are before the *end* of the key, which is the end of its document's tree. A query sees
exactly the keys of one interval whose end is later than the query (`ringflash_kernels.mask`).

Windows count positions in the path. The first tokens of a path may be *global*: its queries see them beyond any window.
Then the interval of a query begins with the global keys, and the keys between these and its window must be hidden by
their ends: a global key ends with its document's tree, any other key with the last window that holds it. A key has one
end only, but in a document that several others continue, a key that is not global would need an end in each of them. So
in a tree with global tokens, a document that several others continue must consist of global tokens only.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ringflash.sequence.paths import MASKS_KEPT, Paths, Run, paths_of, tree_ends
from ringflash_kernels.mask import Region, band_of, check_window_size


class Documents(NamedTuple):
    """Documents of a sequence: bounds, and optionally parents, directions and global tokens; see `SequenceMask`.

    As a tensor (`document_table`) they are (4, num_documents + 1), int32: bounds; parents, then -1; 1 for documents
    whose queries see all of the document, then 0; and the number of global tokens of each document's path, then 0.
    """

    bounds: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    bidirectional: tuple[bool, ...] | None = None
    global_tokens: tuple[int, ...] | None = None

    @classmethod
    def of(cls, values: tuple[int, ...] | Documents | None) -> Documents | None:
        """Return the documents of some bounds."""
        return values if values is None or isinstance(values, Documents) else cls(values)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Documents:
        """Return the documents of the rows of a table, or of bounds only."""
        if len(rows) == 1:
            return cls(tuple(rows[0]))
        bounds, (*parents, _), (*both, _), (*counts, _) = rows
        return cls(
            tuple(bounds),
            tuple(parents) if any(parent != -1 for parent in parents) else None,
            tuple(map(bool, both)) if any(both) else None,
            tuple(counts) if any(counts) else None,
        )

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Rows of the table."""
        none = (0,) * (len(self.bounds) - 1)
        parents, both = self.parents or (-1,) * len(none), map(int, self.bidirectional or none)
        return self.bounds, (*parents, -1), (*both, 0), (*(self.global_tokens or none), 0)

    @property
    def is_plain(self) -> bool:
        """True if no document continues another, is bidirectional or has global tokens."""
        return self.parents is self.bidirectional is self.global_tokens is None

    def plain_bounds(self, user: str) -> tuple[int, ...]:
        """Return the bounds, if all documents are plain.

        Args:
            user: name for the error of what supports plain documents only.
        Raises:
            NotImplementedError: they are not plain.
        """
        if not self.is_plain:
            raise NotImplementedError(
                f"cu_seqlens must be bounds of plain documents for {user}, got a table with parents, bidirectional "
                "documents or global tokens; give each sequence its own document."
            )
        return self.bounds

    @property
    def has_branches(self) -> bool:
        """True if the parent of a document is not the previous document."""
        return any(parent not in (-1, index - 1) for index, parent in enumerate(self.parents or ()))

    @property
    def summary(self) -> str:
        """Short text to compare documents by: up to 8 plain bounds, otherwise their number and a checksum."""
        if self.is_plain and len(self.bounds) <= 8:
            return str(self.bounds)
        content = zlib.crc32(np.asarray(self.bounds if self.is_plain else self.rows).tobytes())
        return f"{len(self.bounds)} bounds{'' if self.is_plain else ' in a table'}, checksum {content:08x}"


@dataclass(frozen=True)
class SequenceMask:
    """Causal, window and document limits of one sequence, in any combination.

    Args:
        seqlen: length of the whole sequence, tokens.
        window_size: (left, right), inclusive, -1 unlimited; `causal` means a right window of 0. Counted along the path.
        cu_seqlens: document bounds (0, ..., seqlen); a query sees only keys of its document's path.
        parents: for each document, the index of the document that it continues, or -1.
        bidirectional: for each document, True if its queries see all its keys in spite of `causal`.
        global_tokens: for each document, how many first tokens of its path its queries see beyond the window.
    """

    seqlen: int
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    cu_seqlens: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None
    bidirectional: tuple[bool, ...] | None = None
    global_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_window_size(self.window_size)
        if self.cu_seqlens is not None:
            check_cu_seqlens(self.cu_seqlens, self.seqlen)
        check_parents(self.cu_seqlens, self.parents, self.bidirectional, self.global_tokens)
        if self.documents is None or self.documents.is_plain:
            return
        if not self.causal:
            raise ValueError(
                "causal must be True with parents, bidirectional documents or global tokens, got False; mark documents "
                "that are to see all of themselves as bidirectional."
            )
        if self.bidirectional is not None and self.window_size[1] > 0:
            raise ValueError(
                f"window_size must be (left, 0) or (left, -1) with bidirectional documents, got {self.window_size}; "
                "only its left side limits what they see."
            )

    @cached_property
    def documents(self) -> Documents | None:
        """The documents, or None if none were given."""
        if self.cu_seqlens is None:
            return None
        return Documents(self.cu_seqlens, self.parents, self.bidirectional, self.global_tokens)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Document bounds; a single document if none were given."""
        return self.cu_seqlens if self.cu_seqlens is not None else (0, self.seqlen)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(lower, upper) in lower <= key position - query position <= upper; None is unlimited."""
        lower, upper = band_of(self.causal, self.window_size)
        return (None if lower is not None and -lower >= self.seqlen - 1 else lower), upper

    @property
    def num_visible(self) -> int:
        """Number of visible query-key pairs of the whole sequence."""
        if not self.causal:
            everything = range(len(self.bounds) - 1)
            return sum(region.num_visible for i in everything for region in self.regions_of(i, 0, self.seqlen))
        bounds = np.asarray(self.bounds)
        lengths, (lower, _) = np.diff(bounds), self.band
        before = bounds[:-1] - np.asarray(self._paths.shifts)  # tokens of the path before each document
        after = before + lengths
        pairs = _triangle(after) - _triangle(before)
        if self.bidirectional is not None:
            pairs = pairs + np.asarray(self.bidirectional) * _triangle(lengths - 1)
        if lower is not None:  # keys beyond the window that are not global
            hidden = lower - 1 - self._arrays[-1]
            pairs = pairs - (_triangle(after + hidden) - _triangle(before + hidden))
        return int(pairs.sum())

    @cached_property
    def _paths(self) -> Paths:
        return paths_of(self.bounds, self.parents)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        """Bounds, the fields of `Paths`, which documents are bidirectional, and their numbers of global tokens."""
        none = (0,) * (len(self.bounds) - 1)
        both = np.asarray(self.bidirectional or none, dtype=bool)
        return *map(np.asarray, (self.bounds, *self._paths)), both, np.asarray(self.global_tokens or none)

    def path(self, document: int) -> list[Run]:
        """Return the keys of a document's path as the fewest runs; the last run ends with the document."""
        return self._paths.runs(document, self.bounds)

    @cached_property
    def tree_ends(self) -> list[int]:
        """Position at which the tree of each document ends."""
        return tree_ends(self.bounds, self.parents)

    @property
    def has_columns(self) -> bool:
        """True if a key is seen by all queries of its document's tree from the key's position on."""
        return self.parents is not None and self.band[0] is None

    def document_of(self, position: int) -> int:
        """Return the index of the document that holds `position`."""
        return bisect_right(self.bounds, position) - 1

    def regions_of(self, document: int, start: int, stop: int) -> Iterator[Region]:
        """Yield the regions of the queries of a document that are in [start, stop), in global positions."""
        first, last = max(start, self.bounds[document]), min(stop, self.bounds[document + 1])
        lower, upper = self.band
        *ancestors, own = self.path(document)
        if self.bidirectional is not None and self.bidirectional[document]:
            upper = None
        if lower is None:
            yield from (Region(first, last, run.start, run.stop) for run in ancestors)
            regions = [Region(first, last, own.start, own.stop, None, upper)]
        else:
            num_global, regions = self.global_tokens[document] if self.global_tokens else 0, []
            for run, last_seen in (*((run, None) for run in ancestors), (own, upper)):
                edge = min(max(run.start, run.shift + num_global), run.stop)
                if run.start < edge:
                    regions.append(Region(first, last, run.start, edge, None, last_seen))
                if edge < run.stop:  # the shifts turn a distance in the path into one in the sequence
                    regions.append(Region(first, last, edge, run.stop, lower + run.shift - own.shift, last_seen))
        yield from (region for x in regions if (region := x.trimmed()) is not None)

    def visible_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the keys that at least one of the queries [start, stop) sees: disjoint intervals, ascending."""
        if self.parents is self.global_tokens is None:
            return [self._visible_range(start, stop)]
        documents = range(self.document_of(start), self.document_of(stop - 1) + 1)
        if self.band[0] is None:  # later documents see keys of the first one's path, and keys from `start` on
            *ancestors, own = self.path(documents[0])
            extends = self.bidirectional is not None and self.bidirectional[documents[-1]]
            last = self.bounds[documents[-1] + 1] if extends else stop
            return [*((run.start, run.stop) for run in ancestors), (own.start, last)]
        return self._ranges_in_window(np.asarray(documents), start, stop)

    def _ranges_in_window(self, documents: np.ndarray, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the keys that the queries [start, stop), which belong to these documents, see under a window."""
        bounds, starts, links, shifts, both, num_global = self._arrays
        first, last = np.maximum(start, bounds[documents]), np.minimum(stop, bounds[documents + 1])
        last = np.where(both[documents], bounds[documents + 1], last)
        reach = first + (self.band[0] or 0) - shifts[documents]  # position in the path at which the window begins
        ranges = []
        while len(documents):  # from the last run of each path back, while the window or global tokens go farther
            far, count = reach + shifts[documents], num_global[documents]
            ranges.append((np.maximum(starts[documents], far), last))
            if self.global_tokens:
                ranges.append((starts[documents], np.minimum(last, shifts[documents] + count)))
            on = ((far < starts[documents]) | (count > 0)) & (links[documents] >= 0)
            documents, reach = links[documents[on]], reach[on]
            last = bounds[documents + 1]
        begins, ends = (np.concatenate(side) for side in zip(*ranges, strict=True))
        order = np.flatnonzero(begins < ends)
        order = order[np.argsort(begins[order])]
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        apart = np.flatnonzero(begins[1:] > ends[:-1])
        return list(zip(begins[[0, *(apart + 1)]].tolist(), ends[[*apart, -1]].tolist(), strict=True))

    def _visible_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the keys that the queries [start, stop) see if no document continues another.

        They form one interval, since every query sees itself, and the intervals of adjacent queries overlap or touch.
        """
        lower, upper = self.band
        first = self.bounds[self.document_of(start)]
        last = self.bounds[self.document_of(stop - 1) + 1]
        if lower is not None:
            first = max(first, start + lower)
        if upper is not None and self.bidirectional is None:
            last = min(last, stop + upper)
        return first, last


def _triangle(n: np.ndarray) -> np.ndarray:
    n = np.maximum(n, 0)
    return n * (n + 1) // 2


@lru_cache(MASKS_KEPT)  # checked for every rank, layer and pass
def check_parents(
    cu_seqlens: tuple[int, ...] | None,
    parents: tuple[int, ...] | None,
    bidirectional: tuple[bool, ...] | None,
    global_tokens: tuple[int, ...] | None = None,
) -> None:
    """Raise ValueError unless parents describe trees, depth first, and each document has an entry.

    All documents of a tree must have the same number of global tokens. Unless it is 0, a document that several others
    continue must be all global.
    """
    given = (("parents", parents), ("bidirectional", bidirectional), ("global_tokens", global_tokens))
    for name, values in given:
        if values is not None and (cu_seqlens is None or len(values) != len(cu_seqlens) - 1):
            count = None if cu_seqlens is None else len(cu_seqlens) - 1
            raise ValueError(
                f"{name} must have one entry for each document of cu_seqlens ({count}), got {len(values)}; "
                "give both of the same documents."
            )
    path: list[int] = []  # the documents that the next one may continue: the previous one and its ancestors
    for index, parent in enumerate(parents or ()):
        while path and path[-1] != parent:
            path.pop()
        if not path and parent != -1:
            raise ValueError(
                f"parents must order documents depth first, got {parent} for document {index}, which is neither the "
                "previous document nor one that it continues; sort the documents (ringflash.share_prefixes)."
            )
        path.append(index)
    if cu_seqlens is not None and global_tokens is not None:
        _check_global_tokens(cu_seqlens, parents or (-1,) * len(global_tokens), global_tokens)


def _check_global_tokens(cu_seqlens: tuple[int, ...], parents: tuple[int, ...], counts: tuple[int, ...]) -> None:
    continued = [0] * len(parents)
    for index, (parent, count) in enumerate(zip(parents, counts, strict=True)):
        if count < 0 or (parent >= 0 and count != counts[parent]):
            raise ValueError(
                f"global_tokens must be 0 or more, and the same for all documents of a tree, got {count} for document "
                f"{index}{f', which continues one with {counts[parent]}' if parent >= 0 else ''}; count them from the "
                "beginning of the path."
            )
        if parent >= 0:
            continued[parent] += 1
    shifts = paths_of(cu_seqlens, parents).shifts
    for index, (number, count, shift) in enumerate(zip(continued, counts, shifts, strict=True)):
        tokens = cu_seqlens[index + 1] - shift
        if number > 1 and 0 < count < tokens:
            raise ValueError(
                f"global_tokens must include all of a document that several continue, got {count} for document "
                f"{index}, whose path has {tokens} tokens; give its tree {tokens} or more, or none."
            )


@lru_cache(MASKS_KEPT)
def check_cu_seqlens(cu_seqlens: tuple[int, ...], seqlen: int) -> None:
    """Raise ValueError unless cu_seqlens increases from 0 to the global length."""
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0:
        raise ValueError(
            f"cu_seqlens must start at 0 and hold two or more bounds, got {_short(cu_seqlens)}; prepend 0."
        )
    if any(b <= a for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        raise ValueError(f"cu_seqlens must ascend, got {_short(cu_seqlens)}; drop empty documents and sort.")
    if cu_seqlens[-1] != seqlen:
        raise ValueError(
            f"cu_seqlens must end at the global sequence length ({seqlen}), got {cu_seqlens[-1]}; "
            "give bounds of the whole packed sequence, not of the shard, and count padding as a document."
        )


def cut_into_chunks(bounds: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Cut every document into chunks of `size` tokens: bounds (0, 7, 20) with size 8 become (0, 7, 15, 20)."""
    return (*(cut for start, stop in pairwise(bounds) for cut in range(start, stop, size)), bounds[-1])


def _short(values: tuple[int, ...]) -> str:
    return str(values) if len(values) <= 8 else f"({', '.join(map(str, values[:4]))}, ..., {values[-1]})"
