"""Sharded batches: this rank's ids, positions and labels, all cut by the same layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringflash import loss as token_loss
from ringflash.comm.comparison import checksum_of_integers
from ringflash.comm.group import Group, resolve
from ringflash.huggingface.options import ModelRing
from ringflash.sequence.layout import cut_sequence, local_positions, read_documents
from ringflash.sequence.padding import IGNORE_INDEX
from ringflash.sequence.paths import paths_of
from ringflash.sequence.trees import span_documents


def prepare_batch(
    input_ids: Tensor,
    *,
    group: Group,
    cu_seqlens: Tensor | None = None,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    layout: str = "zigzag",
    position_ids: str | Tensor = "global",
    block_sequence_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    mm_token_type_ids: Tensor | None = None,
) -> dict[str, Any]:
    """Return this rank's shard of a batch that every rank holds whole, as keyword arguments for model(**batch).

    `CausalLMWithLoss` turns it into a loss with the scale of `ringflash.loss`. transformers' own loss,
    model(**batch, labels=batch["shift_labels"]).loss, is the rank's sum over the labelled tokens of the whole
    sequence: multiply it by cp_size for backends that average over all ranks.

    Args:
        input_ids: (batch, seqlen), int64, whole sequence.
        cu_seqlens: (num_documents + 1,), int32, document bounds in the whole sequence, or a table of
            `ringflash.document_table`; batch must then be 1. The layout "balanced" needs them.
        labels: (batch, seqlen), already shifted (`ringflash.loss.shift_labels`, `pad_sequence`), with -100 for none;
            default is the successor of each token within its document.
        attention_mask: (batch, seqlen), 1 for a token and 0 for padding, which may be at the end of a row or, with
            cu_seqlens, of a document. Padding has no labels, and the balancing loss of experts leaves it out.
        position_ids: "global", or "document" to count from 0 in each document, or on from its parent
            (needs cu_seqlens). Or the three parts of M-RoPE (Qwen-VL), (3, batch, seqlen), from the model's
            `get_rope_index`; the shard then has four, the global positions first.
        block_sequence_ids: (1, seqlen) or (seqlen,), spans of tokens that see one another, such as images and
            prefixes: the number of each token's span, -1 for others (`ringflash.span_documents`). A token that sees its
            successor has no label by default.
        token_type_ids, mm_token_type_ids: (batch, seqlen), those of a model that makes spans of them (Gemma 3 and 4,
            PaliGemma, HRM-Text); it must be given block_sequence_ids of the same spans.
    Returns:
        batch: input_ids, position_ids, shift_labels (shards), num_items_in_batch (scalar), cu_seqlens (whole; a table
            with block_sequence_ids), use_cache (False); with an attention_mask also is_token (shard, bool); with token
            types, these (shards); in a group also checksum (scalar), by which layer 0 checks that all ranks had the
            same sequence.
    Raises:
        ValueError: a length the layout cannot cut; labels that are not shifted, or negative but not -100;
            padding before a token, or with labels. On this rank only: nothing is sent.
    """
    if block_sequence_ids is not None:
        cu_seqlens = span_documents(block_sequence_ids, cu_seqlens)
    if labels is not None:  # only to find out whether they are shifted
        successors = token_loss.shift_labels(input_ids)
    else:
        successors = token_loss.shift_labels(input_ids, cu_seqlens)
    if attention_mask is not None:
        check_padding(attention_mask, input_ids, labels, cu_seqlens)
        followed = attention_mask.roll(-1, 1) != 0
        successors = successors.masked_fill((attention_mask == 0) | ~followed, IGNORE_INDEX)
    if labels is None:
        labels = successors
    else:
        _check_shifted(labels, input_ids, successors)
    options = ModelRing(resolve(group), layout=layout)
    batch = {
        "input_ids": cut_sequence(input_ids, group, 1, layout, cu_seqlens),
        "position_ids": _position_shard(position_ids, input_ids, options, cu_seqlens),
        "shift_labels": cut_sequence(labels, group, 1, layout, cu_seqlens),
        "num_items_in_batch": (labels != IGNORE_INDEX).sum().clamp(min=1),
        "cu_seqlens": cu_seqlens,
        "use_cache": False,
    }
    shared = [input_ids, labels]
    if attention_mask is not None:
        batch["is_token"] = cut_sequence(attention_mask, group, 1, layout, cu_seqlens) != 0
        shared.append(attention_mask)
    for name, types in (("token_type_ids", token_type_ids), ("mm_token_type_ids", mm_token_type_ids)):
        if types is not None:
            batch[name] = cut_sequence(types, group, 1, layout, cu_seqlens)
            shared.append(types)
    return batch if options.group is None else batch | {"checksum": checksum_of_integers(*shared)}


def _position_shard(
    position_ids: str | Tensor, input_ids: Tensor, options: ModelRing, cu_seqlens: Tensor | None
) -> Tensor:
    """Return this rank's positions: (1, seqlen_local), or for M-RoPE its axes after them, (4, batch, seqlen_local).

    Args: as `prepare_batch`.
    """
    seqlen, layout = input_ids.shape[1], options.layout
    parts = position_ids if isinstance(position_ids, Tensor) else None
    if parts is not None and (parts.dim() != 3 or len(parts) != 3 or parts.shape[2] != seqlen):
        raise ValueError(
            f"position_ids must be (3, batch, {seqlen}) if they are a tensor, got {tuple(parts.shape)}; "
            "leave them out for positions in the sequence."
        )
    positions = local_positions(seqlen, *options.size_and_rank, layout, cu_seqlens).to(input_ids.device)
    if parts is None and position_ids == "document" and cu_seqlens is not None:
        return within_documents(positions, cu_seqlens)[None]
    if cu_seqlens is not None and read_documents(cu_seqlens).has_branches:
        raise ValueError(
            f"position_ids must be 'document' for documents that branch, got {position_ids!r}: distances of positions "
            "must be those along the path; pass position_ids='document'."
        )
    if parts is not None:
        shard = cut_sequence(parts, options.group, 2, layout, cu_seqlens)
        return torch.cat([positions.expand(1, shard.shape[1], -1), shard])
    if position_ids != "global":
        raise ValueError(
            f"position_ids must be 'global', or 'document' with cu_seqlens, got {position_ids!r}; leave it out."
        )
    return positions[None]


def within_documents(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return positions counted from 0 along the path of each token's document."""
    bounds = shifts = cu_seqlens
    if cu_seqlens.dim() > 1:
        bounds, documents = cu_seqlens[0], read_documents(cu_seqlens)
        shifts = torch.tensor(paths_of(documents.bounds, documents.parents).shifts, device="cpu")
    bounds, shifts = (x.to(positions.device, positions.dtype) for x in (bounds, shifts))
    document = torch.searchsorted(bounds, positions, right=True) - 1
    return positions - shifts[document.clamp(min=0)]


