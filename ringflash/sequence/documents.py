"""Document bounds of packed rows, read from their positions."""

from __future__ import annotations

import torch
from torch import Tensor


def cu_seqlens_from_positions(position_ids: Tensor) -> Tensor:
    """Return the document bounds of a batch: a document begins with each row, and where positions restart at 0.

    `cu_seqlens_from_positions(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]))` is `[0, 3, 5, 7, 10]`. Call it once
    for a batch, not in each layer: a tensor on a GPU is read, which waits for the device.

    Args:
        position_ids: (batch, seqlen) or (seqlen,), integers, of whole rows and not of a rank's shard.
    Returns:
        cu_seqlens: (num_documents + 1,), int32, on the CPU: bounds in the flattened batch. With one row they are the
            `cu_seqlens` of every call. For several rows either flatten the batch into one row before it is sharded, or
            give `ring_attention` the bounds of each row: `[cu_seqlens_from_positions(row) for row in position_ids]`.
    Raises:
        ValueError: another number of dimensions, or a document that does not count up from 0.
    """
    if position_ids.dim() not in (1, 2):
        raise ValueError(
            f"position_ids must be (batch, seqlen) or (seqlen,), got {tuple(position_ids.shape)}; of positions with "
            "several axes give the one that counts tokens."
        )
    return cu_seqlens_of(document_starts(position_ids if position_ids.dim() == 2 else position_ids[None]))


def document_starts(position_ids: Tensor, is_token: Tensor | None = None) -> Tensor:
    """Return a mask of the first token of each document: (batch, seqlen), bool.

    Args:
        position_ids: (batch, seqlen).
        is_token: (batch, seqlen), bool, True in one interval of each row; None for whole rows. Other positions are not
            read.
    Raises:
        ValueError: a document that does not count up from 0.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if is_token is not None:
        starts = is_token & (starts | ~is_token.roll(1, 1))
    elsewhere = position_ids[starts] != 0
    if bool(elsewhere.any()):
        raise ValueError(
            "position_ids must count from 0 in each document, got a document that starts elsewhere, at "
            f"{int(position_ids[starts][elsewhere][0])}; give those of whole rows, or leave them out for one document "
            "per row."
        )
    return starts


def cu_seqlens_of(starts: Tensor) -> Tensor:
    """Return the bounds of documents on the CPU, int32, from the mask of their first tokens in the flattened batch."""
    first = starts.flatten().nonzero()[:, 0].int().cpu()
    return torch.cat([first, first.new_tensor([starts.numel()])])
