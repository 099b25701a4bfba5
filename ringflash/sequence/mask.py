"""Mask in global coordinates: the query at position p sees the keys first(p) <= position <= last(p)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from ringflash_kernels.mask import Region, band_of


@dataclass(frozen=True)
class SequenceMask:
    """Causal, window and document limits of one sequence, in any combination.

    Args:
        seqlen: length of the whole sequence, tokens.
        window_size: (left, right), inclusive, -1 unlimited; `causal` means a right window of 0.
        cu_seqlens: document bounds (0, ..., seqlen); a query sees only keys of its document.
    """

    seqlen: int
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    cu_seqlens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_window_size(self.window_size)
        if self.cu_seqlens is not None:
            check_cu_seqlens(self.cu_seqlens, self.seqlen)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Document bounds; a single document if none were given."""
        return self.cu_seqlens if self.cu_seqlens is not None else (0, self.seqlen)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(lower, upper) in lower <= key position - query position <= upper; None is unlimited."""
        return band_of(self.causal, self.window_size)

    @property
    def num_visible(self) -> int:
        """Number of visible query-key pairs of the whole sequence."""
        documents = pairwise(self.bounds)
        return sum(Region(start, stop, start, stop, *self.band).num_visible for start, stop in documents)

    def document_of(self, position: int) -> int:
        """Return the index of the document that holds `position`."""
        return bisect_right(self.bounds, position) - 1

    def visible_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the keys [first, stop) that at least one of the queries [start, stop) sees.

        They form one interval, since every query sees itself, and the intervals of adjacent queries overlap or touch.
        """
        lower, upper = self.band
        first = self.bounds[self.document_of(start)]
        last = self.bounds[self.document_of(stop - 1) + 1]
        if lower is not None:
            first = max(first, start + lower)
        if upper is not None:
            last = min(last, stop + upper)
        return first, last


def check_window_size(window_size: tuple[int, ...]) -> None:
    """Raise ValueError unless window_size is two integers of at least -1."""
    if len(window_size) != 2 or any(not isinstance(w, int) or w < -1 for w in window_size):
        raise ValueError(
            f"window_size must be (left, right), each -1 (unlimited) or more, got {window_size}; "
            "a window of n tokens up to and including the query is (n - 1, 0)."
        )


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


def digest(values: tuple[int, ...]) -> str:
    """Return the bounds themselves if there are few, otherwise their number and a checksum."""
    return str(values) if len(values) <= 8 else f"{len(values)} bounds, checksum {hash(values) & 0xFFFFFFFF:08x}"


def _short(values: tuple[int, ...]) -> str:
    return str(values) if len(values) <= 8 else f"({', '.join(map(str, values[:4]))}, ..., {values[-1]})"
