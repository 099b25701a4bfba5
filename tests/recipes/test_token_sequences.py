"""Documents packed into sequences and read in chunks, against plain lists. One process, CPU.

test_token_data.py compares batches with those of `prepare_batch`.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.lightning.text import PackedText
from ringflash import loss
from ringflash.data import SampleOrder, TokenFiles, TokenSequences
from ringflash.data.order import mix_lengths, shuffled
from ringflash.data.sequences import split
from ringflash.sequence.layout import chunks, local_positions
from ringflash.sequence.padding import IGNORE_INDEX
from tests.helpers.tokens import whole_sequence, write_tokens

DOCUMENTS = st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=40), min_size=1, max_size=12)
CP_SIZES = st.sampled_from([1, 2, 3, 4])
LAYOUTS = st.sampled_from(["zigzag", "contiguous", "balanced"])
UNITS = st.integers(1, 6)  # of tokens in a chunk
SHARED = settings(max_examples=60, deadline=None)


@contextmanager
def token_files(documents: list[list[int]], per_shard: int = 3) -> Iterator[TokenFiles]:
    """Token files for as long as the block runs: hypothesis calls a test many times with one tmp_path."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_tokens(Path(folder), documents, per_shard)


def sequences_of(files: TokenFiles, order: torch.Tensor, unit: int, cp_size: int, layout: str) -> list[TokenSequences]:
    """Sequences that each rank of a ring holds."""
    seqlen = 2 * cp_size * unit
    return [TokenSequences(files, order, seqlen, cp_size=cp_size, cp_rank=r, layout=layout) for r in range(cp_size)]


def put_together(parts: list[dict[str, Any]], name: str, layout: str) -> torch.Tensor:
    """The whole sequence out of the shards of all ranks."""
    shards = [part[name] for part in parts]
    whole = torch.zeros(1, sum(x.shape[1] for x in shards), dtype=torch.int64)
    for rank, x in enumerate(shards):
        whole[:, local_positions(whole.shape[1], len(shards), rank, layout, parts[0]["cu_seqlens"])] = x
    return whole


