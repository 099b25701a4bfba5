"""The one check a forward that reads values: layer 0, on all ranks together."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.comm import agreement
from ringflash.huggingface.forward_inputs import Given, is_recomputed
from ringflash.huggingface.options import Options
from ringflash.huggingface.positions import positions_fit
from ringflash.huggingface.validation import find_shape_error


@torch.compiler.disable(reason="ranks compare their inputs, and raise together by the values")
def check_together(
    options: Options,
    query: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    checksum: Tensor | None,
    given: Given | None,
    error: Exception | None,
) -> None:
    """Once a forward, in layer 0: raise on every rank if any rank has an error. Four numbers are reduced and read."""
    lost = None if given is None else given.find_error(cu_seqlens)
    if position_ids is None and given is not None:
        position_ids = given.take_positions()
        if position_ids is None and error is None and is_recomputed():
            return  # as in the forward, which had them
    error = error or lost or find_shape_error(query, mask, position_ids)
    # Two errors, and the checksum with both signs: the largest of all ranks' are one number if all have the same.
    found = torch.zeros(4, dtype=torch.int64, device=query.device)
    if error is None:
        try:
            found[:2] = _find_value_errors(options, query, mask, position_ids, cu_seqlens)
        except ValueError as problem:
            error = problem
    if checksum is not None:
        found[2], found[3] = checksum, -checksum
    worst = found.clone()
    worst[:2] |= int(error is not None)
    if options.group is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=options.group)
    *wrong, highest, lowest = worst.tolist()
    if any(wrong):
        _raise_on_every_rank(options.group, error or _tensor_error(found.tolist(), options))
    if options.group is not None and highest != -lowest:
        raise ValueError(
            "input_ids and labels given to prepare_batch must be the same on all ranks of the group, which each take a "
            "part of them, got others; share data out over groups, not over all ranks (as the loaders of Trainer and "
            "accelerate, and DistributedSampler by default, do), and seed alike what draws it."
        )


def _find_value_errors(
    options: Options, query: Tensor, mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """(2,), int32: whether the mask hides a token, whether positions are wrong. Nothing is read by the host."""
    assert position_ids is not None
    hidden = query.new_zeros((), dtype=torch.bool) if mask is None else ~mask.all()
    misplaced = ~positions_fit(options, query.shape[2], position_ids, cu_seqlens)
    return torch.stack([hidden.to(query.device), misplaced.to(query.device)]).int()


def _tensor_error(flags: list[int], options: Options) -> Exception | None:
    if flags[0]:
        return ValueError(
            "attention_mask must be None or all ones, got zeros; pack documents with cu_seqlens, or pad with "
            "ringflash.pad_sequence."
        )
    if flags[1]:
        return ValueError(
            f"position_ids must be the shard's global positions (layout {options.layout!r}, rank {options.place[1]} of "
            f"{options.place[0]}) or, with cu_seqlens, those within each document, got others; use "
            "ringflash.huggingface.prepare_batch or ringflash.local_positions."
        )
    return None


def _raise_on_every_rank(group: dist.ProcessGroup | None, error: Exception | None) -> NoReturn:
    agreement.agree(group, {"huggingface": "refused on a rank"}, error)
    raise error or ValueError("inputs must be right on every rank of the group, got an error on another; see its log.")
