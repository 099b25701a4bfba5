"""Padding of a sequence to a length that the layout can divide, without effect on loss or gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ringflash.sequence.layout import granularity

IGNORE_INDEX = -100


class PaddedBatch(NamedTuple):
    """Tokens, labels and document bounds of a padded sequence.

    tokens, labels: (batch, padded length).  cu_seqlens: (num_documents + 1 or + 2,), int32, or a table, or None.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


def pad_sequence(
    tokens: torch.Tensor,
    labels: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    cp_size: int,
    layout: str = "zigzag",
    multiple_of: int = 1,
    pad_token_id: int = 0,
    causal: bool = True,
) -> PaddedBatch:
    """Pad at the end, tokens with `pad_token_id` and labels with -100, before sharding.

    Under a causal mask no real token sees the padding after it; with `cu_seqlens` the padding is a separate document.
    In both cases the padding has no label and changes neither loss nor gradients.

    Args:
        tokens: (batch, seqlen), whole sequence.
        labels: (batch, seqlen), already shifted (`ringflash.loss.shift_labels`). Without them padding cannot be told
            from tokens, and `prepare_batch` would label it.
        cu_seqlens: (num_documents + 1,), int32, bounds in the whole sequence; batch must then be 1.
        multiple_of: another divisor of the padded length, such as the tile size of a kernel.
        causal: False for attention in both directions; padding then needs `cu_seqlens`.
    Raises:
        ValueError: padding without cu_seqlens for a mask under which real tokens would see it; multiple_of below 1.
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of must be 1 or more, got {multiple_of}; leave it out for the layout's own.")
    unit = granularity(cp_size, layout) * multiple_of
    extra = -tokens.shape[1] % unit
    if extra and cu_seqlens is None and not causal:
        raise ValueError(
            "cu_seqlens must be given to pad a sequence that is not causal, got None; "
            "pass torch.tensor([0, seqlen], dtype=torch.int32)."
        )
    if not extra:
        return PaddedBatch(tokens, labels, cu_seqlens)
    return PaddedBatch(
        pad(tokens, (0, extra), value=pad_token_id),
        None if labels is None else pad(labels, (0, extra), value=IGNORE_INDEX),
        None if cu_seqlens is None else _with_document(cu_seqlens, extra),
    )


def _with_document(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return bounds, or a table, with a document at the end, which continues none and is causal."""
    last = cu_seqlens[..., -1:].clone()  # the last column of a table says so of parents and directions
    last[(0,) * last.dim()] += num_tokens
    return torch.cat([cu_seqlens, last], -1)
