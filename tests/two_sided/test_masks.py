"""Masks of trees as kernels read them, for gathered keys. CPU, one process; more masks in tests/unit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ringflash
from ringflash.attention import schedule
from ringflash.sequence import layout
from ringflash.sequence.mask import SequenceMask
from tests.two_sided.forests import Forest, block_diffusion, images, prefix_lm, random_forest, rollouts
from tests.two_sided.kernel_masks import keys_of, mask_of, one_by_one, sequence_mask

FAMILIES = {
    "rollouts": rollouts(37, [11, 20, 5, 23]),
    "prefix lm": prefix_lm(40, 56),
    "images": images([(10, 16), (3, 16), (12, 16), (7, 16)]),
    "images, window": images([(10, 16), (3, 16), (12, 16), (7, 16)], left=20),
    "block diffusion": block_diffusion(6, 8),
    "window, global tokens": Forest((50, 30, 16), (-1, -1, 1), (False,) * 3, left=11, global_tokens=(4, 7, 7)),
    "window, global prompts": replace(rollouts(25, [30, 24, 17]), left=9, global_tokens=(27,) * 4),
}


def by_ends(mask) -> torch.Tensor:
    """An interval of keys for each query, and an end for each key."""
    (start, stop), rows, keys = mask.bounds(), torch.arange(mask.seqlen_q)[:, None], torch.arange(mask.seqlen_k)
    return (keys >= start[:, None]) & (keys < stop[:, None]) & (rows < mask.ends())


def by_begins(mask) -> torch.Tensor:
    """An interval of queries for each key, and a first key for each query."""
    side = mask.cached("transposed", mask.transposed)
    assert side.num_visible == mask.num_visible and torch.equal(side.dense().T, mask.dense())
    (first, last), rows, keys = side.bounds(), torch.arange(mask.seqlen_q)[:, None], torch.arange(mask.seqlen_k)
    return (rows >= first) & (rows < last) & (keys >= mask.begins()[:, None])


def _cases(number: int) -> list[Forest]:
    return [*FAMILIES.values(), *(random_forest(seed, 96) for seed in range(number))]


number_of_forests = pytest.mark.parametrize("number", [8, pytest.param(150, marks=pytest.mark.nightly)])


@number_of_forests
@pytest.mark.parametrize(
    "cp_size, layout", [(1, "contiguous"), (2, "zigzag"), (4, "zigzag"), (4, "balanced"), (3, "contiguous")]
)
def test_gathered_keys_are_the_mask(cp_size: int, layout: str, number: int) -> None:
    """Each pair of local rows and keys is visible if the definition says so, and none is missing, also in blocks."""
    for forest in _cases(number):
        mask, want = sequence_mask(forest), forest.visible()
        positions = [ringflash.local_positions(96, cp_size, rank, layout, forest.table) for rank in range(cp_size)]
        assert mask.num_visible == int(want.sum())
        for rank in range(cp_size):
            whole = schedule.plan_single_block(mask, cp_size, rank, layout)
            blocks = one_by_one(mask, cp_size, rank, layout)
            for found in (whole, *blocks):
                keys = keys_of(found, positions)
                assert (keys >= 0).all() and (keys.diff() > 0).all()
                assert torch.equal(found.mask.dense(), want[positions[rank]][:, keys])
                assert found.mask.num_visible == int(found.mask.dense().sum())
                assert torch.equal(by_ends(found.mask), found.mask.dense()), "what the kernels read"
                assert torch.equal(by_begins(found.mask), found.mask.dense()), "what the backward's kernels read"
            unseen = torch.ones(96, dtype=torch.bool)
            unseen[keys_of(whole, positions)] = False
            assert not want[positions[rank]][:, unseen].any()
            assert sum(block.mask.num_visible for block in blocks) == whole.mask.num_visible


@pytest.mark.parametrize(
    "forest", [images([(30, 98)] * 64), block_diffusion(64, 64)], ids=["images", "block diffusion"]
)
def test_regions_by_key_are_few(forest: Forest) -> None:
    """Not one for each document and chunk of later queries: 64 under striped."""
    found = schedule.plan_single_block(sequence_mask(forest), 8, 3, "striped").mask
    assert torch.equal(by_begins(found), found.dense())
    assert len(found.cached("transposed", found.transposed).regions) <= len(forest.lengths)


def test_which_families_are_one_sided() -> None:
    """Prefix-LM, image spans and block-causal masks need no new kernel."""
    found = {name: mask_of(forest).is_two_sided for name, forest in FAMILIES.items()}
    assert found == {
        "rollouts": True,
        "prefix lm": False,
        "images": False,
        "images, window": False,
        "block diffusion": True,
        "window, global tokens": True,
        "window, global prompts": True,
    }


def test_refusals() -> None:
    for parents in ((0,), (-1, 1), (-1, 0, 0, 1), (-1, -1, 0)):
        with pytest.raises(ValueError, match="depth first"):
            SequenceMask(8, cu_seqlens=tuple(range(len(parents))) + (8,), parents=parents)
    with pytest.raises(ValueError, match="one entry for each document"):
        SequenceMask(8, cu_seqlens=(0, 8), parents=(-1, 0))
    for counts, why in (
        ((2, 2, 2), "must include all of a document that several continue, got 2 for document 0, whose path has 3"),
        ((3, 3, 0), "must be 0 or more, and the same .* got 0 for document 2, which continues one with 3"),
        ((-1, -1, -1), "must be 0 or more, .* got -1"),
    ):
        with pytest.raises(ValueError, match=f"global_tokens {why}"):
            SequenceMask(8, cu_seqlens=(0, 3, 5, 8), parents=(-1, 0, 0), global_tokens=counts)


def test_a_chain_is_placed_as_one_document() -> None:
    """Texts with images lie in as few pieces as plain documents that are as long."""
    text = images([(60, 20)] * 16)
    chains = Forest(
        text.lengths * 8,
        tuple(-1 if p < 0 else 32 * i + p for i in range(8) for p in text.parents),
        text.bidirectional * 8,
    )
    plain = Forest((text.seqlen,) * 8, (-1,) * 8, (False,) * 8)
    counts = [
        [len(layout.chunks(8 * text.seqlen, 5, rank, "balanced", sequence_mask(x).documents)) for rank in range(5)]
        for x in (chains, plain)
    ]
    assert max(counts[0]) <= max(counts[1]) + 2


@pytest.mark.parametrize("seed", range(5))
def test_heaviest_child_first_bounds_the_runs(seed: int) -> None:
    """See DESIGN.md: then a path has at most 1 + log2(documents) runs."""
    import random

    rng = random.Random(seed)
    count = 400
    parent = [-1] + [rng.randint(max(0, i - 3), i - 1) for i in range(1, count)]
    children: list[list[int]] = [[] for _ in range(count)]
    for i, p in enumerate(parent):
        if p >= 0:
            children[p].append(i)
    size = [1] * count
    for i in reversed(range(1, count)):
        size[parent[i]] += size[i]
    order: list[int] = []
    stack = [0]
    while stack:
        i = stack.pop()
        order.append(i)
        stack += sorted(children[i], key=lambda c: size[c])
    place = {i: n for n, i in enumerate(order)}
    mask = SequenceMask(
        count,
        cu_seqlens=tuple(range(count + 1)),
        parents=tuple(-1 if parent[i] < 0 else place[parent[i]] for i in order),
    )
    assert max(len(mask.path(i)) for i in range(count)) <= 1 + count.bit_length()
