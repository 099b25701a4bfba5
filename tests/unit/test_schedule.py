"""Distances between ranks, and the mask of one process, for random masks and layouts. CPU, one process.

test_gathering.py says which keys each rank gathers.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.attention.schedule import active_distances, plan_blocks, plan_own_keys, plan_single_block
from ringflash.sequence import layout as layouts
from ringflash.sequence.layout import DOCUMENT_LAYOUTS, LAYOUTS, granularity, local_positions
from ringflash.sequence.mask import SequenceMask
from ringflash.testing import dense
from tests.two_sided.forests import Forest, with_global_tokens


@pytest.fixture(scope="module", autouse=True)
def three_zigzags() -> Iterator[None]:
    """Chunks of a few tokens of a striped sequence, of which a dense mask can be drawn."""
    with mock.patch.dict(layouts._ZIGZAGS, striped=3):
        yield
    for cached in (active_distances, plan_blocks, plan_own_keys, plan_single_block):
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


def held(mask: SequenceMask, cp_size: int, rank: int, layout: str) -> torch.Tensor:
    """Positions of a rank."""
    table = None if mask.documents is None else torch.tensor(mask.documents.rows)
    return local_positions(mask.seqlen, cp_size, rank, layout, table)


@given(problems())
@settings(max_examples=300, deadline=None)
def test_steps_are_distances_at_which_keys_are_seen(problem: tuple[SequenceMask, int, str]) -> None:
    mask, cp_size, layout = problem
    want, rows = visible(mask), [held(mask, cp_size, rank, layout) for rank in range(cp_size)]
    seen = {(q - k) % cp_size for q in range(cp_size) for k in range(cp_size) if want[rows[q]][:, rows[k]].any()}
    assert active_distances(mask, cp_size, layout) == tuple(sorted(seen))


@given(problems([1]))
@settings(max_examples=100, deadline=None)
def test_one_process_sees_the_whole_mask(problem: tuple[SequenceMask, int, str]) -> None:
    mask, _, layout = problem
    rows = held(mask, 1, 0, layout)
    assert torch.equal(plan_own_keys(mask, layout).dense(), visible(mask)[rows][:, rows])


def test_zigzag_balances_a_causal_mask() -> None:
    """At every distance after the first all ranks work the same, on one rectangle; in all, they differ by nothing."""
    blocks = [[block.mask for block in plan_blocks(SequenceMask(64), 4, rank, "zigzag", (1,) * 4)] for rank in range(4)]
    assert len({sum(mask.num_visible for mask in of_rank) for of_rank in blocks}) == 1
    for of_ranks in list(zip(*blocks, strict=True))[1:]:
        assert len({mask.num_visible for mask in of_ranks}) == 1
    assert all(len(mask.regions) == 1 for of_rank in blocks for mask in of_rank)


def test_a_short_window_reaches_the_neighbour_only() -> None:
    """Contiguous, a window of less than a shard: one distance, and rank 0 receives nothing."""
    mask = SequenceMask(64, True, (5, 0))
    assert active_distances(mask, 4, "contiguous") == (0, 1)
    others = [plan_blocks(mask, 4, rank, "contiguous", (1, 1))[1] for rank in range(4)]
    assert [{segment.owner for segment in block.segments} for block in others] == [set(), {0}, {1}, {2}]
