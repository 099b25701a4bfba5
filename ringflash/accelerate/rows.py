"""Rows of a batch as accelerate's loaders give them: padded, or packed with position_ids."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.sequence.documents import cu_seqlens_of, document_starts
from ringflash.sequence.padding import IGNORE_INDEX
from ringflash.sequence.trees import places_of, share_prefixes, span_documents


class TokenTypes(NamedTuple):
    """Token types of a model that makes spans of them, whose tokens see one another.

    Args:
        name: argument of the model.
        values: types, as the input_ids.
        spans: number of each token's span, -1 for others, as the input_ids.
        text: a type of text, for padding.
    """

    name: str
    values: Tensor
    spans: Tensor
    text: int


class BatchRows(NamedTuple):
    """Tokens of a batch, without padding if any row has some, and the documents that they form.

    Args:
        input_ids, labels: (batch, seqlen), or (1, total_tokens) if rows are padded or packed, or have types; labels
            are shifted.
        cu_seqlens: (num_documents + 1,), int32, on the CPU, or None where each row is one document; a table with types.
        indices: (total_tokens,), int64, index of each token in the flattened batch, or None for all of them.
        length: largest position in the batch as transformers counts them, plus 1.
        columns: (1, total_tokens), int64, index of each token in its row of the batch, or None if rows are unchanged.
        places: shape of the input_ids before `share_rows`, int64: index of each labelled token among the tokens that
            `share_rows` kept, -1 for others; None without `share_rows`.
        types: token types of the tokens, if the model makes spans of them.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None
    indices: Tensor | None
    length: int
    columns: Tensor | None
    places: Tensor | None = None
    types: TokenTypes | None = None