def _starts_after_padding(table: Tensor, mask: Tensor) -> Tensor:
    """Return the starts of documents that may follow padding: those that do not continue a document with padding.

    Raises:
        ValueError: padding in a bidirectional document.
    """
    documents = read_documents(table)
    both = torch.tensor(documents.bidirectional or (False,) * (len(documents.bounds) - 1), device="cpu")
    seen = torch.repeat_interleave(both, torch.tensor(documents.bounds, device="cpu").diff())
    if (mask[:, seen.to(mask.device)] == 0).any():
        raise ValueError(
            "attention_mask must be 1 in bidirectional documents, got padding, which their tokens would see; make the "
            "padding a separate document (ringflash.pad_sequence)."
        )
    starts = torch.tensor(documents.bounds[:-1], device="cpu")
    parents = torch.tensor(documents.parents or (-1,) * len(both), device="cpu")
    ends = torch.tensor(documents.bounds[1:], device="cpu")[parents] - 1
    return starts[(parents < 0) | (mask[0].cpu()[ends] != 0)].to(mask.device)


def _check_shifted(labels: Tensor, input_ids: Tensor, successors: Tensor) -> None:
    """Raise ValueError for labels of another shape than input_ids, with negative ids, or that are not shifted.

    Args:
        successors: as input_ids: the next token of each token.
    """
    if labels.shape != input_ids.shape:
        raise ValueError(
            f"labels must have the shape of input_ids {tuple(input_ids.shape)}, got {tuple(labels.shape)}; "
            "give both whole."
        )
    labelled = labels != IGNORE_INDEX
    if (labels[labelled] < 0).any():
        raise ValueError(
            f"labels must be token ids or {IGNORE_INDEX}, got {labels[labelled].min().item()}; "
            f"write {IGNORE_INDEX} where there is none."
        )
    if labelled.any() and (labels == input_ids)[labelled].all() and not (labels == successors)[labelled].all():
        raise ValueError(
            "labels must be shifted by one token, got input_ids themselves; pass ringflash.loss.shift_labels(labels)."
        )


def check_padding(mask: Tensor, input_ids: Tensor, labels: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise ValueError if a token would see padding of an attention_mask, or if padding has labels."""
    if mask.shape != input_ids.shape or ((mask != 0) & (mask != 1)).any():
        raise ValueError(
            f"attention_mask must be 0 or 1 for each of input_ids {tuple(input_ids.shape)}, got a tensor "
            f"{tuple(mask.shape)}{'' if mask.shape != input_ids.shape else f' up to {mask.max()}'}; "
            "describe documents by cu_seqlens, and give both padded to one length."
        )
    after_padding = (mask != 0) & (mask.roll(1, 1) == 0)
    after_padding[:, 0] = False
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1].long() if cu_seqlens.dim() == 1 else _starts_after_padding(cu_seqlens, mask)
        after_padding[:, starts] = False
    if after_padding.any():
        raise ValueError(
            "attention_mask must be 0 on the right of the tokens only, got padding before a token, which would see "
            "it; set tokenizer.padding_side = 'right'."
        )
    if labels is not None and (labels[mask == 0] != IGNORE_INDEX).any():
        raise ValueError(
            f"labels must be {IGNORE_INDEX} where attention_mask is 0, got a token; collators and "
            "ringflash.pad_sequence write such labels."
        )
