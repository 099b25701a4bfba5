"""Tokens of each rank, and padding that changes neither loss nor gradients. CPU, one process."""

import functools
import itertools
from typing import Any

import pytest
import torch

import ringflash
from ringflash.loss import cross_entropy, shift_labels
from ringflash.sequence.layout import chunks, granularity
from ringflash.sequence.tensor_cache import once_per_tensor
from ringflash.testing.tolerance import assert_close

LAYOUTS = ["zigzag", "striped", "contiguous"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp_size", range(1, 9))
def test_positions_are_shared_out(cp_size: int, layout: str) -> None:
    """Each position once; rising within a rank; as `chunks` says."""
    seqlen = 3 * granularity(cp_size, layout) if layout == "striped" else 6 * cp_size
    held = [ringflash.local_positions(seqlen, cp_size, rank, layout) for rank in range(cp_size)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(seqlen))
    for rank, positions in enumerate(held):
        assert positions.dtype == torch.int64 and positions.shape == (seqlen // cp_size,)
        assert bool((positions.diff() > 0).all())
        for chunk in chunks(seqlen, cp_size, rank, layout):
            rows = slice(chunk.row, chunk.row + chunk.stop - chunk.start)
            assert torch.equal(positions[rows], torch.arange(chunk.start, chunk.stop))


def test_worked_examples() -> None:
    assert ringflash.local_positions(16, 4, 1).tolist() == [2, 3, 12, 13]
    assert ringflash.local_positions(16, 4, 1, "contiguous").tolist() == [4, 5, 6, 7]
    assert ringflash.local_positions(256, 4, 1, "striped")[:6].tolist() == [1, 6, 9, 14, 17, 22]
    documents = torch.tensor([0, 1, 5, 6, 12], dtype=torch.int32)  # the longest is cut, with its ends on rank 0
    held = [ringflash.local_positions(12, 2, rank, "balanced", documents).tolist() for rank in range(2)]
    assert held == [[0, 5, 6, 7, 10, 11], [1, 2, 3, 4, 8, 9]]
    documents = torch.tensor([0, 4, 12], dtype=torch.int32)
    assert ringflash.local_positions(12, 2, 1, "documents", documents).tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_holds_everything(layout: str) -> None:
    x = torch.randn(2, 192, 3)
    assert torch.equal(ringflash.shard_sequence(x, None, layout=layout), x)
    assert torch.equal(ringflash.unshard_sequence(x, None, layout=layout), x)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((12, 4, 0), r"seqlen must be divisible by 2 \* cp_size \(8\), got 12; pad to 16"),
        ((13, 4, 0, "contiguous"), r"seqlen must be divisible by cp_size \(4\), got 13; pad to 16"),
        ((0, 2, 0), r"seqlen must be divisible by 2 \* cp_size \(4\), got 0; pad to 4"),
        ((16, 4, 4), r"cp_rank must be in \[0, 4\), got 4; pass"),
        ((12, 4, 0, "striped"), r"seqlen must be divisible by 64 \* cp_size \(256\), got 12; pad to 256"),
        ((13, 4, 0, "balanced"), r"seqlen must be divisible by cp_size \(4\), got 13; pad to 16"),
        ((16, 4, 0, "balanced"), "cu_seqlens must be given with layout='balanced', got None; pass the bounds"),
        ((16, 4, 0, "balanced", torch.tensor([0, 8])), r"cu_seqlens must end at the global .* \(16\), got 8"),
        ((16, 4, 0, "documents"), "cu_seqlens must be given with layout='documents', got None; pass the bounds"),
        (
            (24, 2, 0, "documents", torch.tensor([0, 8, 14, 24])),
            r"divisible by 2 \* cp_size \(4\) with layout='documents', got 6 tokens from 8; pad each \(pad_sequence",
        ),
        ((16, 4, 0, "braided"), "layout must be one of .*, got 'braided'; zigzag"),
    ],
)
def test_positions_refuse(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ringflash.local_positions(*arguments)


def train(tokens: torch.Tensor, labels: torch.Tensor, cu_seqlens: torch.Tensor | None, causal: bool) -> dict:
    """Loss and gradients of one layer of attention over the tokens."""
    generator = torch.Generator().manual_seed(1)
    table, head = (torch.randn(32, 16, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    x = table[tokens].unflatten(-1, (2, 8))
    hidden = ringflash.ring_attention(
        x, x * 0.5, x, group=None, causal=causal, cu_seqlens=cu_seqlens, layout="contiguous"
    ).flatten(2)
    loss = cross_entropy(hidden, head, labels, group=None)
    dtable, dhead = torch.autograd.grad(loss, (table, head))
    return {"loss": loss.detach()[None, None], "dtable": dtable, "dhead": dhead}


@pytest.mark.parametrize("layout, multiple_of", [*itertools.product(("zigzag", "contiguous"), (1, 16)), ("striped", 1)])
@pytest.mark.parametrize("bounds", [None, [0, 3, 13]])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_changes_nothing(layout: str, bounds: list[int] | None, causal: bool, multiple_of: int) -> None:
    bounds = bounds if causal or bounds else [0, 13]
    tokens = torch.randint(1, 32, (1, 13), generator=torch.Generator().manual_seed(0))
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    labels = shift_labels(tokens, cu_seqlens)
    positions = torch.cat([torch.arange(n) for n in torch.tensor(bounds or [0, 13]).diff()])[None]
    padded = ringflash.pad_sequence(
        tokens, labels, cu_seqlens, cp_size=4, layout=layout, multiple_of=multiple_of, causal=causal,
        position_ids=positions,
    )  # fmt: skip
    unit = granularity(4, layout) * multiple_of
    positions = padded.position_ids
    assert positions.shape == padded.tokens.shape and positions.dtype == torch.int64
    if bounds is None:
        assert torch.equal(positions, torch.arange(padded.tokens.shape[1])[None])
    else:
        assert torch.equal(ringflash.cu_seqlens_from_positions(positions), padded.cu_seqlens)
    assert padded.tokens.shape[1] == padded.labels.shape[1] == -(-13 // unit) * unit
    assert_close(train(*padded[:3], causal), train(tokens, labels, cu_seqlens, causal))
    if bounds is not None:
        assert padded.cu_seqlens.tolist() == [*bounds, padded.tokens.shape[1]]
        assert padded.cu_seqlens.dtype == torch.int32


def test_padding_of_each_document_changes_nothing() -> None:
    tokens = torch.randint(1, 32, (1, 13), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, 3, 4, 12, 13], dtype=torch.int32)
    pad = functools.partial(ringflash.pad_sequence, cp_size=2, layout="documents", multiple_of=2)
    labels = shift_labels(tokens, cu_seqlens)
    positions = torch.tensor([[0, 1, 2, 0, *range(8), 0]])
    padded = pad(tokens, labels, cu_seqlens, position_ids=positions)
    assert ringflash.cu_seqlens_from_positions(padded.position_ids).tolist() == [0, 8, 16, 24, 32]
    assert padded.cu_seqlens.tolist() == [0, 8, 16, 24, 32] and padded.cu_seqlens.dtype == torch.int32
    assert torch.equal(padded.tokens[0, 16:24], tokens[0, 4:12]) and padded.tokens[0, 3:8].eq(0).all()
    assert_close(train(*padded[:3], True), train(tokens, labels, cu_seqlens, True))
    assert pad(*padded[:3]).tokens is padded.tokens


def test_padding_nothing_returns_the_same() -> None:
    tokens = torch.ones(2, 16, dtype=torch.int64)
    padded = ringflash.pad_sequence(tokens, cp_size=4, position_ids=tokens)
    assert padded.tokens is tokens and padded.position_ids is tokens


def test_bounds_from_positions() -> None:
    """A document begins with each row and at each restart; one of a single token follows another."""
    rows = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    bounds = ringflash.cu_seqlens_from_positions(rows)
    assert bounds.tolist() == [0, 3, 5, 6, 10] and bounds.dtype == torch.int32
    assert [ringflash.cu_seqlens_from_positions(row).tolist() for row in rows] == [[0, 3, 5], [0, 1, 5]]
    for wrong, message in (
        (rows[:, 1:], "must count from 0 in each document, .* starts elsewhere, at 1; give those of whole rows"),
        (torch.tensor([0, 1, 3, 4]), "starts elsewhere, at 3"),
        (rows[None], r"must be \(batch, seqlen\) or \(seqlen,\), got \(1, 2, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ringflash.cu_seqlens_from_positions(wrong)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"causal": False}, "cu_seqlens must be given to pad .* that is not causal, got None; pass"),  # would be seen
        ({"multiple_of": 0}, "multiple_of must be 1 or more, got 0; leave it out"),
        ({"multiple_of": -1}, "multiple_of must be 1 or more, got -1; leave it out"),
        ({"position_ids": torch.ones(2, 8)}, r"must have the shape of tokens \(1, 13\) or one row, got \(2, 8\)"),
        ({"layout": "documents"}, "cu_seqlens must be given to pad each document, got None"),
        (
            {"layout": "documents", "cu_seqlens": torch.tensor([0, 3, 12])},
            r"cu_seqlens must end at the global sequence length \(13\), got 12",
        ),
        (
            {"layout": "documents", "cu_seqlens": torch.tensor([0, 3, 13]), "causal": False},
            r"multiples of 4 if attention is not causal, got \[3, 10\]",
        ),
    ],
)
def test_padding_refuses(options: dict[str, Any], message: str) -> None:
    options = {name: x.int() if name == "cu_seqlens" else x for name, x in options.items()}
    with pytest.raises(ValueError, match=message):
        ringflash.pad_sequence(torch.ones(1, 13, dtype=torch.int64), cp_size=2, **options)


@pytest.mark.parametrize("layout", ["zigzag", "documents"])
def test_labels_without_room_for_none_are_refused(layout: str) -> None:
    tokens, bounds = torch.ones(1, 13, dtype=torch.uint8), torch.tensor([0, 13], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cannot be converted"):
        ringflash.pad_sequence(tokens, tokens, bounds, cp_size=2, layout=layout)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.uint16])
def test_shifted_labels_end_with_their_document(dtype: torch.dtype) -> None:
    """In a dtype without -100, it would be 156 or 65,436, which may be tokens."""
    tokens = torch.tensor([[5, 6, 7, 8, 9]]).to(dtype)
    assert shift_labels(tokens).dtype == torch.int64 and shift_labels(tokens).tolist() == [[6, 7, 8, 9, -100]]
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert shift_labels(tokens, bounds).tolist() == [[6, -100, 8, 9, -100]]


def test_tensors_are_read_once_until_written_to() -> None:
    read: list[list[int]] = []
    bounds = once_per_tensor(lambda x: read.append(x.tolist()) or x.tolist())  # type: ignore[func-returns-value]
    rows = [torch.tensor([0, n]) for n in range(1, 10)]
    for _ in range(3):  # layers, which attend the rows of a batch in turn
        assert [bounds(row) for row in rows] == [[0, n] for n in range(1, 10)]
    rows[4].mul_(2)
    assert bounds(rows[4]) == [0, 10] and bounds(rows[3]) == [0, 4]
    assert len(read) == 10
