"""Distribution of the tokens over the ranks: which positions of the sequence each rank holds, in which order.

The sequence is cut into chunks. `zigzag` gives rank r the chunks r and 2 * cp_size - 1 - r, so that under a
causal mask every rank has the same work. `contiguous` gives it chunk r. With four ranks and eight chunks:

    position   0   1   2   3   4   5   6   7
    zigzag     r0  r1  r2  r3  r3  r2  r1  r0

`striped` concatenates 32 zigzags, so that every document is spread almost evenly over the ranks. `balanced` gives a
rank whole documents, as far as work and tokens stay equal (`ringflash.sequence.balanced`).

Positions increase within a shard, so an interval of positions is an interval of local rows.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ringflash.comm.agreement import agree
from ringflash.comm.group import Group, resolve
from ringflash.sequence.balanced import balanced_chunks
from ringflash.sequence.mask import Documents, check_cu_seqlens, check_parents

LAYOUTS = ("zigzag", "striped", "contiguous", "balanced")
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


def chunks(
    seqlen: int,
    cp_size: int,
    cp_rank: int,
    layout: str = "zigzag",
    documents: tuple[int, ...] | Documents | None = None,
) -> tuple[Chunk, ...]:
    """Return the chunks of one rank, in local order.

    Args:
        seqlen: length of the whole sequence, tokens.
        documents: for the layout "balanced", or their bounds.
    Raises:
        ValueError: unknown layout, a length that the layout cannot divide evenly, or no bounds for `balanced`.
    """
    documents = Documents.of(documents)
    check_layout(seqlen, cp_size, layout, documents)
    if layout == "balanced":
        assert documents is not None
        found = balanced_chunks(documents, cp_size)
        ranks = torch.tensor([cp_rank, cp_rank + 1], device=found.rank.device)
        first, last = torch.searchsorted(found.rank, ranks).tolist()
        starts, sizes = (x[first:last].tolist() for x in (found.start, found.size))
        rows = accumulate(sizes, initial=0)
        return tuple(Chunk(start, start + size, row) for start, size, row in zip(starts, sizes, rows, strict=False))
    if layout == "contiguous":
        size = seqlen // cp_size
        return (Chunk(cp_rank * size, (cp_rank + 1) * size, 0),)
    width = 2 * cp_size
    size = seqlen // (width * _ZIGZAGS[layout])
    firsts = range(0, width * _ZIGZAGS[layout], width)
    numbers = [first + offset for first in firsts for offset in (cp_rank, width - 1 - cp_rank)]
    return tuple(Chunk(number * size, (number + 1) * size, index * size) for index, number in enumerate(numbers))


def granularity(cp_size: int, layout: str = "zigzag") -> int:
    """Return the number that must divide the sequence length."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout must be one of {LAYOUTS}, got {layout!r}; zigzag balances causal masks, balanced packed documents."
        )
    return cp_size * chunks_of_rank(layout)


def chunks_of_rank(layout: str) -> int:
    """Return the number of chunks per rank; 1 for `balanced`, whose number depends on the documents."""
    return 2 * _ZIGZAGS[layout] if layout in _ZIGZAGS else 1


