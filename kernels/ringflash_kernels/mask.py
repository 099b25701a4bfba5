"""Mask of one attention call: the key rows that each query row sees.

A `Mask` is written as a few rectangles, each with an optional diagonal band:

    causal, 4 x 4              documents of 1 and 3 tokens, causal      a token that two documents continue
    x . . .                    x . . .      Region(0, 1, 0, 1)          x . . .      Region(0, 1, 0, 1)
    x x . .   Region(0, 4,     . x . .      Region(1, 4, 1, 4, upper=0) x x . .      Region(1, 2, 0, 2)
    x x x .     0, 4,          . x x .                                  x . x .      Region(2, 4, 0, 1)
    x x x x     upper=0)       . x x x                                  x . x x      Region(2, 4, 2, 4, upper=0)

Every query has an interval of keys, from the first to the last one that it sees. Every key has an end, the row after
the last one that sees it. A query sees exactly the keys of its interval whose end is later than the query. Under most
masks that is its whole interval, and the bounds of the intervals never decrease (the first two examples). The other
masks are *two-sided*: the keys that a query sees are not contiguous, so kernels need a second table, the ends of the
keys. In the third example key 0 has end 4 and key 1 has end 2, so query 2 sees keys 0 and 2, but not key 1.

Rows and columns are local to the tensors of the call; `ringflash.attention.schedule` translates from global
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
FAR = 1 << 40  # stands for an open side of a band in `Mask.table`


class Region(NamedTuple):
    """Query rows i of [q_start, q_stop) see key rows j of [k_start, k_stop) if lower <= j - i <= upper.

    `None` leaves that side of the band open.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lower: int | None = None
    upper: int | None = None

    def trimmed(self) -> Region | None:
        """Return the smallest equal region, without bounds that do not bind, or None if nothing is visible."""
        q_start, q_stop, k_start, k_stop, lower, upper = self
        if upper is not None:
            q_start = max(q_start, k_start - upper)
        if lower is not None:
            q_stop = min(q_stop, k_stop - lower)
            k_start = max(k_start, q_start + lower)
        if upper is not None:
            k_stop = min(k_stop, q_stop + upper)
        if q_start >= q_stop or k_start >= k_stop:
            return None
        if lower is not None and q_stop - 1 + lower <= k_start:
            lower = None
        if upper is not None and q_start + upper >= k_stop - 1:
            upper = None
        return Region(q_start, q_stop, k_start, k_stop, lower, upper)

    def transposed(self) -> Region:
        """Return the same pairs with the roles of queries and keys exchanged."""
        lower = None if self.upper is None else -self.upper
        upper = None if self.lower is None else -self.lower
        return Region(self.k_start, self.k_stop, self.q_start, self.q_stop, lower, upper)

    @property
    def num_visible(self) -> int:
        """Number of visible (query, key) pairs."""
        num_k = self.k_stop - self.k_start
        above = 0 if self.lower is None else self._pairs_up_to(self.lower - 1)
        below = (self.q_stop - self.q_start) * num_k if self.upper is None else self._pairs_up_to(self.upper)
        return below - above

    def _pairs_up_to(self, diagonal: int) -> int:
        """Number of pairs of the rectangle with j - i <= diagonal."""
        num_k = self.k_stop - self.k_start
        first = self.q_start + diagonal + 1 - self.k_start  # visible keys of the first row, before clamping
        last = self.q_stop + diagonal - self.k_start  # ... of the last row
        return _triangle(last) - _triangle(first - 1) - _triangle(last - num_k) + _triangle(first - 1 - num_k)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


