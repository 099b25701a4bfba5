"""Paths of documents that continue one another; see `mask`."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

# Masks that caches keep: each layer attends the rows of a batch one after another. More would take memory, since masks
# hold tables on the device, and packed documents need new ones at each step.
MASKS_KEPT = 16


class Run(NamedTuple):
    """Keys [start, stop) of a path that are neighbours in the sequence; their path position is `key - shift`."""

    start: int
    stop: int
    shift: int


class Paths(NamedTuple):
    """Paths of documents.

    Args:
        starts: for each document, the first key of the last run of its path: the run that ends with the document.
        links: for each document, the document that ends the previous run of its path; -1 if there is none.
        shifts: for each document, position in the sequence minus position in its path.
    """

    starts: list[int]
    links: list[int]
    shifts: list[int]

    def runs(self, document: int, bounds: tuple[int, ...]) -> list[Run]:
        """Return the runs of a document's path, in the order of the path."""
        runs = []
        while document >= 0:
            runs.append(Run(self.starts[document], bounds[document + 1], self.shifts[document]))
            document = self.links[document]
        return runs[::-1]


@lru_cache(MASKS_KEPT)
def paths_of(bounds: tuple[int, ...], parents: tuple[int, ...] | None) -> Paths:
    """Return the paths of documents, which must be in depth-first order."""
    if parents is None:
        starts = list(bounds[:-1])
        return Paths(starts, [-1] * len(starts), starts)
    paths = Paths([], [], [])
    for index, (start, parent) in enumerate(zip(bounds, parents, strict=False)):
        follows = parent >= 0 and parent == index - 1
        paths.starts.append(paths.starts[parent] if follows else start)
        paths.links.append(paths.links[parent] if follows else parent)
        paths.shifts.append(start - (bounds[parent + 1] - paths.shifts[parent] if parent >= 0 else 0))
    return paths


def tree_ends(bounds: tuple[int, ...], parents: tuple[int, ...] | None) -> list[int]:
    """Return, for each document, the position at which the tree rooted at it ends."""
    ends = list(bounds[1:])
    for index, parent in reversed(list(enumerate(parents or ()))):
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    return ends