def check_seqlen(seqlen: int, cp_size: int, layout: str) -> None:
    """Raise ValueError unless `layout` can divide `seqlen` tokens evenly among `cp_size` ranks."""
    unit = granularity(cp_size, layout)
    if seqlen < 1 or seqlen % unit:
        count = chunks_of_rank(layout)
        rule = f"{count} * cp_size" if count > 1 else "cp_size"
        padded = max(1, -(-seqlen // unit)) * unit
        raise ValueError(f"seqlen must be divisible by {rule} ({unit}), got {seqlen}; pad to {padded} (pad_sequence).")


def check_layout(seqlen: int, cp_size: int, layout: str, documents: tuple[int, ...] | Documents | None) -> None:
    """Raise ValueError unless `layout` can divide `seqlen` tokens with these documents among `cp_size` ranks."""
    check_seqlen(seqlen, cp_size, layout)
    documents = Documents.of(documents)
    if layout == "balanced" and documents is None:
        raise ValueError(
            "cu_seqlens must be given with layout='balanced', got None; pass the bounds of the packed documents, or "
            "take layout='zigzag' for a sequence without documents."
        )
    if layout == "balanced" and documents is not None:
        check_cu_seqlens(documents.bounds, seqlen)
        check_parents(*documents)


def local_positions(
    seqlen: int, cp_size: int, cp_rank: int, layout: str = "zigzag", cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the global position of every local token, in local order.

    `local_positions(16, 4, 1)` is `[2, 3, 12, 13]`.

    Args:
        seqlen: length of the whole sequence, tokens.
        cu_seqlens: (num_documents + 1,), int32, document bounds in the whole sequence. "balanced" needs them; the other
            layouts do not depend on documents.
    Returns:
        positions: (seqlen // cp_size,), int64, increasing.
    Raises:
        ValueError: length or layout as in `chunks`; rank outside [0, cp_size).
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in [0, {cp_size}), got {cp_rank}; pass the rank within the group.")
    held = chunks(seqlen, cp_size, cp_rank, layout, _bounds(layout, cu_seqlens))
    return torch.cat([torch.arange(c.start, c.stop) for c in held])


def shard_sequence(
    x: torch.Tensor, group: Group, dim: int = 1, layout: str = "zigzag", cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's shard of a tensor that every rank holds in full.

    Args:
        x: any shape; `dim` is the sequence dimension.
        group: ProcessGroup, 1-D DeviceMesh, or None for a single process.
        cu_seqlens: as `local_positions`.
    Returns:
        shard: as x, with seqlen / cp_size tokens along `dim`, in local order. Differentiable; the gradient of x is
            zero outside the shard.
    """
    group, bounds = resolve(group), _bounds(layout, cu_seqlens)
    if group is None:
        check_layout(x.shape[dim], 1, layout, bounds)
        return x
    held = chunks(x.shape[dim], group.size(), group.rank(), layout, bounds)
    return torch.cat([x.narrow(dim, c.start, c.size) for c in held], dim)


def unshard_sequence(
    x: torch.Tensor, group: Group, dim: int = 1, layout: str = "zigzag", cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """All-gather the shards of a tensor and return it in full on every rank: the inverse of `shard_sequence`.

    Differentiable. The gradient of a shard is the sum over ranks of the gradients of the full tensor at its
    positions, which is correct if the objective is the sum of the ranks' losses. If every rank computes the same loss
    from the result, divide it by cp_size.

    Raises:
        ValueError: shards that the layout does not have, or that differ between ranks in shape or dtype; on every rank.
    """
    group, bounds = resolve(group), _bounds(layout, cu_seqlens)
    if group is None:
        check_layout(x.shape[dim], 1, layout, bounds)
        return x
    if not torch.compiler.is_compiling():
        _compare_shards(x, group, dim, layout, bounds)
    return cast(torch.Tensor, _Unshard.apply(x, group, dim, layout, bounds))


def _compare_shards(x: torch.Tensor, group: dist.ProcessGroup, dim: int, layout: str, bounds: Documents | None) -> None:
    """Raise ValueError on every rank unless all ranks have shards of one shape, dtype and layout."""
    error: Exception | None = None
    try:
        check_layout(x.shape[dim] * group.size(), group.size(), layout, bounds)
    except (ValueError, IndexError) as problem:
        error = problem
    content = {
        "unshard_sequence": list(x.shape),
        "dtype": str(x.dtype),
        "dim": dim % max(1, x.dim()),
        "layout": layout,
        "cu_seqlens": None if bounds is None else bounds.digest,
    }
    agree(group, content, error, x.device)


def document_table(
    cu_seqlens: torch.Tensor, parents: torch.Tensor | None = None, bidirectional: torch.Tensor | None = None
) -> torch.Tensor:
    """Return documents that continue one another, as one tensor, the `cu_seqlens` of every function that takes them.

    Args:
        cu_seqlens: (num_documents + 1,), int32, bounds in the whole sequence.
        parents: (num_documents,), index of the document that each one continues, or -1; depth first.
        bidirectional: (num_documents,), bool: queries of the document see all of it, also what follows them.
    Returns:
        table: (3, num_documents + 1), int32.
    """
    table = torch.stack([cu_seqlens, torch.full_like(cu_seqlens, -1), torch.zeros_like(cu_seqlens)])
    for row, name, values in ((1, "parents", parents), (2, "bidirectional", bidirectional)):
        if values is None:
            continue
        if values.shape != cu_seqlens[1:].shape:
            raise ValueError(
                f"{name} must have one entry for each document of cu_seqlens {tuple(cu_seqlens[1:].shape)}, got "
                f"{tuple(values.shape)}; give -1 to a document that continues none, and False to one that is causal."
            )
        table[row, :-1] = values
    return table


def read_documents(cu_seqlens: torch.Tensor) -> Documents:
    """Return the values of a tensor. One on a device is read once for all layers, since a read waits for the device."""
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference():  # an inference tensor has no version
        return _documents(cu_seqlens)
    known = _read.get(id(cu_seqlens))
    if known is None or known[0]() is not cu_seqlens or known[1] != cu_seqlens._version:
        _read.clear()
        known = _read[id(cu_seqlens)] = (ref(cu_seqlens), cu_seqlens._version, _documents(cu_seqlens))
    return known[2]


def _documents(cu_seqlens: torch.Tensor) -> Documents:
    if cu_seqlens.dim() == 1:
        return Documents(tuple(cu_seqlens.tolist()))
    if cu_seqlens.dim() != 2 or cu_seqlens.shape[0] != 3:
        raise ValueError(
            "cu_seqlens must be 1-D int32, or a table (3, num_documents + 1) of ringflash.document_table, got shape "
            f"{tuple(cu_seqlens.shape)}; pass torch.tensor([0, ...], dtype=torch.int32)."
        )
    return Documents.from_rows(cu_seqlens.tolist())


_read: dict[int, tuple[ref[torch.Tensor], int, Documents]] = {}  # id: the tensor, its version, its values


def _bounds(layout: str, cu_seqlens: torch.Tensor | None) -> Documents | None:
    """Read documents if the layout depends on them."""
    return None if cu_seqlens is None or layout != "balanced" else read_documents(cu_seqlens)


class _Unshard(torch.autograd.Function):
    """All-gather in the forward, all-reduce of the gradients in the backward."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: torch.Tensor, group: dist.ProcessGroup, dim: int, layout: str, bounds: Documents | None
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.layout = group, dim, layout
        ctx.cu_seqlens = None if bounds is None else torch.tensor(bounds.rows)
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(shards, x, group=group)
        seqlen = x.shape[dim] * group.size()
        positions = [local_positions(seqlen, group.size(), r, layout, ctx.cu_seqlens) for r in range(group.size())]
        return torch.cat(shards, dim).index_select(dim, torch.argsort(torch.cat(positions)).to(x.device))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return shard_sequence(total, ctx.group, ctx.dim, ctx.layout, ctx.cu_seqlens), None, None, None, None
