"""Distribution of the tokens over the ranks: which positions of the sequence each rank holds, in which order.

The sequence is cut into chunks. `zigzag` gives rank r the chunks r and 2 * cp_size - 1 - r, so that under a
causal mask every rank has the same work. `contiguous` gives it chunk r. With four ranks and eight chunks:

    position   0   1   2   3   4   5   6   7
    zigzag     r0  r1  r2  r3  r3  r2  r1  r0

`striped` concatenates 32 zigzags, so that every document is spread almost evenly over the ranks. `balanced` gives a
rank whole documents, as far as work and tokens stay equal (`ringflash.sequence.balanced`). `documents` is a zigzag of
each document, as Transformer Engine cuts packed sequences.

Positions increase within a shard, so an interval of positions is an interval of local rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from ringflash.comm import cuda_graphs
from ringflash.comm.agreement import raising_together
from ringflash.comm.comparison import checksum_of_integers
from ringflash.comm.group import Group, resolve
from ringflash.sequence.balanced import balanced_chunks
from ringflash.sequence.mask import Documents, check_cu_seqlens, check_parents
from ringflash.sequence.tensor_cache import once_per_tensor

LAYOUTS = ("zigzag", "striped", "contiguous", "balanced", "documents")
DOCUMENT_LAYOUTS = ("balanced", "documents")  # layouts that depend on the bounds of documents
_ZIGZAGS = {"zigzag": 1, "striped": 32}  # number of zigzags per sequence


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
        documents: documents or their bounds, for `DOCUMENT_LAYOUTS`.
    Raises:
        ValueError: unknown layout, a length that the layout cannot divide evenly, or no bounds for such a layout.
    """
    documents = Documents.of(documents)
    check_layout(seqlen, cp_size, layout, documents)
    if layout == "balanced":
        assert documents is not None
        of_ranks = balanced_chunks(documents, cp_size)
        ranks = torch.tensor([cp_rank, cp_rank + 1], device=of_ranks.rank.device)
        first, last = torch.searchsorted(of_ranks.rank, ranks).tolist()
        starts, sizes = (x[first:last].tolist() for x in (of_ranks.start, of_ranks.size))
        rows = accumulate(sizes, initial=0)
        return tuple(Chunk(start, start + size, row) for start, size, row in zip(starts, sizes, rows, strict=False))
    if layout == "documents":
        assert documents is not None
        return tuple(_zigzags(documents.bounds, cp_size, cp_rank))
    if layout == "contiguous":
        size = seqlen // cp_size
        return (Chunk(cp_rank * size, (cp_rank + 1) * size, 0),)
    width = 2 * cp_size
    size = seqlen // (width * _ZIGZAGS[layout])
    firsts = range(0, width * _ZIGZAGS[layout], width)
    numbers = [first + offset for first in firsts for offset in (cp_rank, width - 1 - cp_rank)]
    return tuple(Chunk(number * size, (number + 1) * size, index * size) for index, number in enumerate(numbers))


def _zigzags(bounds: tuple[int, ...], cp_size: int, cp_rank: int) -> Iterator[Chunk]:
    """Yield the two chunks that a rank holds of each document."""
    row = 0
    for start, stop in pairwise(bounds):
        size = (stop - start) // (2 * cp_size)
        for first in (start + cp_rank * size, stop - (cp_rank + 1) * size):
            yield Chunk(first, first + size, row)
            row += size