@SHARED
@given(DOCUMENTS, st.integers(1, 5), UNITS, CP_SIZES, LAYOUTS, st.integers(0, 99))
def test_shards_of_all_ranks_are_the_whole_sequence(
    documents: list[list[int]], per_shard: int, unit: int, cp_size: int, layout: str, seed: int
) -> None:
    """Tokens, labels, positions, bounds and count, with any order of the documents and any cut into files."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed))
    with token_files(documents, per_shard) as files:
        ranks = sequences_of(files, order, unit, cp_size, layout)
        for index in range(len(ranks[0])):
            parts = [sequences[index] for sequences in ranks]
            whole, bounds, num_tokens = whole_sequence([documents[i] for i in order], ranks[0].seqlen, index)
            labels = loss.shift_labels(whole, bounds)
            labels[:, num_tokens:] = IGNORE_INDEX
            assert torch.equal(put_together(parts, "input_ids", layout), whole)
            assert torch.equal(put_together(parts, "shift_labels", layout), labels)
            assert torch.equal(put_together(parts, "position_ids", layout)[0], torch.arange(whole.shape[1]))
            for part in parts:
                assert torch.equal(part["cu_seqlens"], bounds) and part["cu_seqlens"].dtype == torch.int32
                assert part["num_items_in_batch"] == max(1, int((labels != IGNORE_INDEX).sum()))


def test_every_epoch_has_another_order() -> None:
    """Each of all sequences; another seed has others."""

    def epochs(seed: int) -> list[list[int]]:
        drawn = iter(SampleOrder(50, seed=seed, dp_rank=0, dp_size=1, first=0))
        return [[next(drawn) for _ in range(50)] for _ in range(3)]

    orders = epochs(0) + epochs(1)
    with torch.device("meta"):
        assert epochs(0) == orders[:3]
        assert mix_lengths(torch.arange(9, device="cpu"), torch.ones(9, device="cpu")).sort().values.tolist() == [
            *range(9)
        ]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(map(tuple, orders))) == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dp_rank": 2}, r"dp_rank must be in \[0, 2\), got 2: ranks would train on the same samples"),
        ({"dp_rank": -1}, "got -1"),
        ({"first": -2}, "first 0 or more, got 50 and -2"),
        ({"num_sequences": 0}, "num_sequences must be 1 or more"),
    ],
)
def test_an_order_of_no_rank_or_sample_is_refused(given: dict[str, int], message: str) -> None:
    """A rank of the job would draw what a data rank has drawn."""
    with pytest.raises(ValueError, match=message):
        SampleOrder(**{"num_sequences": 50, "seed": 0, "dp_rank": 0, "dp_size": 2, "first": 0} | given)


@SHARED
@given(DOCUMENTS, UNITS, st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.integers(0, 99))
def test_another_world_size_continues_the_same_order(
    documents: list[list[int]], unit: int, before: int, after: int, steps: int, seed: int
) -> None:
    """Some steps on `before` data ranks, then on `after`: the sequences that one rank would draw."""
    with token_files(documents) as files:
        sequences = TokenSequences(files, torch.arange(len(documents)), 2 * unit)

    def drawn(dp_size: int, first: int, count: int) -> list[int]:
        ranks = [
            iter(SampleOrder(len(sequences), seed=seed, dp_rank=r, dp_size=dp_size, first=first))
            for r in range(dp_size)
        ]
        return [next(rank) for _ in range(count) for rank in ranks]

    consumed = before * steps
    assert drawn(before, 0, steps) + drawn(after, consumed, 3) == drawn(1, 0, consumed + 3 * after)


@SHARED
@given(DOCUMENTS, UNITS, st.sampled_from([2, 3, 4]), LAYOUTS)
def test_rank_reads_one_token_past_its_chunks(documents: list[list[int]], unit: int, cp_size: int, layout: str) -> None:
    """Reads of the files: no rank reads the whole sequence."""
    with token_files(documents) as files:
        read, counted = files.read, []

        def count(document: int, start: int, stop: int) -> Any:
            counted.append(stop - start)
            return read(document, start, stop)

        files.read = count  # type: ignore[method-assign]
        for ring in sequences_of(files, torch.arange(len(documents)), unit, cp_size, layout):
            for index in range(len(ring)):
                counted.clear()
                sample = ring[index]
                held = chunks(ring.seqlen, *ring.place, tuple(sample["cu_seqlens"].tolist()))
                assert sum(counted) <= sample["input_ids"].numel() + len(held)


@SHARED
@given(st.integers(2, 300), st.sampled_from([0.5, 5.0, 50.0]), st.integers(0, 99))
def test_split_holds_out_the_same_for_every_seed(count: int, percent: float, seed: int) -> None:
    """Each document in one of the parts; the seed only changes the order of training."""
    trained, held_out = split(count, percent, seed)
    assert sorted([*trained.tolist(), *held_out.tolist()]) == list(range(count))
    assert len(held_out) == -(-count * percent // 100)
    assert torch.equal(held_out, split(count, percent, seed + 1)[1])
    assert torch.equal(trained, split(count, percent, seed)[0])
    assert len(trained) < 100 or not torch.equal(trained, split(count, percent, seed + 1)[0])


@SHARED
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=300), st.integers(0, 99))
def test_mixed_documents_are_the_same_ones(lengths: list[int], seed: int) -> None:
    """In one order for each order that they had."""
    documents, sizes = shuffled(len(lengths), f"{seed}"), torch.tensor(lengths)
    mixed = mix_lengths(documents, sizes[documents])
    assert torch.equal(mixed.sort().values, torch.arange(len(lengths)))
    assert torch.equal(mixed, mix_lengths(documents.clone(), sizes[documents]))


def test_mixed_documents_make_similar_work() -> None:
    """Lengths of 128 to 32k, sequences of 262,144 tokens: the sums of squares differ by a third as much as shuffled."""
    lengths = (128 * 256 ** torch.rand(20000, generator=torch.Generator().manual_seed(0))).long()
    orders = [shuffled(len(lengths), name) for name in "ab"]
    mixed = [mix_lengths(order, lengths[order]) for order in orders]
    assert not torch.equal(*mixed)
    spreads = [work.std() / work.mean() for work in map(work_of_sequences, (lengths[x] for x in (*orders, *mixed)))]
    assert max(spreads[2:]) < 0.5 * min(spreads[:2])


def work_of_sequences(lengths: torch.Tensor) -> torch.Tensor:
    """Sums of squares of the documents in each sequence of 262,144 tokens."""
    ends = lengths.cumsum(0)
    count = int(ends[-1]) >> 18
    bounds = torch.cat([ends[ends < count << 18], torch.arange(count + 1) << 18]).unique()
    return torch.zeros(count).double().index_add_(0, bounds[:-1] >> 18, bounds.diff().double() ** 2)


def test_uncut_length_and_no_documents_are_refused(tmp_path: Path) -> None:
    """With what must hold; also a sequence that is not there, so that a loop over all of them ends."""
    files = write_tokens(tmp_path, [[1, 2, 3]], 1)

    def sequences(count: int, seqlen: int, **options: Any) -> TokenSequences:
        return TokenSequences(files, torch.arange(count), seqlen, **options)

    assert len(list(sequences(1, 2))) == len(list(PackedText([b"abcdefg"], 4))) == 2  # type: ignore[call-overload]
    with pytest.raises(IndexError, match="index must be from 0 to 1, got -1; sequences end there"):
        sequences(1, 2)[-1]
    for call, message in (
        (partial(sequences, 1, 6, cp_size=2), r"seqlen must be divisible by 2 \* cp_size \(4\), got 6; pad to 8"),
        (partial(sequences, 2, 8, cp_size=2, layout="documents"), "layout must not be 'documents' for packed token"),
        (partial(sequences, 0, 4), "documents must not be empty, got none; prepare more text"),
        # a book in one file: nothing would be left to train on
        (partial(split, 1, 5.0, 0), "must have more than 1 documents, which held_out_percent 5.0 holds out, got"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
