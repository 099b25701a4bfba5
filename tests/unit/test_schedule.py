"""The schedule covers each visible pair once, for random masks, layouts and 1 to 8 ranks. CPU, one process."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.attention.schedule import Schedule, active_steps, plan_hops, plan_single_block
from ringflash.sequence import layout as layouts
from ringflash.sequence.layout import DOCUMENT_LAYOUTS, LAYOUTS, granularity, local_positions
from ringflash.sequence.mask import SequenceMask
from tests.helpers import dense
from tests.two_sided.forests import Forest, with_global_tokens


@pytest.fixture(scope="module", autouse=True)
def three_zigzags() -> Iterator[None]:
    """Chunks of a few tokens of a striped sequence, of which a dense mask can be drawn."""
    with mock.patch.dict(layouts._ZIGZAGS, striped=3):
        yield
    for cached in (active_steps, plan_hops, plan_single_block):
        cached.cache_clear()


@st.composite
def problems(
    draw: st.DrawFn, cp_sizes: Sequence[int] = range(1, 9), chunk_tokens: Sequence[int] = range(1, 7)
) -> tuple[SequenceMask, int, str]:
    """A mask, the number of ranks and the layout."""
    cp_size, layout = draw(st.sampled_from(cp_sizes)), draw(st.sampled_from(LAYOUTS))
    seqlen = granularity(cp_size, layout) * draw(st.sampled_from(chunk_tokens))
    side = st.sampled_from([-1, -1, 0, 1, 2, 5, 11, seqlen // 5, seqlen // 2, seqlen])
    cuts = draw(st.none() | st.lists(st.integers(1, max(1, seqlen - 1)), max_size=6))
    if cuts is None and layout in DOCUMENT_LAYOUTS:
        cuts = []
    unit = 2 * cp_size if layout == "documents" else 1
    bounds = None if cuts is None else tuple(sorted({0, seqlen, *(c // unit * unit for c in cuts if c < seqlen)}))
    window = draw(side), draw(side)
    if bounds is not None and len(bounds) > 2 and draw(st.booleans()):
        parents, both = draw(trees(len(bounds) - 1))
        forest = Forest(tuple(b - a for a, b in pairwise(bounds)), parents, both)
        counts = with_global_tokens(forest, draw(st.randoms())).global_tokens if draw(st.booleans()) else None
        mask = SequenceMask(seqlen, True, (window[0], min(window[1], 0)), bounds, parents, both, counts)
        return mask, cp_size, layout
    return SequenceMask(seqlen, draw(st.booleans()), window, bounds), cp_size, layout


@st.composite
def trees(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Parents of documents, depth first, and which are bidirectional."""
    parents, path = [], []
    for index in range(count):
        del path[draw(st.integers(0, len(path))) :]
        parents.append(path[-1] if path else -1)
        path.append(index)
    return tuple(parents), tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count)))


def visible(mask: SequenceMask) -> torch.Tensor:
    """Visible pairs of a mask, by the oracle."""
    position, rows = torch.arange(mask.seqlen), mask.documents and mask.documents.rows
    return dense.visible(position, position, causal=mask.causal, window_size=mask.window_size, cu_seqlens=rows)


def schedules(mask: SequenceMask, cp_size: int, layout: str) -> list[Schedule]:
    """Return the schedules of all ranks."""
    return [plan_hops(mask, cp_size, rank, layout) for rank in range(cp_size)]


def held(mask: SequenceMask, cp_size: int, rank: int, layout: str) -> torch.Tensor:
    """Positions of a rank."""
    table = None if mask.documents is None else torch.tensor(mask.documents.rows)
    return local_positions(mask.seqlen, cp_size, rank, layout, table)


@given(problems())
@settings(max_examples=300, deadline=None)
def test_every_visible_pair_once_and_nothing_else(problem: tuple[SequenceMask, int, str]) -> None:
    mask, cp_size, layout = problem
    want = visible(mask)
    count = torch.zeros(mask.seqlen, mask.seqlen, dtype=torch.int32)
    rows = [held(mask, cp_size, rank, layout) for rank in range(cp_size)]
    for rank, schedule in enumerate(schedules(mask, cp_size, layout)):
        for hop in schedule.hops:
            if hop.source is not None:
                count[rows[rank][:, None], rows[hop.source][None]] += hop.mask.dense().int()
        assert schedule.num_visible == int(want[rows[rank]].sum())
    assert torch.equal(count, want.int())


@given(problems())
@settings(max_examples=300, deadline=None)
def test_ranks_agree_on_steps_senders_and_readers(problem: tuple[SequenceMask, int, str]) -> None:
    mask, cp_size, layout = problem
    every = schedules(mask, cp_size, layout)
    steps = active_steps(mask, cp_size, layout)
    assert steps[0] == 0 and all(tuple(hop.step for hop in schedule.hops) == steps for schedule in every)
    for rank, schedule in enumerate(every):
        for index, hop in enumerate(schedule.hops):
            assert (hop.source is None) == (not hop.mask.regions)
            if hop.source is not None:
                assert hop.source == (rank - hop.step) % cp_size
                assert every[hop.source].hops[index].reader == rank
            if hop.reader is not None:
                assert every[hop.reader].hops[index].source == rank
    for index in range(len(steps)):
        assert any(schedule.hops[index].source is not None for schedule in every)


def test_zigzag_balances_a_causal_mask() -> None:
    """At every step after the first all ranks work the same; in all, they differ by nothing."""
    every = schedules(SequenceMask(64), 4, "zigzag")
    assert len({schedule.num_visible for schedule in every}) == 1
    for index in range(1, 4):
        assert len({schedule.hops[index].mask.num_visible for schedule in every}) == 1


def test_each_hop_of_a_causal_zigzag_is_one_rectangle() -> None:
    for rank, schedule in enumerate(schedules(SequenceMask(64), 4, "zigzag")):
        assert [len(hop.mask.regions) for hop in schedule.hops] == [1] * 4, rank


def test_a_short_window_reaches_the_neighbour_only() -> None:
    """Contiguous, a window of less than a shard: one hop, and rank 0 receives nothing."""
    every = schedules(SequenceMask(64, True, (5, 0)), 4, "contiguous")
    assert [tuple(hop.step for hop in schedule.hops) for schedule in every] == [(0, 1)] * 4
    assert [schedule.hops[1].source for schedule in every] == [None, 0, 1, 2]
    assert [schedule.hops[1].reader for schedule in every] == [1, 2, 3, None]
