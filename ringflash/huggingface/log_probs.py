"""Log-probabilities of a whole sequence under context parallelism, for reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringflash.comm.agreement import raising_together
from ringflash.comm.group import Group, resolve
from ringflash.huggingface.batch import check_padding, prepare_batch, within_documents
from ringflash.sequence.layout import read_documents, unshard_sequence
from ringflash.sequence.mask import check_cu_seqlens
from ringflash.sequence.padding import pad_sequence
from ringflash.sequence.trees import SharedPrefixes, places_of, values_at
from ringflash.sequence.trees import share_prefixes as pack


def log_probs(
    model: Callable[..., Any],
    input_ids: Tensor,
    *,
    group: Group,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
    layout: str = "zigzag",
    return_entropy: bool = False,
    share_prefixes: bool | int = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probability of each token's successor, for the whole sequence on every rank.

    Each rank runs its shard; logits exist for a few tokens at a time. The sequence is padded for the layout. Every
    rank must compute the same objective from the result. Averaged over all ranks, as by DDP and FSDP2, its gradients
    are then those of one process.

    Args:
        model: `ringflash.huggingface.CausalLMWithLoss`, also in DDP or FSDP2.
        input_ids: (batch, seqlen), int64, prompts and completions, the same on all ranks of the group.
        group: the model's group (`set_group`); None for one process.
        attention_mask: (batch, seqlen), 1 for a token and 0 for padding, on the right of a row or, with cu_seqlens, of
            a document.
        cu_seqlens: (num_documents + 1,), int32, bounds of packed documents, whose positions count from 0, or a table of
            `ringflash.document_table`; batch must then be 1.
        temperature: divisor of the logits.
        layout: the model's layout (`set_group`).
        return_entropy: also return the entropy of the distribution of each token's successor.
        share_prefixes: compute common beginnings of rows or documents once (`ringflash.share_prefixes`), with the same
            result; a number is the least tokens to share. The host reads the tokens.
    Returns:
        log_probs: (batch, seqlen), natural log, fp32 (fp64 for fp64). Column t is log p(token t + 1 | tokens up to t);
            0 where there is no such token: at the end of a row or document, and in padding. Columns [:, :-1] are what
            TRL calls per_token_logps.
        entropy, if asked for: as log_probs.
    Raises:
        ValueError: temperature not above 0; padding before a token; a mask or bounds that do not fit, or, with
            share_prefixes, a table of documents.
        NotImplementedError, RuntimeError: as the model. Each is raised on every rank.
    Numerics: as `ringflash.loss.token_log_probs`.
    """
    rows = None
    call = {"log_probs": [*input_ids.shape], "temperature": float(temperature), "return_entropy": return_entropy}
    call["share_prefixes"] = int(share_prefixes)
    with raising_together(group, call, input_ids.device):
        if cu_seqlens is not None:
            check_cu_seqlens(read_documents(cu_seqlens).bounds, input_ids.shape[1])
        if share_prefixes:
            packed, rows = _pack(input_ids, attention_mask, cu_seqlens, int(share_prefixes))
            tokens, labels = packed.input_ids.to(input_ids.device), packed.labels.to(input_ids.device)
            batch, real = _prepare(tokens, None, packed.cu_seqlens, labels, group, temperature, layout)
        else:
            batch, real = _prepare(input_ids, attention_mask, cu_seqlens, None, group, temperature, layout)
        batch["length"] = input_ids.shape[1]  # largest position of the user's batch, with its padding, plus 1
        if cu_seqlens is not None:
            numbers = torch.arange(input_ids.shape[1], device="cpu")
            batch["length"] = 1 + int(within_documents(numbers, cu_seqlens).max())
    both = model(**batch, temperature=temperature)
    results, bounds = both if return_entropy else both[:1], batch["cu_seqlens"]
    whole = [unshard_sequence(x, group, 1, layout, bounds)[:, real] for x in results]
    if rows is not None:
        whole = [values_at(x, rows) for x in whole]
    return (whole[0], whole[1]) if return_entropy else whole[0]


def _pack(
    input_ids: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, min_shared: int
) -> tuple[SharedPrefixes, Tensor]:
    """Return the documents or rows of a batch with common prefixes once, and the packed row of each token, or -1."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    check_padding(mask, input_ids, None, cu_seqlens)
    size = input_ids.shape[1]
    bounds: Sequence[int] = range(0, input_ids.numel() + 1, size)
    if cu_seqlens is not None:
        bounds = read_documents(cu_seqlens).plain_bounds("share_prefixes")
    tokens, is_token = input_ids.flatten().cpu(), mask.flatten().cpu() != 0
    spans = [(start, start + int(is_token[start:stop].sum())) for start, stop in pairwise(bounds)]
    spans = [(start, stop) for start, stop in spans if start < stop]
    packed = pack([tokens[start:stop] for start, stop in spans], min_shared=min_shared)
    rows = places_of(packed, spans, input_ids.numel())
    return packed, rows.view(input_ids.shape).to(input_ids.device)


def _prepare(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    labels: Tensor | None,
    group: Group,
    temperature: float,
    layout: str,
) -> tuple[dict[str, Any], Tensor]:
    """Return this rank's shard of the padded batch, and for each column of it True unless it is padding."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; leave it out for 1.")
    process_group = resolve(group)
    cp_size = 1 if process_group is None else process_group.size()
    numbers = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    tokens, columns, bounds, _ = pad_sequence(input_ids, numbers, cu_seqlens, cp_size=cp_size, layout=layout)
    assert columns is not None
    if labels is not None:
        labels = pad_sequence(input_ids, labels, cu_seqlens, cp_size=cp_size, layout=layout).labels
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = pad_sequence(mask, cu_seqlens=cu_seqlens, cp_size=cp_size, layout=layout).tokens
    positions = "global" if cu_seqlens is None else "document"
    batch = prepare_batch(
        tokens, group=group, cu_seqlens=bounds, labels=labels, attention_mask=mask, layout=layout,
        position_ids=positions,
    )  # fmt: skip
    if cu_seqlens is not None:
        batch["columns"] = batch["position_ids"]
    return batch, columns[0] >= 0