def granularity(cp_size: int, layout: str = "zigzag") -> int:
    """Return the number of tokens of which the length of a sequence must be a multiple.

    Raises:
        ValueError: an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout must be one of {LAYOUTS}, got {layout!r}; zigzag balances causal masks, balanced packed documents."
        )
    return cp_size * chunks_of_rank(layout)


def chunks_of_rank(layout: str) -> int:
    """Return the number of chunks per rank; the smallest possible number if it depends on the documents."""
    return 2 if layout == "documents" else 2 * _ZIGZAGS[layout] if layout in _ZIGZAGS else 1


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
    if layout not in DOCUMENT_LAYOUTS:
        return
    documents = Documents.of(documents)
    if documents is None:
        raise ValueError(
            f"cu_seqlens must be given with layout={layout!r}, got None; pass the bounds of the packed documents, or "
            "take layout='zigzag' for a sequence without documents."
        )
    check_cu_seqlens(documents.bounds, seqlen)
    check_parents(*documents)
    unit = 2 * cp_size
    divided = layout == "documents" and next((x for x in pairwise(documents.bounds) if (x[1] - x[0]) % unit), None)
    if divided:
        raise ValueError(
            f"each document must have a length divisible by 2 * cp_size ({unit}) with layout='documents', got "
            f"{divided[1] - divided[0]} tokens from {divided[0]}; pad each (pad_sequence with this layout)."
        )


def local_positions(
    seqlen: int, cp_size: int, cp_rank: int, layout: str = "zigzag", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return the global position of every local token, in local order.

    `local_positions(16, 4, 1)` is `[2, 3, 12, 13]`.

    Args:
        seqlen: length of the whole sequence, tokens.
        cp_size, cp_rank: number of ranks that share the sequence, and the rank among them.
        layout: "zigzag", "striped", "contiguous", "balanced" or "documents" (docs/masks.md).
        cu_seqlens: (num_documents + 1,), int32, document bounds in the whole sequence. "balanced" and "documents" need
            them; the other layouts do not depend on documents.
    Returns:
        positions: (seqlen // cp_size,), int64, increasing.
    Raises:
        ValueError: an unknown layout; a length that it cannot divide (`granularity`); a layout that needs cu_seqlens
            without them; a rank outside [0, cp_size).
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in [0, {cp_size}), got {cp_rank}; pass the rank within the group.")
    of_rank = chunks(seqlen, cp_size, cp_rank, layout, _bounds(layout, cu_seqlens))
    return torch.cat([torch.arange(c.start, c.stop) for c in of_rank])


def shard_sequence(
    x: Tensor, group: Group, dim: int = 1, layout: str = "zigzag", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return this rank's shard of a tensor that every rank holds in full.

    Args:
        x: any shape; `dim` is the sequence dimension.
        group: ProcessGroup, 1-D DeviceMesh, or None for a single process.
        layout, cu_seqlens: as `local_positions`.
    Returns:
        shard: as x, with seqlen / cp_size tokens along `dim`, in local order. Differentiable; the gradient of x is
            zero outside the shard.
    Raises:
        ValueError: as `local_positions`.
    """
    shard = cut_sequence(x, group, dim, layout, cu_seqlens)
    if x.dtype in _INTEGERS and shard is not x and not torch.compiler.is_compiling():
        _cuts[shard] = cut = checksum_of_integers(x), layout
        _last_cuts.append((checksum_of_integers(shard), cut))
    return shard


