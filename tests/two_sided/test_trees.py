"""Rollouts packed with their common prefixes once, and spans as transformers sees them. CPU, one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import ringflash
from ringflash.attention import schedule
from ringflash.huggingface.spans import spans_fit, without_directions
from ringflash.sequence.layout import read_documents
from ringflash.sequence.mask import SequenceMask


def _rollouts(seed: int) -> list[list[int]]:
    """Sequences that share prefixes, some of them a prefix of another, some equal."""
    rng = random.Random(seed)

    def draw(n: int) -> list[int]:
        return [rng.randrange(50) for _ in range(n)]

    found: list[list[int]] = []
    for _ in range(2):
        paths = [draw(rng.randint(5, 12))]
        for _ in range(3):
            paths += [rng.choice(paths) + draw(rng.randint(1, 9)) for _ in range(3)]
        found += rng.sample(paths, 6)
    return [*found, found[0]]


@pytest.mark.parametrize("min_shared", [1, 4])
@pytest.mark.parametrize("seed", range(10))
def test_packing(seed: int, min_shared: int) -> None:
    sequences = _rollouts(seed)
    packed = ringflash.share_prefixes(sequences, min_shared=min_shared)
    tokens, total = packed.input_ids[0], sum(map(len, sequences))
    assert len(tokens) < total
    documents = read_documents(packed.cu_seqlens)
    mask = SequenceMask(len(tokens), True, (-1, -1), documents.bounds, documents.parents)  # depth first, or it raises
    assert len(packed.rows) == len(sequences)
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for i in range(len(documents.bounds) - 1):
        for r in mask.regions_of(i, 0, len(tokens)):
            seen[r.q_start : r.q_stop, r.k_start : r.k_stop] = True
    seen &= torch.ones_like(seen).tril()
    for sequence, rows in zip(sequences, packed.rows, strict=True):
        assert packed.labels[0, rows].tolist() == sequence[1:]
        assert packed.position_ids[0, rows].tolist() == list(range(len(sequence) - 1))
        for j, row in enumerate(rows.tolist()):
            assert tokens[seen[row]].tolist() == sequence[: j + 1], "a token sees exactly its own prefix"
    used = torch.cat(packed.rows).unique()
    assert (packed.labels[0] != -100).nonzero()[:, 0].tolist() == used.tolist(), "no label that no sequence has"


def test_packing_by_hand() -> None:
    """The example of the module, a sequence within another one, and what is too short to share."""
    packed = ringflash.share_prefixes([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9]])
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 7, 8, 9, 4, 5, 6]]
    assert packed.labels.tolist() == [[2, 3, 4, 7, 8, 9, -100, 5, 6, -100]]
    assert packed.cu_seqlens.tolist() == [[0, 3, 7, 10], [-1, 0, 0, -1], [0] * 4, [0] * 4]
    assert [x.tolist() for x in packed.unpack(torch.arange(12)[None])] == [[0, 1, 2, 7, 8], [0, 1, 2, 3, 4, 5]]
    within = ringflash.share_prefixes([[1, 2, 3], [1, 2, 3, 4], [1, 2, 3]])
    assert within.input_ids.tolist() == [[1, 2, 3, 4]] and [len(x) for x in within.rows] == [2, 3, 2]
    for apart in ([[1], [2, 3]], [[1, 2], [1, 3]]):
        assert ringflash.share_prefixes(apart, min_shared=2).cu_seqlens[1].tolist() == [-1, -1, -1]
    short = ringflash.share_prefixes([[1, 2, 3, 4], [1, 2, 3, 5], [1, 9]], min_shared=2)
    assert short.input_ids.tolist() == [[1, 2, 3, 4, 3, 5, 1, 9]], "those that share more do, though all share less"
    for wrong in ([], [[1], []], [torch.tensor([[1, 2]])]):
        with pytest.raises(ValueError, match="1-D with one token or more"):
            ringflash.share_prefixes(wrong)
    with pytest.raises(ValueError, match=r"sequences must be integers, token ids, got \['float32'\]"):
        ringflash.share_prefixes([torch.tensor([1.5, 2.5])])
    with pytest.raises(ValueError, match="min_shared must be 1 or more, got 0"):
        ringflash.share_prefixes([[1]], min_shared=0)
    for values in (torch.zeros(9), torch.zeros(2, 10), torch.zeros(1, 10, 3)):
        with pytest.raises(ValueError, match=r"values must be \(10,\) or \(1, 10\)"):
            packed.unpack(values)


@pytest.mark.parametrize("spans", [((4, 20), (20, 21), (33, 60), (100, 120)), ((0, 70),)], ids=["images", "prefix"])
@pytest.mark.parametrize("window", [None, 7, 25])
def test_spans_are_those_of_transformers(window: int | None, spans: tuple[tuple[int, int], ...]) -> None:
    """Gemma 3 and 4: in full layers causal or the same image; in windows layers that, and in the window. PaliGemma."""
    from transformers import masking_utils as hf

    types = torch.zeros(120, dtype=torch.long)
    for a, b in spans:
        types[a:b] = 1
    starts = (types == 1) & (F.pad(types, (1, 0))[:-1] != 1)
    ids = torch.where(types == 1, starts.cumsum(0) - 1, -1)
    overlay = hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(ids[None]))
    if window is not None:
        overlay = hf.and_masks(overlay, hf.sliding_window_overlay(window))
    index = torch.arange(120)
    want = overlay(torch.tensor(0), torch.tensor(0), index[:, None], index[None])
    documents = read_documents(ringflash.span_documents(ids))
    mask = SequenceMask(120, True, (-1 if window is None else window - 1, -1), *documents)
    assert torch.equal(schedule.plan_own_keys(mask, "contiguous").dense(), want)


def test_tables_without_spans() -> None:
    """Made once for a table, and again after a change in place; also in inference mode, which counts no changes."""
    table = ringflash.span_documents(torch.tensor([-1, 0, 0, -1]))
    causal = without_directions(table)
    assert causal.tolist() == [[0, 1, 3, 4], [-1, 0, 1, -1], [0] * 4, [0] * 4] and without_directions(table) is causal
    table[0, 1] = 2
    assert without_directions(table)[0].tolist() == [0, 2, 3, 4]
    with torch.inference_mode():
        assert torch.equal(without_directions(ringflash.span_documents(torch.tensor([-1, 0, 0, -1]))), causal)


def test_images_that_see_one_another() -> None:
    """Molmo 2 gives all images one number, which documents cannot express."""
    ids = torch.tensor([0, 0, -1, 0])
    with pytest.raises(NotImplementedError, match="one number in two spans"):
        ringflash.span_documents(ids)
    two, one = (ringflash.span_documents(torch.tensor(x)) for x in ([0, 0, -1, 1], [0, 0, -1, -1]))
    positions = torch.arange(4)
    assert spans_fit(torch.tensor([[0, 0, -1, 1]]), positions, two) and not spans_fit(ids[None], positions, two)
    assert spans_fit(torch.tensor([[0, 0, -1, -1]]), positions, one) and not spans_fit(ids[None], positions, one)
    packed = ringflash.span_documents(torch.tensor([0, 0, -1, 1]), torch.tensor([0, 3, 4], dtype=torch.int32))
    assert spans_fit(ids[None], positions, packed), "prefixes of packed documents have one number"
    joined, number = torch.tensor([[0, 0, 0, -1]]), torch.tensor([[0, 0, 1, -1]])  # a model's, and the user's
    packed = ringflash.span_documents(number, torch.tensor([0, 2, 4], dtype=torch.int32))
    assert spans_fit(joined, positions, packed) and spans_fit(joined, positions, ringflash.span_documents(joined))
    assert not spans_fit(joined, positions, ringflash.span_documents(number)), "a model sees neighbours as one span"
    for wrong, bounds in ((number.expand(2, -1), None), (number, torch.tensor([0, 3], dtype=torch.int32))):
        with pytest.raises(ValueError, match="must be .seqlen,. or|must end at the global"):
            ringflash.span_documents(wrong, bounds)
