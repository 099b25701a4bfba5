"""Short causal convolutions over a sharded sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringflash.recurrent.stretch import Stretch, gather_ranks


def causal_conv(conv: Callable[[Tensor], Tensor], x: Tensor, width: int, stretch: Stretch) -> Tensor:
    """Run a causal convolution in which a token sees the `width` - 1 tokens before it, of its own document.

    The first tokens get theirs from previous ranks (a halo); documents are kept apart by zeros between them.

    Args:
        conv: maps (batch, channels, length) to the same shape; the tokens before the first one are zeros to it.
        x: (batch, channels, seqlen_local), contiguous shard.
        width: kernel size, tokens.
    Returns:
        y: as x.
    """
    size = width - 1
    parts = [torch.zeros_like(x[..., :1]).expand(-1, -1, size)] * len(stretch.pieces)
    if stretch.group is not None:
        parts[0] = _halo(x, size, stretch)
    padded = torch.cat(
        [t for zeros, (a, b) in zip(parts, stretch.pieces, strict=True) for t in (zeros, x[..., a:b])], -1
    )
    y = conv(padded)
    return torch.cat([y[..., a + i * size : b + i * size] for i, (a, b) in enumerate(stretch.pieces, 1)], -1)


def _halo(x: Tensor, size: int, stretch: Stretch) -> Tensor:
    """Return the `size` tokens before the shard, zeros for those of other documents."""
    assert stretch.group is not None
    tails = gather_ranks(x[..., -size:], stretch.group)  # of whole shards, if they are shorter
    count = tails.shape[-1]
    zeros = torch.zeros_like(tails[0, ..., :1]).expand(*x.shape[:2], size)
    tokens = torch.cat([zeros, *tails[1:]], -1)
    end = size + stretch.group.rank() * count
    foreign = torch.arange(size, device=x.device) < size - stretch.before
    return tokens[..., end - size : end].masked_fill(foreign, 0)
