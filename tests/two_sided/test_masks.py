"""Masks of trees: their regions and pieces, and refusals. CPU, one process; more in tests/unit/test_gathering.py."""

from __future__ import annotations

import pytest

from ringflash.attention import schedule
from ringflash.sequence import layout
from ringflash.sequence.mask import SequenceMask
from tests.two_sided.forests import FAMILIES, Forest, block_diffusion, images
from tests.two_sided.kernel_masks import mask_of, sequence_mask


@pytest.mark.parametrize(
    "forest", [images([(30, 98)] * 64), block_diffusion(64, 64)], ids=["images", "block diffusion"]
)
def test_regions_by_key_are_few(forest: Forest) -> None:
    """Not one for each document and chunk of later queries: 64 under striped."""
    found = schedule.plan_single_block(sequence_mask(forest), 8, 3, "striped").mask
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
    assert len(sequence_mask(text).path(len(text.lengths) - 1)) == 1  # neighbours are one run of keys
