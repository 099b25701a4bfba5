"""Labels of a sequence, which are the successors of its tokens, and their number, on which all ranks agree."""

from __future__ import annotations

from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.comm.group import Group, resolve
from ringflash.sequence.layout import read_documents
from ringflash.sequence.mask import Documents
from ringflash.sequence.padding import IGNORE_INDEX

_COUNTED, _GIVEN, _INVALID = range(3)  # kind of a rank's number of tokens


def shift_labels(tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the labels of a whole sequence, before sharding: each token's successor, or -100 without one.

    Args:
        tokens: (batch, seqlen), any integers.
        cu_seqlens: (num_documents + 1,), int32: the last token of a document has no successor, unless the next document
            continues it (`document_table`). A token that sees its successor, in a bidirectional document, has no label.
    Returns:
        labels: (batch, seqlen), int64; targets in floating point keep their dtype.
    Raises:
        ValueError: documents that branch: the last token of a prompt has a successor in each answer.
    """
    kind = tokens.dtype if tokens.is_floating_point() else torch.int64  # uint8 cannot hold -100
    labels = torch.full_like(tokens, IGNORE_INDEX, dtype=kind)
    labels[:, :-1] = tokens[:, 1:]
    if cu_seqlens is not None and cu_seqlens.dim() == 1:
        labels[:, cu_seqlens[1:].long() - 1] = IGNORE_INDEX
    elif cu_seqlens is not None:
        labels[:, _without_label(read_documents(cu_seqlens)).to(labels.device)] = IGNORE_INDEX
    return labels


def _without_label(documents: Documents) -> Tensor:
    """Return a mask of the tokens that see their successor or have none: (seqlen,), bool."""
    if documents.has_branches:
        raise ValueError(
            "labels must be given with documents that branch, since a token may have several successors, got none; "
            "take those of ringflash.share_prefixes."
        )
    count = len(documents.bounds) - 1
    bounds = torch.tensor(documents.bounds, device="cpu")
    both = torch.tensor(documents.bidirectional or (False,) * count, device="cpu")
    ends = torch.ones(count, dtype=torch.bool, device="cpu")
    ends[:-1] = torch.tensor(documents.parents or (-1,) * count, device="cpu")[1:] < 0
    without = torch.repeat_interleave(both, bounds.diff())
    without[bounds[1:] - 1] = ends
    return without


def count_tokens(labels: Tensor, group: Group) -> Tensor:
    """Count the labelled tokens of the whole sequence, summed over the shards of the group.

    Args:
        labels: this rank's shard, any shape; -100 means no label. A shard may have no labels.
    Returns:
        count: scalar, int64, on the device of labels; computed without synchronising the device.
    """
    resolved = resolve(group)
    count = (labels != IGNORE_INDEX).sum()
    if resolved is not None:
        dist.all_reduce(count, group=resolved)
    return count


def agreed_count(labels: Tensor, num_tokens: Tensor | int | None, group: dist.ProcessGroup | None) -> Tensor:
    """Return the labelled tokens of the whole sequence, counted or given, after comparing the ranks.

    Raises:
        ValueError: on every rank, if the given numbers differ, one is negative, or a rank has an error. For tensors on
            GPUs, and while compiling, a device-side assertion, which no host waits for.
    """
    counted = num_tokens is None
    mine = (labels != IGNORE_INDEX).sum() if num_tokens is None else num_tokens
    kinds, values = _gather_counts(labels, mine, _COUNTED if counted else _GIVEN, group).unbind(1)
    agreed = (kinds == kinds[0]).all() & (kinds[0] != _INVALID) & (values >= 0).all()
    if not counted:
        agreed = agreed & (values == values[0]).all()
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(agreed, "num_tokens must be 0 or more and the same on every rank of the group")
    elif not agreed:
        raise ValueError(_disagreement(kinds.tolist(), values.tolist()))
    return values.sum() if counted else values[0]


def tell_of_error(labels: Tensor, group: dist.ProcessGroup | None) -> None:
    """Let `agreed_count` raise on the other ranks, because this one has an error."""
    _gather_counts(labels, 0, _INVALID, group)


def _gather_counts(labels: Tensor, mine: Tensor | int, kind: int, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather the kind and value of each rank's number of tokens: (cp_size, 2), int64.

    Messages have the same form for all kinds, so ranks with different kinds do not wait for different messages.
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    table = torch.zeros(size, 2, dtype=torch.int64, device=labels.device)
    table[rank, 0] = kind
    table[rank, 1] = mine.reshape(()) if isinstance(mine, Tensor) else mine
    if group is not None:
        dist.all_reduce(table, group=group)
    return table


def _disagreement(kinds: list[int], values: list[int]) -> str:
    """Return the error text for `num_tokens` that ranks disagree on.

    Args:
        kinds, values: for each rank, the kind of its number, and the number.
    """
    if _INVALID in kinds:
        ranks = [rank for rank, kind in enumerate(kinds) if kind == _INVALID]
        return f"arguments of cross_entropy must be valid on every rank, got an error on ranks {ranks}; see there."
    if len(set(kinds)) > 1:
        ranks = [rank for rank, kind in enumerate(kinds) if kind == _COUNTED]
        return f"num_tokens must be given on all ranks of the group or on none, got none on ranks {ranks}; add it."
    if len(set(values)) > 1:
        return (
            f"num_tokens must be the same on all ranks of the group, got {values} in rank order; pass the labelled "
            "tokens of the whole sequence."
        )
    return f"num_tokens must be 0 or more, got {values[0]}; leave it out to have the labels counted."


def check_num_tokens(num_tokens: object) -> None:
    """Raise ValueError unless a number of tokens is None, an integer from 0 on, or a tensor of one integer."""
    if isinstance(num_tokens, Tensor):
        kind = num_tokens.dtype
        valid = not (kind.is_floating_point or kind.is_complex or kind == torch.bool) and num_tokens.numel() == 1
        got = f"{kind} of shape {tuple(num_tokens.shape)}"
    else:
        valid = num_tokens is None or isinstance(num_tokens, int | Integral) and not isinstance(num_tokens, bool)
        got = repr(num_tokens)
    if not valid:
        raise ValueError(
            f"num_tokens must be an integer or a tensor of one, got {got}; leave it out to have the labels counted."
        )
    if isinstance(num_tokens, int | Integral) and int(num_tokens) < 0:
        raise ValueError(f"num_tokens must be 0 or more, got {num_tokens}; leave it out to have the labels counted.")
