"""Tokens by how much of their document comes before them: whether a model uses what is far away.

bucket   0        1            ...   NUM_BUCKETS - 2   NUM_BUCKETS - 1
from     0        seqlen/128         seqlen / 4        seqlen / 2        tokens of its document before it
"""

from __future__ import annotations

import torch

from ringflash.huggingface.batch import within_documents

NUM_BUCKETS = 8


def position_buckets(position_ids: torch.Tensor, cu_seqlens: torch.Tensor | None, seqlen: int) -> torch.Tensor:
    """The bucket of every token, int64, as position_ids.

    Args:
        position_ids: (1, tokens), global, as `ringflash.huggingface.prepare_batch` gives them.
        cu_seqlens: bounds of the documents in the whole sequence; None is one.
        seqlen: of the whole sequence.
    """
    before = position_ids if cu_seqlens is None else within_documents(position_ids[0], cu_seqlens)[None]
    return torch.bucketize(before, torch.tensor(bucket_bounds(seqlen)[1:], device=before.device), right=True)


def bucket_bounds(seqlen: int) -> list[int]:
    """The least number of tokens before a token of each bucket."""
    return [0, *(-(-seqlen // (1 << (NUM_BUCKETS - i))) for i in range(1, NUM_BUCKETS))]
