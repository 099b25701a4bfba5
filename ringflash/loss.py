"""Token cross-entropy with the one loss scale that every backend turns into the right gradient.

    loss on a rank = sum of its token losses / labelled tokens of the whole sequence * cp_size

DDP, FSDP2 and ZeRO-0 to 3 average gradients over all their ranks, context-parallel ones included. With this
scale that average is the gradient of the mean token loss of the data-parallel samples, and the average of
the loss over the ranks is that mean.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from ringflash.comm.group import Group, resolve
from ringflash.sequence.padding import IGNORE_INDEX

CHUNK_LOGITS = 1 << 27  # logits alive at a time: 512 MiB in fp32


def count_tokens(labels: torch.Tensor, group: Group) -> torch.Tensor:
    """Labelled tokens of the whole sequence, summed over the shards of the group.

    Args:
        labels: this rank's shard, any shape; -100 is no label. A shard without any is fine.
    Returns:
        count: scalar, int64, on the device of labels; computed without waiting for the device.
    """
    resolved = resolve(group)
    count = (labels != IGNORE_INDEX).sum()
    if resolved is not None:
        dist.all_reduce(count, group=resolved)
    return count


def cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: Group,
    num_tokens: torch.Tensor | int | None = None,
    chunk_tokens: int | None = None,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """Cross-entropy of the logits hidden @ weight.T * logit_scale, scaled as this module's head says.

    The logits of a few tokens exist at a time, forward and backward together; never those of the shard.
    Labels are shifted before the sequence is sharded (`shift_labels`): the next token of a chunk's last one
    lies on another rank.

    Args:
        hidden: (..., hidden_size), this rank's shard, last layer.
        weight: (vocab_size, hidden_size), output embedding.
        labels: (...), int64, this rank's shard of the shifted labels; -100 is no label.
        group: ranks that share the sequence; None for one process.
        num_tokens: labelled tokens of the whole sequence; default `count_tokens(labels, group)`.
        chunk_tokens: tokens whose logits are alive together; default as many as make 512 MiB in fp32.
        logit_scale: of models that scale their logits (Granite, Cohere).
    Returns:
        loss: scalar, fp32 (fp64 for fp64). A shard without labels contributes 0, with zero gradients.
    Raises:
        ValueError: shapes that do not fit; a weight that is still sharded; a chunk without tokens; fewer than 0 tokens.
        RuntimeError: a label that is neither -100 nor in the vocabulary; a device-side assertion on GPUs.
    Numerics: softmax, loss and the sum over tokens in fp32; the gradient of weight is summed over chunks in fp32.
    """
    _check(hidden, weight, labels, chunk_tokens)
    resolved = resolve(group)
    if num_tokens is None:
        num_tokens = count_tokens(labels, group)
    elif isinstance(num_tokens, int) and num_tokens < 0:
        raise ValueError(f"num_tokens must be 0 or more, got {num_tokens}; leave it out to have the labels counted.")
    count = torch.as_tensor(num_tokens, device=hidden.device).clamp(min=1)
    cp_size = 1 if resolved is None else resolved.size()
    chunk = chunk_tokens or max(1, CHUNK_LOGITS // weight.shape[0])
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    scale = cp_size / count.to(dtype)
    loss = _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, labels.flatten(), scale, chunk, logit_scale)
    return cast(torch.Tensor, loss)


@torch.no_grad()
def score_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_tokens: int | None = None,
    logit_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of every token, and whether its label is the most likely one; without gradients, chunk by chunk.

    Args: as `cross_entropy`.
    Returns:
        losses: as labels, fp32 (fp64 for fp64); 0 where there is no label.
        correct: as labels, bool; False where there is no label.
    Raises:
        ValueError: as `cross_entropy`.
    """
    _check(hidden, weight, labels, chunk_tokens)
    losses = hidden.new_zeros(labels.numel(), dtype=torch.promote_types(hidden.dtype, torch.float32))
    correct = torch.zeros_like(losses, dtype=torch.bool)
    tokens, wanted = hidden.flatten(0, -2), labels.flatten()
    for start in range(0, len(wanted), chunk := chunk_tokens or max(1, CHUNK_LOGITS // weight.shape[0])):
        rows = slice(start, start + chunk)
        logits = _logits(tokens[rows], weight, logit_scale).to(losses.dtype)
        losses[rows] = torch.nn.functional.cross_entropy(
            logits, wanted[rows], ignore_index=IGNORE_INDEX, reduction="none"
        )
        correct[rows] = logits.argmax(1) == wanted[rows]
    return losses.view_as(labels), correct.view_as(labels)


def shift_labels(tokens: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Labels of a whole sequence, before sharding: each token's successor, -100 where it has none.

    Args:
        tokens: (batch, seqlen), int64.
        cu_seqlens: (num_documents + 1,), int32: the last token of a document has no successor.
    Returns:
        labels: (batch, seqlen), int64.
    """
    labels = torch.full_like(tokens, IGNORE_INDEX)
    labels[:, :-1] = tokens[:, 1:]
    if cu_seqlens is not None:
        labels[:, cu_seqlens[1:].long() - 1] = IGNORE_INDEX
    return labels


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients chunk by chunk in the forward; the backward only scales them.

    By the count of tokens too: 1 / 1M is lost in fp16 unless it meets the factor of a loss scaler first.
    Source: the fused linear cross-entropy of Hsu et al. 2024, arXiv:2410.10989, in eager torch.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, scale, chunk, logit_scale):  # type: ignore[no-untyped-def]
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        total = scale.new_zeros(())
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=scale.dtype) if need_weight else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            labelled = labels[rows] != IGNORE_INDEX
            target = labels[rows].masked_fill(~labelled, 0).unsqueeze(1)  # any other label out of range is an error
            log_p = _logits(hidden[rows], weight, logit_scale).log_softmax(1, dtype=scale.dtype)
            chosen = log_p.gather(1, target)
            total -= chosen.squeeze(1).masked_fill(~labelled, 0.0).sum() * scale
            if not (need_hidden or need_weight):
                continue
            grad = log_p.exp_().to(hidden.dtype).scatter_(1, target, chosen.expm1().to(hidden.dtype))
            counts = labelled.to(hidden.dtype).unsqueeze(1)  # on the narrow side of the products, not on the logits
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ weight) * counts
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, hidden[rows] * counts)
            del log_p, grad  # or they would lie beside the next chunk's
        ctx.save_for_backward(grad_hidden, grad_weight, scale * logit_scale)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the gradients kept are constants
            raise NotImplementedError(
                "create_graph must be False, got True; second derivatives of ringflash.loss are not implemented."
            )
        grad_hidden, grad_weight, scale = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = _scaled(grad_hidden, grad * scale, grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = _scaled(grad_weight, grad * scale, ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, logit_scale: float) -> torch.Tensor:
    logits = hidden @ weight.T
    return logits if logit_scale == 1 else logits.mul_(logit_scale)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b; on GPUs a product of bf16 or fp16 is added in fp32 where it is made."""
    narrow = total.is_cuda and total.dtype == torch.float32 and a.dtype == b.dtype != torch.float32
    if narrow and not torch.compiler.is_compiling():  # torch 2.11's decomposition does not know `out_dtype`
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _scaled(grad: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """grad * factor, rounded once: with two dimensions the factor keeps its dtype beside a grad in bf16."""
    return torch.mul(grad, factor.view(1, 1), out=torch.empty_like(grad, dtype=dtype))


def _check(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int | None) -> None:
    from torch.distributed.tensor import DTensor  # takes as long as a third of `import ringflash`

    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be 1 or more, got {chunk_tokens}; leave it out for 512 MiB of logits.")
    if isinstance(weight, DTensor):
        raise ValueError(
            "weight must be whole, got a sharded DTensor; call cross_entropy inside the forward of the module "
            "that FSDP wraps, where its parameters are gathered."
        )
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight must be (vocab_size, {hidden.shape[-1]}), got {tuple(weight.shape)}; pass the output embedding."
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of hidden without its last dimension {tuple(hidden.shape[:-1])}, "
            f"got {tuple(labels.shape)}; shard the shifted labels as the tokens."
        )