@dataclass(frozen=True)
class Mask:
    """Visible pairs of a call with `seqlen_q` query and `seqlen_k` key rows.

    Args:
        regions: disjoint, ordered by query row, then by key row; build them with the constructors.
    """

    seqlen_q: int
    seqlen_k: int
    regions: tuple[Region, ...]
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False, hash=False)

    @classmethod
    def of(cls, seqlen_q: int, seqlen_k: int, regions: Iterable[Region]) -> Mask:
        """Build a mask of these regions, each trimmed, empty ones dropped."""
        trimmed = (region.trimmed() for region in regions)
        return cls(seqlen_q, seqlen_k, tuple(region for region in trimmed if region is not None))

    @classmethod
    def full(cls, seqlen_q: int, seqlen_k: int) -> Mask:
        """Mask under which every query sees every key."""
        return cls.of(seqlen_q, seqlen_k, [Region(0, seqlen_q, 0, seqlen_k)])

    @classmethod
    def band(
        cls, seqlen_q: int, seqlen_k: int, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
    ) -> Mask:
        """Build a causal and/or sliding-window mask, aligned at the bottom right as FlashAttention does.

        Args:
            window_size: (left, right), inclusive, counted from the query's own position; -1 is unlimited.
        """
        lower, upper = band_of(causal, window_size)
        shift = seqlen_k - seqlen_q
        lower = None if lower is None else lower + shift
        upper = None if upper is None else upper + shift
        return cls.of(seqlen_q, seqlen_k, [Region(0, seqlen_q, 0, seqlen_k, lower, upper)])

    @classmethod
    def documents(
        cls, cu_seqlens: Sequence[int], *, causal: bool = True, window_size: tuple[int, int] = (-1, -1)
    ) -> Mask:
        """Build the mask of packed documents [cu_seqlens[i], cu_seqlens[i + 1]): no query sees another document.

        Raises:
            ValueError: bounds that do not ascend from 0.
        """
        if cu_seqlens[0] != 0 or any(b <= a for a, b in pairwise(cu_seqlens)):
            raise ValueError(f"cu_seqlens must ascend from 0, got {cu_seqlens}; prepend 0 and sort.")
        lower, upper = band_of(causal, window_size)
        regions = (Region(a, b, a, b, lower, upper) for a, b in pairwise(cu_seqlens))
        return cls.of(cu_seqlens[-1], cu_seqlens[-1], regions)

    @cached_property
    def table(self) -> np.ndarray:
        """The regions as (num_regions, 6), int64; an open side of a band is -FAR or FAR."""
        if not self.regions:
            return np.empty((0, 6), dtype=np.int64)
        *sides, lowers, uppers = zip(*self.regions, strict=True)
        lower, upper = [-FAR if x is None else x for x in lowers], [FAR if x is None else x for x in uppers]
        return np.array((*sides, lower, upper), dtype=np.int64).T

    @cached_property
    def num_visible(self) -> int:
        """Number of visible (query, key) pairs: a forward costs 4 * head_dim FLOPs per pair and head."""
        return sum(region.num_visible for region in self.regions)

    @cached_property
    def q_span(self) -> tuple[int, int]:
        """Smallest [start, stop) of query rows that holds every row with a visible key."""
        return (min(r.q_start for r in self.regions), max(r.q_stop for r in self.regions)) if self.regions else (0, 0)

    @cached_property
    def k_span(self) -> tuple[int, int]:
        """Smallest [start, stop) of key rows that holds every visible key."""
        return (min(r.k_start for r in self.regions), max(r.k_stop for r in self.regions)) if self.regions else (0, 0)

    def transposed(self) -> Mask:
        """Mask with queries and keys exchanged: its bounds are the interval of queries that see each key."""
        regions = sorted(region.transposed() for region in self.regions)
        return Mask(self.seqlen_k, self.seqlen_q, tuple(regions))

    @cached_property
    def is_two_sided(self) -> bool:
        """True if a query may not see all of its interval of keys, or the bounds of the intervals decrease.

        Raises:
            ValueError: the mask is not what intervals and ends say. Not checked for masks that are `proven`, since it
                takes time in proportion to all pairs.
        """
        if len(self.regions) < 2:
            return False
        start, stop = self.bounds()
        starts, stops = start[start < stop], stop[start < stop]
        falls = (starts[1:] < starts[:-1]).any() or (stops[1:] < stops[:-1]).any()
        if not falls and int((stop - start).sum()) == self.num_visible:
            return False
        if not self.is_cached("proven") and self._count() != self.num_visible:
            raise ValueError(
                f"mask must show every query the keys of one interval whose end is after it, got {self.regions}; "
                "build it with Mask.full, Mask.band or Mask.documents."
            )
        return True

    def _count(self, rows: int = 1024) -> int:
        """Count the pairs that intervals and ends make visible."""
        (start, stop), end, keys = self.bounds(), self.ends(), torch.arange(self.seqlen_k, device="cpu")
        total = 0
        for first in range(0, self.seqlen_q, rows):
            part = slice(first, min(first + rows, self.seqlen_q))
            index = torch.arange(part.start, part.stop, device="cpu")[:, None]
            inside = (keys >= start[part, None]) & (keys < stop[part, None]) & (index < end)
            total += int(inside.sum())
        return total

    def ends(self) -> Tensor:
        """Return the row after the last one that sees each key: (seqlen_k,), int32 on the CPU; 0 if none does."""

        def make() -> Tensor:
            first, end = self.cached("transposed", self.transposed).bounds()
            return torch.where(first < end, end, 0)

        return self.cached("ends", make)

    def begins(self) -> Tensor:
        """Return the first key that each query sees: (seqlen_q,), int32 on the CPU; seqlen_k if it sees none."""
        start, stop = self.bounds()
        return torch.where(start < stop, start, self.seqlen_k)

    def bounds(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return the interval of keys [start, stop) of each query row, from the first to the last one that it sees.

        Returns:
            start, stop: (seqlen_q,), int32 on `device`; start == stop for a row that sees nothing. Neither ever
            decreases unless the mask `is_two_sided`. Computed once per device and cached with the mask.
        Raises:
            RuntimeError: see `upload`.
        """
        device = torch.device(device)

        def make() -> tuple[Tensor, Tensor]:
            start, stop = self._host_bounds() if device.type == "cpu" else upload(device, *self.bounds())
            return start, stop

        return self.cached(("bounds", device), make)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, called once per key. Kernels cache the tables of a mask here.

        Args:
            key: begins with a name that only this caller uses; need not include the mask.
        """
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def is_cached(self, key: Hashable) -> bool:
        """True if `cached` has a value for this key."""
        return key in self._cache

    def dense(self, device: torch.device | str = "cpu") -> Tensor:
        """Visibility of every pair: (seqlen_q, seqlen_k), bool. Used by the reference and by tests."""
        visible = torch.zeros(self.seqlen_q, self.seqlen_k, dtype=torch.bool, device=device)
        for q_start, q_stop, k_start, k_stop, lower, upper in self.regions:
            part = visible[q_start:q_stop, k_start:k_stop]
            band = torch.ones_like(part)
            band = band if upper is None else band.tril_(upper + q_start - k_start)
            part |= band if lower is None else band.triu_(lower + q_start - k_start)
        return visible

    def _host_bounds(self) -> tuple[Tensor, Tensor]:
        """Return `bounds` on the CPU: the least start and the largest stop over the regions of each row."""
        q_start, q_stop, k_start, k_stop, lower, upper = self.table.T
        start = np.full(self.seqlen_q, self.seqlen_k, dtype=np.int32)
        stop = np.zeros(self.seqlen_q, dtype=np.int32)
        # Without a band, a side is the same for all rows of a region. The outermost one is written last.
        for bound, side, flat, sign in ((start, k_start, lower == -FAR, -1), (stop, k_stop, upper == FAR, 1)):
            order = np.flatnonzero(flat)[np.argsort(sign * side[flat])]
            for first, last, value in zip(*(x[order].tolist() for x in (q_start, q_stop, side)), strict=True):
                bound[first:last] = value
        region, row = _rows(q_start, q_stop, lower > -FAR)
        np.minimum.at(start, row, np.maximum(k_start[region], row + lower[region]).astype(np.int32))
        region, row = _rows(q_start, q_stop, upper < FAR)
        np.maximum.at(stop, row, np.minimum(k_stop[region], row + upper[region] + 1).astype(np.int32))
        # An empty row: its interval begins and ends where the previous ones end.
        stop = np.where(stop == 0, np.maximum.accumulate(stop), stop)
        return torch.from_numpy(np.minimum(start, stop)), torch.from_numpy(stop)


def upload(device: torch.device, *tables: Tensor) -> list[Tensor]:
    """Return the tables of a mask, from the host, on a device, to be cached. Any stream may read them at once.

    Waits for the copies, on a stream of their own, but not for what the current stream has to do before.

    Raises:
        RuntimeError: a CUDA graph is being captured: the tables would have no values until it is replayed, but eager
            calls would already read them.
    """
    if device.type != "cuda":
        return [x.to(device) for x in tables]
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the mask of a call must have been used before a CUDA graph is captured, got a new one; run the call once "
            "before."
        )
    reader, stream = torch.cuda.current_stream(device), _upload_stream(device)
    with torch.cuda.stream(stream):
        copies = [x.pin_memory().to(device, non_blocking=True) for x in tables]
    stream.synchronize()
    for x in copies:
        x.record_stream(reader)
    return copies


@cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def check_window_size(window_size: tuple[int, ...]) -> None:
    """Raise ValueError unless window_size is two integers of at least -1."""
    if len(window_size) != 2 or any(not isinstance(w, int) or w < -1 for w in window_size):
        raise ValueError(
            f"window_size must be (left, right), each -1 (unlimited) or more, got {window_size}; "
            "a window of n tokens up to and including the query is (n - 1, 0)."
        )


def band_of(causal: bool, window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """Return (lower, upper) of the band lower <= key position - query position <= upper; None is unlimited."""
    check_window_size(window_size)
    left, right = window_size
    lower = None if left < 0 else -left
    upper = None if right < 0 else right
    return lower, (0 if causal else upper)


def _rows(first: np.ndarray, stop: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the region and the row of every row of the chosen regions."""
    counts = np.where(chosen, stop - first, 0)
    region = np.repeat(np.arange(len(counts)), counts)
    return region, np.arange(len(region)) + np.repeat(first - (counts.cumsum() - counts), counts)