def shift_rows(labels: Tensor) -> Tensor:
    """Return the label after each token, also over the bounds of documents, as transformers' own loss does."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def read_rows(
    input_ids: Tensor,
    labels: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    bounds: Tensor | None = None,
    left_padding: bool = False,
    types: TokenTypes | None = None,
) -> BatchRows:
    """Return the tokens and documents of a batch.

    Args:
        input_ids: (batch, seqlen), int64.
        labels: (batch, seqlen), already shifted, -100 for none.
        attention_mask: (batch, seqlen), 1 for a token and 0 for padding.
        position_ids: (batch or 1, seqlen), counted from 0 in each document.
        bounds: (num_documents + 1,), document bounds of a single row (a collator's cu_seq_lens_q).
        left_padding: allow padding before a row's tokens, whose positions then count from its first token.
        types: of the tokens, (batch, seqlen).
    Raises:
        ValueError: a mask with other numbers than 0 and 1, whose tokens are not one interval, or that begins with
            padding; bounds of documents together with a mask; positions that do not count from 0 in each document;
            labels in padding.
        NotImplementedError: a document with two spans of one number.
    """
    shape = tuple(input_ids.shape)
    for name, x in (
        ("labels", labels),
        ("attention_mask", attention_mask),
        (types and types.name, types and types.values),
    ):
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(
                f"{name} must have the shape of input_ids {shape}, got {tuple(x.shape)}; leave 4-D masks out, and pack "
                "documents with position_ids."
            )
    is_token = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    if attention_mask is not None and bool((attention_mask[is_token] != 1).any()):
        raise ValueError(
            f"attention_mask must be 0 or 1, got values up to {attention_mask.max()}: numbers of documents would all "
            "be read as 1; to pack documents, pass position_ids that restart, without an attention_mask."
        )
    begins = is_token & ~is_token.roll(1, 1)
    begins[:, 0] = is_token[:, 0]
    _check_mask(begins, left_padding)
    starts = _document_starts(is_token, begins, position_ids, attention_mask is not None)
    if bounds is not None:
        starts = _compare(bounds, starts, position_ids is not None)
    length = input_ids.shape[1] if position_ids is None else int(position_ids.max()) + 1
    padded = not bool(is_token.all())
    if not padded and types is None and not bool(starts[:, 1:].any()):
        return BatchRows(input_ids, labels, None, None, length, None)
    if bool((labels != IGNORE_INDEX)[~is_token].any()):
        raise ValueError(
            f"labels must be {IGNORE_INDEX} where attention_mask is 0, got a token; let the collator write them."
        )
    indices = is_token.flatten().nonzero()[:, 0]
    bounds = cu_seqlens_of(starts.flatten()[indices])
    cu_seqlens = None if len(bounds) == 2 else bounds
    tokens, shifted = input_ids.flatten()[indices][None], labels.flatten()[indices][None]
    columns = indices[None] % input_ids.shape[1]
    if types is not None:
        values, spans = (x.flatten()[indices][None] for x in (types.values, types.spans))
        types = types._replace(values=values, spans=spans)
        cu_seqlens = _with_spans(spans[0].cpu(), bounds)
    return BatchRows(tokens, shifted, cu_seqlens, indices, length, columns, types=types)


def _with_spans(spans: Tensor, bounds: Tensor) -> Tensor:
    """Return the table of documents whose spans are numbered for each document or row."""
    document = torch.repeat_interleave(torch.arange(len(bounds) - 1, device="cpu"), bounds.diff())
    return span_documents(torch.where(spans < 0, -1, spans + document * (spans.max() + 1)), bounds)


def share_rows(rows: BatchRows, min_shared: int) -> BatchRows:
    """Return a batch with the common beginnings of its documents once; the host reads the tokens.

    Raises:
        ValueError: labels that are not the next tokens.
        NotImplementedError: token types.
    """
    if rows.types is not None:
        raise NotImplementedError(
            f"{rows.types.name} must be None with share_prefixes, got a tensor; leave one of the two out."
        )
    tokens, labels = rows.input_ids.flatten().cpu(), rows.labels.flatten().cpu()
    bounds = range(0, len(tokens) + 1, rows.input_ids.shape[1])
    spans = list(pairwise(bounds if rows.cu_seqlens is None else rows.cu_seqlens.tolist()))
    packed = share_prefixes([tokens[start:stop] for start, stop in spans], min_shared=min_shared)
    places = places_of(packed, spans, len(tokens))
    labelled = labels != IGNORE_INDEX
    used, wanted = places[labelled], torch.full_like(packed.labels, IGNORE_INDEX)
    if bool((used < 0).any()) or bool((packed.labels[0, used] != labels[labelled]).any()):
        raise ValueError(
            "labels must be the next tokens of a row with share_prefixes, got other tokens; leave one of the two out."
        )
    wanted[0, used] = labels[labelled]
    places[~labelled] = -1  # also if another row has a label at the shared token
    device = rows.input_ids.device
    return rows._replace(
        input_ids=packed.input_ids.to(device), labels=wanted.to(device), cu_seqlens=packed.cu_seqlens, columns=None,
        places=places.view_as(rows.input_ids).to(device),
    )  # fmt: skip


def _check_mask(begins: Tensor, left_padding: bool) -> None:
    """Raise ValueError unless every row has one interval of tokens, from its first column on unless `left_padding`.

    Args:
        begins: (batch, seqlen), bool: tokens that follow padding, or nothing.
    """
    if not bool(begins.any()) or bool((begins.sum(1) > 1).any()):
        raise ValueError(
            "attention_mask must be 1 on one interval of each row, got a row with holes or no token at all; pack "
            "documents with position_ids, without an attention_mask."
        )
    if not left_padding and bool(begins[:, 1:].any()):
        raise ValueError(
            "attention_mask must be 0 on the right of the tokens only, got padding before a token; set "
            "tokenizer.padding_side = 'right'."
        )


def _document_starts(is_token: Tensor, begins: Tensor, position_ids: Tensor | None, masked: bool) -> Tensor:
    """Return a mask of the first token of each document: (batch, seqlen), bool.

    Args:
        begins: mask of the first token of each row.
    """
    if position_ids is None:
        return begins
    if position_ids.dim() != 2 or position_ids.shape[1] != is_token.shape[1]:
        raise ValueError(
            f"position_ids must be (batch, {is_token.shape[1]}), got {tuple(position_ids.shape)}; leave them out."
        )
    resets = document_starts(position_ids.expand(is_token.shape), is_token)
    if masked and bool((resets & ~begins).any()):
        raise ValueError(
            "attention_mask must be left out if position_ids restart within a row, got both, which transformers' "
            "attentions read differently; use a collator that flattens (DataCollatorWithFlattening, padding_free)."
        )
    return resets


def _compare(bounds: Tensor, starts: Tensor, positioned: bool) -> Tensor:
    """Return the starts of the documents that `bounds` describes, which positions must not contradict."""
    described = torch.zeros_like(starts)
    if len(starts) == 1 and bounds.dim() == 1 and int(bounds[-1]) == starts.shape[1]:
        described[0, bounds[:-1].long()] = True
    if not bool(described[:, 0].all()) or (positioned and not torch.equal(described, starts)):
        raise ValueError(
            f"cu_seq_lens_q must be the bounds of the documents of one row of {starts.shape[1]} tokens, got "
            f"{bounds.tolist()[:8]} for {len(starts)} rows; leave them out if position_ids are given."
        )
    return described