def cut_sequence(
    x: Tensor, group: Group, dim: int = 1, layout: str = "zigzag", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return what `shard_sequence` returns, without the checksum that wrapped modules compare."""
    group, bounds = resolve(group), _bounds(layout, cu_seqlens)
    if group is None:
        check_layout(x.shape[dim], 1, layout, bounds)
        return x
    of_rank = chunks(x.shape[dim], group.size(), group.rank(), layout, bounds)
    return torch.cat([x.narrow(dim, c.start, c.size) for c in of_rank], dim)


_INTEGERS = (torch.int64, torch.int32)
_Cut = tuple[Tensor, str]  # checksum of the whole tensor, and layout
_cuts = WeakIdKeyDictionary()  # shards of integers, and how each was cut
_last_cuts: deque[tuple[Tensor, _Cut]] = deque(maxlen=16)  # checksums of the last shards, and their cuts


def find_cut(shard: Tensor) -> tuple[int, str] | None:
    """Return a checksum of the tensor that `shard_sequence` cut into this shard of integers, and the layout.

    Return None if they are not known. The host waits for the device. A copy of a shard is found by its values, unless
    all values are equal, or shards of several tensors have the same values.
    """
    if shard.dtype not in _INTEGERS or not shard.numel() or cuda_graphs.capturing(shard.device):
        return None
    cut: _Cut | None = _cuts.get(shard)
    if cut is not None:
        return int(cut[0]), cut[1]
    if (shard == shard.flatten()[0]).all():
        return None
    mine = int(checksum_of_integers(shard))
    cuts = {(int(whole), layout) for part, (whole, layout) in _last_cuts if int(part) == mine}
    return cuts.pop() if len(cuts) == 1 else None


def unshard_sequence(
    x: Tensor,
    group: Group,
    dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    *,
    gradient: str = "sum",
) -> Tensor:
    """All-gather the shards of a tensor and return it in full on every rank: the inverse of `shard_sequence`.

    Differentiable. `gradient` must fit the loss that the ranks compute from the result.

    Args:
        x: shard, as `shard_sequence` returns it; the same dtype and shape on all ranks.
        group, dim, layout, cu_seqlens: as `shard_sequence`.
        gradient: "sum" if the objective is the sum of the ranks' losses: the gradient of a shard is the sum over ranks
            of the gradients of the full tensor at its positions. "own" if every rank computes the same loss of the
            whole sequence: the gradient of a shard is this rank's gradient of the full tensor at its positions. With
            "own", sum the gradients of the parameters over the ranks; for backends that average them, multiply the loss
            by cp_size.
    Returns:
        whole: as x, with seqlen tokens along `dim`, in position order.
    Raises:
        ValueError: shards that the layout does not have, or that differ between ranks in shape or dtype; on every rank.
    """
    group, bounds = resolve(group), _bounds(layout, cu_seqlens)
    if group is None:
        check_layout(x.shape[dim], 1, layout, bounds)
        _check_gradient(gradient)
        return x
    if torch.compiler.is_compiling():
        _check_gradient(gradient)
    else:
        _compare_shards(x, group, dim, layout, bounds, gradient)
    return cast(Tensor, _Unshard.apply(x, group, dim, layout, bounds, gradient))


def _check_gradient(gradient: str) -> None:
    if gradient not in ("sum", "own"):
        raise ValueError(
            f"gradient must be 'sum' or 'own', got {gradient!r}; 'own' is for a loss that every rank computes whole."
        )


def _compare_shards(
    x: Tensor, group: dist.ProcessGroup, dim: int, layout: str, bounds: Documents | None, gradient: str
) -> None:
    """Raise ValueError on every rank unless all ranks have shards of one shape, dtype and layout."""
    content: dict[str, object] = {
        "unshard_sequence": list(x.shape),
        "dtype": str(x.dtype),
        "dim": dim % max(1, x.dim()),
        "layout": layout,
        "cu_seqlens": None if bounds is None else bounds.summary,
        "gradient": gradient,
    }
    with raising_together(group, content, x.device):
        _check_gradient(gradient)
        check_layout(x.shape[dim] * group.size(), group.size(), layout, bounds)


def document_table(
    cu_seqlens: Tensor,
    parents: Tensor | None = None,
    bidirectional: Tensor | None = None,
    global_tokens: Tensor | int | None = None,
) -> Tensor:
    """Return documents that continue one another as one tensor, which functions accept as their `cu_seqlens`.

    Args:
        cu_seqlens: (num_documents + 1,), int32, bounds in the whole sequence.
        parents: (num_documents,), index of the document that each one continues, or -1; depth first.
        bidirectional: (num_documents,), bool, True if queries of the document also see its later keys.
        global_tokens: how many first tokens of the path its queries see beyond any window: one number, or
            (num_documents,), equal within a tree. If it is not 0, a document that several continue must be all global.
    Returns:
        table: (4, num_documents + 1), int32.
    """
    none = torch.zeros_like(cu_seqlens)
    table = torch.stack([cu_seqlens, none - 1, none, none])
    if isinstance(global_tokens, int):
        global_tokens = torch.tensor(global_tokens, device=cu_seqlens.device).expand_as(cu_seqlens[1:])
    given = (("parents", parents), ("bidirectional", bidirectional), ("global_tokens", global_tokens))
    for row, (name, values) in enumerate(given, 1):
        if values is None:
            continue
        if values.shape != cu_seqlens[1:].shape:
            raise ValueError(
                f"{name} must have one entry for each document of cu_seqlens {tuple(cu_seqlens[1:].shape)}, got "
                f"{tuple(values.shape)}; give -1 to a document that continues none, and False to one that is causal."
            )
        kind = "bool" if row == 2 else "integers"
        if values.is_floating_point() or (values.dtype == torch.bool) != (row == 2):
            raise ValueError(f"{name} must be {kind}, got {values.dtype}; convert them.")
        table[row, :-1] = values
        if not torch.equal(table[row, :-1], values.long()):
            raise ValueError(f"{name} must fit {table.dtype}, got up to {int(values.max())}; use smaller numbers.")
    return table


def read_documents(cu_seqlens: Tensor) -> Documents:
    """Return the documents of a tensor. One on a GPU is read once for all layers, since reading waits for the GPU."""
    return _documents(cu_seqlens) if cu_seqlens.device.type == "cpu" else _documents_on_device(cu_seqlens)


def _documents(cu_seqlens: Tensor) -> Documents:
    if cu_seqlens.dim() == 1:
        return Documents(tuple(cu_seqlens.tolist()))
    if cu_seqlens.dim() != 2 or cu_seqlens.shape[0] != 4:
        raise ValueError(
            "cu_seqlens must be 1-D int32, or a table (4, num_documents + 1) of ringflash.document_table, got shape "
            f"{tuple(cu_seqlens.shape)}; pass torch.tensor([0, ...], dtype=torch.int32)."
        )
    return Documents.from_rows(cu_seqlens.tolist())


_documents_on_device = once_per_tensor(_documents)


def _bounds(layout: str, cu_seqlens: Tensor | None) -> Documents | None:
    """Read documents if the layout depends on them."""
    return None if cu_seqlens is None or layout not in DOCUMENT_LAYOUTS else read_documents(cu_seqlens)


class _Unshard(torch.autograd.Function):
    """All-gather in the forward; in the backward, all-reduce of the gradients if the objective is a sum."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, group: dist.ProcessGroup, dim: int, layout: str, bounds: Documents | None,
        gradient: str,
    ) -> Tensor:  # fmt: skip
        ctx.group, ctx.dim, ctx.layout, ctx.gradient = group, dim, layout, gradient
        ctx.cu_seqlens = None if bounds is None else torch.tensor(bounds.rows, device="cpu")
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(shards, x, group=group)
        seqlen = x.shape[dim] * group.size()
        positions = [local_positions(seqlen, group.size(), r, layout, ctx.cu_seqlens) for r in range(group.size())]
        return torch.cat(shards, dim).index_select(dim, torch.argsort(torch.cat(positions)).to(x.device))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        if ctx.gradient == "sum":
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
        return shard_sequence(grad, ctx.group, ctx.dim, ctx.layout, ctx.cu_seqlens), *[None] * 5
