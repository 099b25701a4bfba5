"""Checks of a model's inputs that need their values or the other ranks.

Layer 0 calls `check_consistency` once a forward, where all ranks are in step: an error on one rank is raised on every
rank. `ForwardInputs` has noted what the model was given.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.comm.modules.parameters import ParameterCheck
from ringflash.huggingface.batch import within_documents
from ringflash.huggingface.forward_inputs import ForwardInputs
from ringflash.huggingface.options import ModelRing
from ringflash.huggingface.rank_errors import NUM_VALUES, maxima_of_ranks, raise_on_every_rank
from ringflash.huggingface.spans import LayerSpans, spans_fit
from ringflash.huggingface.validation import find_shape_error
from ringflash.sequence.layout import read_documents


class ShardInputs(NamedTuple):
    """Arguments of the first layer that describe the shard.

    Args:
        mask: (batch, seqlen_local), of padding.
        checksum: scalar, of the whole sequence, as `prepare_batch` returns it.
        spans: of the model's own mask, if it has any.
    """

    mask: Tensor | None
    position_ids: Tensor | None
    cu_seqlens: Tensor | None
    checksum: Tensor | None
    spans: LayerSpans | None = None


@torch.compiler.disable(reason="ranks compare their inputs, and raise together by the values")
def check_consistency(
    options: ModelRing, query: Tensor, given: ShardInputs, inputs: ForwardInputs | None, error: Exception | None
) -> None:
    """Raise on every rank if any rank has an error: once a forward, in layer 0, by one all-reduce of seven numbers.

    Args:
        error: of this rank, found before the call.
    """
    input_error = None if inputs is None else inputs.find_error(given.cu_seqlens)
    if given.position_ids is None and inputs is not None:
        given = given._replace(position_ids=inputs.take_positions())
        recomputed = torch._C._current_graph_task_id() != -1  # a checkpointed layer, inside a backward
        if given.position_ids is None and error is None and recomputed:
            return  # checked in the forward, which had the positions
    error = error or input_error or find_shape_error(query, given.mask, given.position_ids)
    if inputs is not None and (mask := inputs.take_mask()) is not None:
        given = given._replace(mask=mask)
    if query.is_meta:  # no values to compare
        if error is not None:
            raise error
        return
    # Three error flags, and checksums with both signs: the maxima over the ranks cancel only if all are equal.
    values = torch.zeros(NUM_VALUES, dtype=torch.int64, device=query.device)
    if error is None:
        try:
            values[:3] = _find_value_errors(options, query, given)
        except ValueError as problem:
            error = problem
    if given.checksum is not None:
        values[3], values[4] = given.checksum, -given.checksum
    parameters = None if inputs is None else inputs.take_parameters()
    if parameters is not None:
        values[5], values[6] = parameters.checksum, -parameters.checksum
    *wrong, highest, lowest, high, low = maxima_of_ranks(options.group, values, error)
    if any(wrong):
        raise_on_every_rank(options.group, error or _value_error(values.tolist(), options))
    if options.group is not None and highest != -lowest:
        raise ValueError(
            "input_ids and labels given to prepare_batch must be the same on all ranks of the group, because each "
            "takes a part of them, got different ones; split data over groups, not over all ranks (as the loaders of "
            "Trainer and accelerate, and DistributedSampler by default, do), and seed random draws alike on the ranks "
            "of a group."
        )
    if options.group is not None and high != -low:
        (parameters or ParameterCheck()).raise_for(options.group)


def _find_value_errors(options: ModelRing, query: Tensor, given: ShardInputs) -> Tensor:
    """Return (3,), int32: a mask that is not 1 everywhere, wrong positions, wrong spans. The host reads nothing."""
    mask, position_ids, cu_seqlens, _, spans = given
    assert position_ids is not None
    none = query.new_zeros((), dtype=torch.bool)
    hidden = none if mask is None else (mask != 1).any()
    misplaced = ~_positions_fit(options, query.shape[2], position_ids, cu_seqlens)
    other_spans = none
    if spans is not None:
        positions = options.positions(query.shape[2], spans.ids.device, cu_seqlens)
        other_spans = ~spans_fit(spans.ids, positions, cu_seqlens)
    return torch.stack([x.to(query.device) for x in (hidden, misplaced, other_spans)]).int()


def _positions_fit(options: ModelRing, length: int, position_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return a bool scalar: positions are the shard's global ones or, with documents, those within each document.

    Of M-RoPE's positions, the text's are checked: the first of four parts, or all three parts if they are the same.
    """
    if position_ids.dim() == 3:
        first = _positions_fit(options, length, position_ids[0], cu_seqlens)
        return first if len(position_ids) == 4 else first | (position_ids != position_ids[:1]).any()
    positions = options.positions(length, position_ids.device, cu_seqlens)
    fit = (position_ids == positions).all()
    if cu_seqlens is None:
        return fit
    along_path = (position_ids == within_documents(positions, cu_seqlens)).all()
    return along_path if cu_seqlens.dim() == 2 and read_documents(cu_seqlens).has_branches else fit | along_path


def _value_error(flags: list[int], options: ModelRing) -> Exception | None:
    """Return the error of the first rule that the values break; None if they break none.

    Args:
        flags: 1 for each broken rule: masks, positions, token types.
    """
    rules = (
        "attention_mask must be None or all ones, got others; pack documents with cu_seqlens, or pad with "
        "ringflash.pad_sequence.",
        f"position_ids must be the shard's global positions (layout {options.layout!r}, rank "
        f"{options.size_and_rank[1]} of {options.size_and_rank[0]}) or, with cu_seqlens, those within each "
        "document, got others; use ringflash.huggingface.prepare_batch or ringflash.local_positions.",
        "token_type_ids (mm_token_type_ids) must be the shard of those whose spans are the bidirectional documents "
        "of cu_seqlens, got others; give prepare_batch both, and block_sequence_ids.",
    )
    return next((ValueError(rule) for flag, rule in zip(flags, rules, strict=False) if flag), None)
