"""Bounds of packed documents, as the package ring-flash-attention prepares them for each rank."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringflash.sequence.layout import read_documents

_GIVEN = ("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice", "causal", "rank", "world_size")


class _Prepared(NamedTuple):
    """Bounds of the whole sequence, and the arguments that `llama3_flash_attn_varlen_func` must get with them."""

    bounds: Tensor
    versions: tuple[int, int]  # versions of cu_seqlens_q and cu_seqlens_k: torch counts writes to them
    given: tuple[Any, ...]


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Return this rank's part of the bounds of packed documents, for `llama3_flash_attn_varlen_func`.

    With documents [0, 3, 8] on two ranks under a causal mask, rank 0 gets q [0, 3, 4], k [0, 3, 4] and slice(0, 4),
    rank 1 gets q [0, 4], k [0, 5] and slice(3, 8). The host reads cu_seqlens once, here.

    Args:
        cu_seqlens: (num_documents + 1,), int32, bounds in the whole sequence, the same on all ranks.
    Returns:
        cu_seqlens_q, cu_seqlens_k: int32, bounds of the queries of this rank, and of the keys that they see.
        max_seqlen_q, max_seqlen_k: longest document among them.
        local_k_slice: keys that they see, as positions in the whole sequence.
    Raises:
        ValueError: a sequence that world_size does not divide.
        NotImplementedError: a table whose documents are not plain, which these bounds cannot describe.
    """
    bounds = list(read_documents(cu_seqlens).plain_bounds("llama3_flash_attn_prepare_cu_seqlens"))
    length, rest = divmod(bounds[-1], world_size)
    if rest:
        raise ValueError(
            f"cu_seqlens must end at a multiple of world_size ({world_size}), got {bounds[-1]}; pad the sequence."
        )
    start, stop = rank * length, (rank + 1) * length
    left, right = bisect_left(bounds, start), bisect_left(bounds, stop)
    left -= bounds[left] != start
    inner = bounds[left + 1 : right]
    first, last = bounds[left], stop if causal else bounds[right]
    bounds_q = [0, *(bound - start for bound in inner), length]
    bounds_k = [0, *(bound - first for bound in inner), last - first]
    cu_seqlens_q, cu_seqlens_k = (cu_seqlens.new_tensor(x) for x in (bounds_q, bounds_k))
    ranges = (_longest(bounds_q), _longest(bounds_k), slice(first, last))
    versions = (_version(cu_seqlens_q), _version(cu_seqlens_k))
    given = (cu_seqlens_k, *ranges, causal, rank, world_size)
    cu_seqlens_q._ringflash = _Prepared(torch.tensor(bounds, dtype=torch.int32), versions, given)  # type: ignore[attr-defined]
    return cu_seqlens_q, cu_seqlens_k, *ranges


def whole_bounds(cu_seqlens_q: Tensor, given: tuple[Any, ...]) -> tuple[Tensor | None, Exception | None]:
    """Return the bounds in the whole sequence, and the error if arguments are not those prepared with cu_seqlens_q.

    Args:
        given: cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice, causal, rank and world_size.
    """
    prepared: _Prepared | None = getattr(cu_seqlens_q, "_ringflash", None)
    wrong = ["cu_seqlens_q"]
    if prepared is not None and prepared.versions == (_version(cu_seqlens_q), _version(given[0])):
        pairs = zip(_GIVEN, given, prepared.given, strict=True)
        wrong = [name for name, x, y in pairs if x is not y and (isinstance(x, Tensor) or x != y)]
        if not wrong:
            return prepared.bounds, None
    return None, ValueError(
        f"{', '.join(wrong)} must be what llama3_flash_attn_prepare_cu_seqlens of ringflash took or returned, got "
        "another value, a copy, or a tensor that was written to since; pass on the same objects."
    )


def scaled_bounds(cu_seqlens: Tensor, size: int, max_seqlen: int) -> tuple[Tensor | None, Exception | None]:
    """Return bounds in the whole sequence, given those in a shard that has a size-th of each document, and the error.

    The host reads a tensor on a device once.
    """
    try:
        bounds = read_documents(cu_seqlens).plain_bounds("zigzag_ring_flash_attn_varlen_func")
    except (ValueError, NotImplementedError) as error:
        return None, error
    if len(bounds) > 1 and _longest(list(bounds)) > max_seqlen:
        return None, ValueError(
            f"max_seqlen must be at least the longest document ({_longest(list(bounds))} tokens of the shard), got "
            f"{max_seqlen}; pass int(cu_seqlens.diff().max())."
        )
    return torch.tensor([bound * size for bound in bounds], dtype=cu_seqlens.dtype), None


def _version(x: Tensor) -> int:
    """Return the number of writes to a tensor; 0 for one of inference mode, whose writes torch does not count."""
    return 0 if x.is_inference() else x._version


def _longest(bounds: list[int]) -> int:
    return max(stop - start for start, stop in pairwise(bounds))
