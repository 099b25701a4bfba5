"""The positions a model rotates by, compared with those of the tokens that this rank holds."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ringflash.huggingface.options import Options
from ringflash.sequence.layout import local_positions


def positions_fit(options: Options, length: int, position_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Whether positions are the shard's global ones, or with documents those within each document; scalar bool."""
    positions = positions_on(options, length, position_ids.device)
    fit = (position_ids == positions).all()
    if cu_seqlens is not None:
        fit = fit | (position_ids == within_documents(positions, cu_seqlens)).all()
    return fit


def positions_on(options: Options, length: int, device: torch.device) -> Tensor:
    """The global positions of the `length` tokens that this rank holds."""
    cp_size, cp_rank = options.place
    return _positions(length * cp_size, cp_size, cp_rank, options.layout, device)


@lru_cache(maxsize=8)
def _positions(seqlen: int, cp_size: int, cp_rank: int, layout: str, device: torch.device) -> Tensor:
    return local_positions(seqlen, cp_size, cp_rank, layout).to(device)


def within_documents(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Positions counted from the start of the document that each lies in."""
    bounds = cu_seqlens.to(positions.device, positions.dtype)
    document = torch.searchsorted(bounds, positions, right=True) - 1
    return positions - bounds[document.clamp(min=0)]
