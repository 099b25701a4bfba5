"""Short causal convolutions over a sharded sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringflash.recurrent.contiguous_shard import ContiguousShard
from ringflash.recurrent.messages import check_call, states_before


def causal_conv(conv: Callable[[Tensor], Tensor], x: Tensor, width: int, shard: ContiguousShard) -> Tensor:
    """Run a causal convolution in which a token sees the previous `width` - 1 tokens of its document.

    The first tokens of a rank see a halo, which previous ranks send. Zeros separate documents.

    Args:
        conv: maps (batch, channels, length) to the same shape, with zeros before the first token.
        x: (batch, channels, seqlen_local), contiguous shard.
        width: kernel size, tokens.
    Returns:
        y: as x.
    Raises:
        ValueError: on every rank, if tensors, widths or bounds differ between ranks, or the shard is of another length.
    """
    check_call(shard, x.shape[-1], x, width=width)
    size = width - 1
    parts = [torch.zeros_like(x[..., :1]).expand(-1, -1, size)] * len(shard.pieces)
    if shard.group is not None and size:
        parts[0] = _halo(x, size, shard)
    padded = torch.cat([t for zeros, (a, b) in zip(parts, shard.pieces, strict=True) for t in (zeros, x[..., a:b])], -1)
    y = conv(padded)
    return torch.cat([y[..., a + i * size : b + i * size] for i, (a, b) in enumerate(shard.pieces, 1)], -1)


def _halo(x: Tensor, size: int, shard: ContiguousShard) -> Tensor:
    """Return the `size` tokens before the shard, with zeros for tokens of other documents."""
    tails = states_before(x[..., -size:], shard.group)  # shorter if the shards are shorter
    zeros = x.new_zeros(*x.shape[:2], size)
    foreign = torch.arange(size, device=x.device) < size - shard.before
    return torch.cat([zeros, *tails], -1)[..., -size:].masked_fill(foreign, 0)
