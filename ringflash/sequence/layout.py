"""Distribution of the tokens over the ranks: the coordinate system that everything else derives from.

The sequence is cut into chunks. `zigzag` gives rank r the chunks r and 2 * cp_size - 1 - r, so that under a
causal mask every rank has the same work. `contiguous` gives it chunk r. With four ranks and eight chunks:

    position   0   1   2   3   4   5   6   7
    zigzag     r0  r1  r2  r3  r3  r2  r1  r0

`striped` concatenates 32 zigzags, so that every document is spread almost evenly over the ranks.

Positions increase within a shard, so an interval of positions is an interval of local rows.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ringflash.comm.group import Group, resolve

LAYOUTS = ("zigzag", "striped", "contiguous")
_ZIGZAGS = {"zigzag": 1, "striped": 32}  # zigzags per sequence


class Chunk(NamedTuple):
    """Positions [start, stop) of the sequence, stored from row `row` of the shard."""

    start: int
    stop: int
    row: int

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def chunks(seqlen: int, cp_size: int, cp_rank: int, layout: str = "zigzag") -> tuple[Chunk, ...]:
    """Return the chunks of one rank, in local order.

    Args:
        seqlen: length of the whole sequence, tokens.
    Raises:
        ValueError: unknown layout, or a length that the layout cannot divide evenly.
    """
    check_seqlen(seqlen, cp_size, layout)
    if layout == "contiguous":
        size = seqlen // cp_size
        return (Chunk(cp_rank * size, (cp_rank + 1) * size, 0),)
    width = 2 * cp_size
    size = seqlen // (width * _ZIGZAGS[layout])
    numbers = [
        first + place for first in range(0, width * _ZIGZAGS[layout], width) for place in (cp_rank, width - 1 - cp_rank)
    ]
    return tuple(Chunk(number * size, (number + 1) * size, index * size) for index, number in enumerate(numbers))


def granularity(cp_size: int, layout: str = "zigzag") -> int:
    """Return the number that must divide the sequence length."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout must be one of {LAYOUTS}, got {layout!r}; zigzag balances causal masks, striped packed documents."
        )
    return cp_size * chunks_of_rank(layout)


def chunks_of_rank(layout: str) -> int:
    """Return the number of chunks per rank."""
    return 2 * _ZIGZAGS[layout] if layout in _ZIGZAGS else 1


def check_seqlen(seqlen: int, cp_size: int, layout: str) -> None:
    """Raise ValueError unless `layout` can divide `seqlen` tokens evenly among `cp_size` ranks."""
    unit = granularity(cp_size, layout)
    if seqlen < 1 or seqlen % unit:
        count = chunks_of_rank(layout)
        rule = f"{count} * cp_size" if count > 1 else "cp_size"
        padded = max(1, -(-seqlen // unit)) * unit
        raise ValueError(f"seqlen must be divisible by {rule} ({unit}), got {seqlen}; pad to {padded} (pad_sequence).")


def local_positions(seqlen: int, cp_size: int, cp_rank: int, layout: str = "zigzag") -> torch.Tensor:
    """Return the global position of every local token, in local order.

    `local_positions(16, 4, 1)` is `[2, 3, 12, 13]`.

    Args:
        seqlen: length of the whole sequence, tokens.
    Returns:
        positions: (seqlen // cp_size,), int64, increasing.
    Raises:
        ValueError: length or layout as in `chunks`; rank outside [0, cp_size).
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in [0, {cp_size}), got {cp_rank}; pass the rank within the group.")
    return torch.cat([torch.arange(c.start, c.stop) for c in chunks(seqlen, cp_size, cp_rank, layout)])


def shard_sequence(x: torch.Tensor, group: Group, dim: int = 1, layout: str = "zigzag") -> torch.Tensor:
    """Return this rank's shard of a tensor that every rank holds in full.

    Args:
        x: any shape; `dim` is the sequence dimension.
        group: ProcessGroup, 1-D DeviceMesh, or None for a single process.
    Returns:
        shard: as x, with seqlen / cp_size tokens along `dim`, in local order. Differentiable; the gradient of x is
            zero outside the shard.
    """
    group = resolve(group)
    if group is None:
        check_seqlen(x.shape[dim], 1, layout)
        return x
    parts = chunks(x.shape[dim], group.size(), group.rank(), layout)
    return torch.cat([x.narrow(dim, c.start, c.size) for c in parts], dim)


def unshard_sequence(x: torch.Tensor, group: Group, dim: int = 1, layout: str = "zigzag") -> torch.Tensor:
    """All-gather the shards of a tensor and return it in full on every rank: the inverse of `shard_sequence`.

    Differentiable. The gradient of a shard is the sum over ranks of the gradients of the full tensor at its
    positions, which is correct if the objective is the sum of the ranks' losses. If every rank computes the same loss
    from the result, divide it by cp_size.
    """
    group = resolve(group)
    if group is None:
        check_seqlen(x.shape[dim], 1, layout)
        return x
    return cast(torch.Tensor, _Unshard.apply(x, group, dim, layout))


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, dim: int, layout: str) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.group, ctx.dim, ctx.layout = group, dim, layout
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(shards, x, group=group)
        return torch.cat(shards, dim).index_select(dim, _order(x, group, dim, layout).to(x.device))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return shard_sequence(total, ctx.group, ctx.dim, ctx.layout), None, None, None


def _order(x: torch.Tensor, group: dist.ProcessGroup, dim: int, layout: str) -> torch.Tensor:
    """Return the index of each position of the sequence in the concatenation of the shards."""
    seqlen = x.shape[dim] * group.size()
    positions = torch.cat([local_positions(seqlen, group.size(), r, layout) for r in range(group.size())])
    return torch.argsort(positions)
