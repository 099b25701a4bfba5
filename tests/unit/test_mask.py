"""Mask and Region against brute force over every pair. CPU, one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.testing import dense
from ringflash_kernels.mask import Mask, Region

LENGTH = 9


@st.composite
def regions(draw: st.DrawFn, length: int = LENGTH) -> Region:
    """Any rectangle and band, also ones that show nothing."""
    rows = sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=2)))
    cols = sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=2)))
    side = st.none() | st.integers(-length, length)
    lower, upper = draw(side), draw(side)
    if lower is not None and upper is not None and lower > upper:
        lower, upper = upper, lower
    return Region(*rows, *cols, lower, upper)


def brute(region: Region) -> torch.Tensor:
    """Visible pairs by the definition."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    seen = (i >= region.q_start) & (i < region.q_stop) & (j >= region.k_start) & (j < region.k_stop)
    if region.lower is not None:
        seen = seen & (j - i >= region.lower)
    if region.upper is not None:
        seen = seen & (j - i <= region.upper)
    return seen


def test_the_default_device_of_torch_is_not_used() -> None:
    """A script with torch.set_default_device("cuda") has the same tables on the host."""
    regions = [Region(0, 2, 0, 2, upper=0), Region(2, 4, 0, 2), Region(2, 4, 2, 4, upper=0), Region(4, 6, 0, 2)]
    want = Mask.of(LENGTH, LENGTH, regions)
    with torch.device("meta"):
        got = Mask.of(LENGTH, LENGTH, regions)
        assert got.is_two_sided
        tables = (*got.bounds(), got.ends(), got.begins())
    for mine, other in zip(tables, (*want.bounds(), want.ends(), want.begins()), strict=True):
        assert torch.equal(mine, other)


@given(regions())
@settings(max_examples=400, deadline=None)
def test_region(region: Region) -> None:
    want = brute(region)
    mask = Mask.of(LENGTH, LENGTH, [region])
    assert torch.equal(mask.dense(), want)
    assert mask.num_visible == int(want.sum())
    assert want.any() or mask.q_span == mask.k_span == (0, 0)
    assert torch.equal(mask.transposed().dense(), want.T)
    assert mask.transposed().num_visible == mask.num_visible


@given(regions())
@settings(max_examples=200, deadline=None)
def test_trimming_is_tight(region: Region) -> None:
    """No row or column of the ends is empty, and trimming again changes nothing."""
    trimmed = region.trimmed()
    if trimmed is None:
        assert not brute(region).any()
        return
    seen = brute(region)
    rows, cols = seen.any(1).nonzero().flatten().tolist(), seen.any(0).nonzero().flatten().tolist()
    assert (trimmed.q_start, trimmed.q_stop, trimmed.k_start, trimmed.k_stop) == (
        rows[0], rows[-1] + 1, cols[0], cols[-1] + 1,
    )  # fmt: skip
    assert trimmed.trimmed() == trimmed


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_size", [(-1, -1), (2, -1), (-1, 2), (2, 3), (0, 0)])
@pytest.mark.parametrize("cu_seqlens", [(0, 12), (0, 1, 2, 7, 12), tuple(range(13))])
def test_documents(causal: bool, window_size: tuple[int, int], cu_seqlens: tuple[int, ...]) -> None:
    mask = Mask.documents(cu_seqlens, causal=causal, window_size=window_size)
    position = torch.arange(12)
    want = dense.visible(position, position, causal=causal, window_size=window_size, cu_seqlens=cu_seqlens)
    assert torch.equal(mask.dense(), want)
    start, stop = mask.bounds()
    assert torch.equal((stop - start).long(), want.sum(1))
    assert bool((start.diff() >= 0).all()) and bool((stop.diff() >= 0).all())


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(4, 7), (7, 4), (1, 5), (5, 1), (6, 6)])
@pytest.mark.parametrize("causal, window_size", [(True, (-1, -1)), (False, (1, 2)), (True, (2, 0)), (False, (-1, -1))])
def test_band_is_aligned_bottom_right(seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int, int]) -> None:
    query, key = torch.arange(seqlen_q) + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    want = dense.visible(query, key, causal=causal, window_size=window_size)
    mask = Mask.band(seqlen_q, seqlen_k, causal=causal, window_size=window_size)
    assert torch.equal(mask.dense(), want)
    rows = want.any(1).nonzero().flatten().tolist()
    assert mask.q_span == ((rows[0], rows[-1] + 1) if rows else (0, 0))


@pytest.mark.parametrize("cu_seqlens", [(2, 6), (0, 4, 2), (0, 2, 2)])
def test_documents_that_leave_out_rows_are_refused(cu_seqlens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must ascend from 0, got"):
        Mask.documents(cu_seqlens)


def test_holes_and_falling_bounds_are_two_sided() -> None:
    hole = Mask.of(2, 5, [Region(0, 1, 0, 5), Region(1, 2, 0, 2), Region(1, 2, 3, 5)])
    falling = Mask.of(2, 5, [Region(0, 1, 2, 4), Region(1, 2, 0, 5)])
    assert hole.is_two_sided and falling.is_two_sided
    gap = Mask.of(3, 5, [Region(0, 1, 0, 4), Region(2, 3, 2, 5)])
    assert gap.dense().sum(1).tolist() == [4, 0, 3] and not gap.is_two_sided


def test_a_hole_that_a_later_row_sees_is_refused() -> None:
    """Neither the interval of row 0 nor the end of key 1 says that row 0 does not see it."""
    with pytest.raises(ValueError, match="the keys of one interval whose end is after it"):
        Mask.of(2, 3, [Region(0, 1, 0, 1), Region(0, 1, 2, 3), Region(1, 2, 1, 2)]).is_two_sided  # noqa: B018


def test_mask_cache_is_made_once_and_no_value() -> None:
    """A failed attempt leaves nothing."""
    mask, made = Mask.band(4, 4, causal=True), iter(range(5))
    assert [mask.cached(key, lambda: next(made)) for key in ("a", "b", "a", "b")] == [0, 1, 0, 1]
    assert mask.is_cached("a") and not mask.is_cached("c")
    other = Mask.band(4, 4, causal=True)
    assert other == mask and hash(other) == hash(mask) and not other.is_cached("a")
    with pytest.raises(ZeroDivisionError):
        mask.cached("c", lambda: 1 // 0)
    assert mask.cached("c", lambda: 2) == 2
