"""Padding of a sequence to a length that the layout can divide, without effect on loss or gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringflash.sequence.layout import granularity, read_documents
from ringflash.sequence.mask import check_cu_seqlens

IGNORE_INDEX = -100


class PaddedBatch(NamedTuple):
    """Tokens, labels, document bounds and positions of a padded sequence.

    Args:
        tokens, labels, position_ids: (batch, padded length); None if they were not given.
        cu_seqlens: (num_documents + 1,), int32, or a table; the padding may add a document. None if not given.
    """

    tokens: Tensor
    labels: Tensor | None
    cu_seqlens: Tensor | None
    position_ids: Tensor | None


def pad_sequence(
    tokens: Tensor,
    labels: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    cp_size: int,
    layout: str = "zigzag",
    multiple_of: int = 1,
    pad_token_id: int = 0,
    causal: bool = True,
    position_ids: Tensor | None = None,
) -> PaddedBatch:
    """Pad at the end, tokens with `pad_token_id` and labels with -100, before sharding.

    Under a causal mask no real token sees the padding after it; with `cu_seqlens` the padding is a separate document.
    With the layout "documents" each document is padded at its end. In all cases the padding has no label and changes
    neither loss nor gradients.

    Args:
        tokens: (batch, seqlen), whole sequence.
        labels: (batch, seqlen), already shifted (`ringflash.loss.shift_labels`). Without them padding cannot be told
            from tokens, and `prepare_batch` would label it.
        cu_seqlens: (num_documents + 1,), int32, bounds in the whole sequence; batch must then be 1.
        cp_size, layout: ranks that will share the sequence, and how it will be cut (`shard_sequence`).
        multiple_of: another divisor of the padded length, or of each document's, such as the tile size of a kernel.
        causal: False for attention in both directions; padding then needs `cu_seqlens`.
        position_ids: (batch or 1, seqlen). Padding counts on from the last position, or from 0 with `cu_seqlens`, as
            a document of its own: `cu_seqlens_from_positions` of the result is then its cu_seqlens. With the layout
            "documents" it counts on in each document.
    Raises:
        ValueError: a mask under which real tokens would see the padding; "documents" without cu_seqlens; multiple_of
            below 1; positions of another length.
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of must be 1 or more, got {multiple_of}; leave it out for the layout's own.")
    if position_ids is not None and position_ids.shape not in (tokens.shape, (1, *tokens.shape[1:])):
        raise ValueError(
            f"position_ids must have the shape of tokens {tuple(tokens.shape)} or one row, got "
            f"{tuple(position_ids.shape)}; give both whole."
        )
    unit = granularity(cp_size, layout) * multiple_of
    if layout == "documents":
        return _pad_each_document(PaddedBatch(tokens, labels, cu_seqlens, position_ids), unit, pad_token_id, causal)
    extra = -tokens.shape[1] % unit
    if extra and cu_seqlens is None and not causal:
        raise ValueError(
            "cu_seqlens must be given to pad a sequence that is not causal, got None; "
            "pass torch.tensor([0, seqlen], dtype=torch.int32)."
        )
    if not extra:
        return PaddedBatch(tokens, labels, cu_seqlens, position_ids)
    return PaddedBatch(
        pad(tokens, (0, extra), value=pad_token_id),
        None if labels is None else pad(labels, (0, extra), value=IGNORE_INDEX),
        None if cu_seqlens is None else _with_document(cu_seqlens, extra),
        None if position_ids is None else _pad_positions(position_ids, extra, restart=cu_seqlens is not None),
    )


def _pad_positions(position_ids: Tensor, extra: int, restart: bool) -> Tensor:
    first = torch.zeros_like(position_ids[:, -1:]) if restart else position_ids[:, -1:] + 1
    return torch.cat([position_ids, first + torch.arange(extra, device=first.device)], 1)


def _pad_each_document(batch: PaddedBatch, unit: int, pad_token_id: int, causal: bool) -> PaddedBatch:
    """Pad every document at its end to a multiple of `unit`."""
    tokens, labels, cu_seqlens, position_ids = batch
    if cu_seqlens is None:
        raise ValueError("cu_seqlens must be given to pad each document, got None; pass their bounds.")
    check_cu_seqlens(read_documents(cu_seqlens).plain_bounds("padding of each document"), tokens.shape[1])
    lengths = cu_seqlens.diff()
    extra = -lengths % unit
    if not extra.any():
        return batch
    if not causal:
        raise ValueError(
            f"documents must have lengths that are multiples of {unit} if attention is not causal, got "
            f"{lengths.tolist()}: tokens would see the padding of their document; take layout='balanced'."
        )
    bounds = pad((lengths + extra).cumsum(0), (1, 0)).to(cu_seqlens.dtype)
    document = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths + extra)
    offset = torch.arange(len(document), device=lengths.device) - bounds[document]
    beyond = (offset - lengths[document] + 1).clamp(min=0).to(tokens.device)  # 0 for tokens, 1, 2, ... for padding
    source = (cu_seqlens[document] + offset).to(tokens.device) - beyond

    def padded(x: Tensor, value: int) -> Tensor:
        # Padding is read from an additional last column. masked_fill with -100 would write 156 to tokens in uint8.
        return pad(x, (0, 1), value=value)[:, source.where(beyond == 0, -1)]

    return PaddedBatch(
        padded(tokens, pad_token_id),
        None if labels is None else padded(labels, IGNORE_INDEX),
        bounds,
        None if position_ids is None else position_ids[:, source] + beyond,
    )


def _with_document(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return bounds, or a table, with a document at the end, which continues none and is causal."""
    last = cu_seqlens[..., -1:].clone()  # the last column of a table has the values of such a document
    last[(0,) * last.dim()] += num_tokens
    return torch.cat([cu_seqlens, last], -1)
