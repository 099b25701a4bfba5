"""Token cross-entropy with the loss scale for which every backend computes the right gradient.

    loss on a rank = sum of its token losses / labelled tokens of the whole sequence * cp_size

DDP, FSDP2 and ZeRO-0 to 3 average gradients over all ranks, including context-parallel ones. With this scale, the
average over ranks is the gradient of the mean token loss of the data-parallel samples, and the losses of the ranks
average to that mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringflash.comm.group import Group, resolve
from ringflash.sequence.labels import agreed_count, check_num_tokens, tell_of_error
from ringflash.sequence.labels import count_tokens as count_tokens
from ringflash.sequence.labels import shift_labels as shift_labels
from ringflash.sequence.padding import IGNORE_INDEX

CHUNK_LOGITS = 1 << 27  # logits in memory at a time: 512 MiB in fp32


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: Group,
    num_tokens: Tensor | int | None = None,
    chunk_tokens: int | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Compute the cross-entropy of the logits hidden @ weight.T * logit_scale, scaled as in the module docstring.

    Forward and backward run chunk by chunk, so only the logits of a few tokens are in memory at a time. Labels must be
    shifted before the sequence is sharded (`shift_labels`), since the successor of a chunk's last token is on another
    rank.

    Args:
        hidden: (..., hidden_size), this rank's shard of the last layer's output.
        weight: (vocab_size, hidden_size), output embedding.
        labels: (...), int64, this rank's shard of the shifted labels; -100 means no label.
        group: ranks that share the sequence; None for one process.
        num_tokens: labelled tokens of the whole sequence, the same on all ranks of the group: an int, or a tensor of
            one integer. Default: counted from the labels.
        chunk_tokens: tokens whose logits are in memory together; by default as many as have 512 MiB of logits in fp32.
        logit_scale: factor of models that scale their logits (Granite, Cohere).
    Returns:
        loss: scalar, fp32 (fp64 for fp64). A shard without labels contributes 0, with zero gradients.
    Raises:
        ValueError: mismatched shapes; a weight that is still sharded; a logit_scale that requires grad; chunk_tokens
            below 1; num_tokens negative, not an integer, or different between ranks (for tensors on GPUs a device-side
            assertion). An error of one rank is raised on every rank.
        RuntimeError: a label that is neither -100 nor in the vocabulary; a device-side assertion on GPUs.
    Numerics: softmax, loss and the sum over tokens in fp32; the gradient of weight is summed over chunks in fp32.
    """
    resolved = resolve(group)
    try:
        chunk = _checked_chunk(hidden, weight, labels, chunk_tokens, logit_scale)
        check_num_tokens(num_tokens)
    except ValueError:
        tell_of_error(labels, resolved)
        raise
    count = agreed_count(labels, num_tokens, resolved).clamp(min=1)
    cp_size = 1 if resolved is None else resolved.size()
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    scale = cp_size / count.to(dtype)
    return _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, labels.flatten(), scale, chunk, logit_scale)  # type: ignore[no-any-return]


@torch.no_grad()
def score_tokens(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int | None = None, logit_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return every token's loss, and if its label is the most likely one; without gradients, chunk by chunk.

    Args: see `cross_entropy`.
    Returns:
        losses: shape of labels, fp32 (fp64 for fp64); 0 for tokens without a label.
        correct: shape of labels, bool; False for tokens without a label.
    Raises:
        ValueError: mismatched shapes, a sharded weight or chunk_tokens below 1, as in `cross_entropy`.
    """
    chunk = _checked_chunk(hidden, weight, labels, chunk_tokens, logit_scale)
    losses = hidden.new_zeros(labels.numel(), dtype=torch.promote_types(hidden.dtype, torch.float32))
    correct = torch.zeros_like(losses, dtype=torch.bool)
    tokens, wanted = hidden.flatten(0, -2), labels.flatten()
    for start in range(0, len(wanted), chunk):
        rows = slice(start, start + chunk)
        logits = _logits(tokens[rows], weight, logit_scale).to(losses.dtype)
        losses[rows] = torch.nn.functional.cross_entropy(
            logits, wanted[rows], ignore_index=IGNORE_INDEX, reduction="none"
        )
        correct[rows] = logits.argmax(1) == wanted[rows]
    return losses.view_as(labels), correct.view_as(labels)


def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int | None = None, logit_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every label, and the entropy of its distribution, chunk by chunk.

    Both are differentiable. The backward computes the logits of each chunk again.

    Args: as `cross_entropy`. A logit_scale of 1 / temperature gives the probabilities of sampling.
    Returns:
        log_probs: as labels, natural log, fp32 (fp64 for fp64); 0 where there is no label.
        entropy: as log_probs.
    Raises:
        ValueError: as `cross_entropy`, on this rank only: nothing is sent.
    Numerics: softmax, sums and the gradient of weight over chunks in fp32.
    """
    chunk = _checked_chunk(hidden, weight, labels, chunk_tokens, logit_scale)
    log_probs, entropy = _LinearLogProbs.apply(hidden.flatten(0, -2), weight, labels.flatten(), chunk, logit_scale)
    return log_probs.view_as(labels), entropy.view_as(labels)


class _LinearCrossEntropy(torch.autograd.Function):
    """Fused linear cross-entropy: the forward computes loss and gradients chunk by chunk, the backward scales them.

    Division by the number of tokens is left to the backward, too: 1 / 1M underflows in fp16 unless a loss scaler's
    factor is applied first.
    Source: Hsu et al. 2024, arXiv:2410.10989, in eager torch.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, scale, chunk, logit_scale):  # type: ignore[no-untyped-def]
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        total = scale.new_zeros(())
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=scale.dtype) if need_weight else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            labelled, target = _targets(labels[rows])
            log_p = _logits(hidden[rows], weight, logit_scale).log_softmax(1, dtype=scale.dtype)
            chosen = log_p.gather(1, target)
            total -= chosen.squeeze(1).masked_fill(~labelled, 0.0).sum() * scale
            if not (need_hidden or need_weight):
                continue
            grad = log_p.exp_().to(hidden.dtype).scatter_(1, target, chosen.expm1().to(hidden.dtype))
            counts = labelled.to(hidden.dtype).unsqueeze(1)  # applied to the smaller factor, not to the logits
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ weight) * counts
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, hidden[rows] * counts)
            del log_p, grad  # free them before the next chunk's are allocated
        ctx.save_for_backward(grad_hidden, grad_weight, scale * logit_scale)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        _check_once_differentiated()
        grad_hidden, grad_weight, scale = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = _scale(grad_hidden, grad * scale, grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = _scale(grad_weight, grad * scale, ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


class _LinearLogProbs(torch.autograd.Function):
    """Log-probabilities of labels and entropies; the backward computes each chunk's logits again.

    With p the probabilities, h their entropy and y the label, a logit z_j has
    d log p_y / d z_j = [j = y] - p_j and dh / d z_j = -p_j (log p_j + h).
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk, logit_scale):  # type: ignore[no-untyped-def]
        log_probs = hidden.new_zeros(len(labels), dtype=torch.promote_types(hidden.dtype, torch.float32))
        entropy = torch.zeros_like(log_probs)
        for start in range(0, len(labels), chunk):
            rows = slice(start, start + chunk)
            labelled, target = _targets(labels[rows])
            log_p = _logits(hidden[rows], weight, logit_scale).log_softmax(1, dtype=log_probs.dtype)
            log_probs[rows] = log_p.gather(1, target).squeeze(1).masked_fill(~labelled, 0.0)
            entropy[rows] = torch.special.entr(log_p.exp_()).sum(1).masked_fill(~labelled, 0.0)
            del log_p
        ctx.save_for_backward(hidden, weight, labels, entropy)
        ctx.set_materialize_grads(False)
        kind = hidden.device.type
        ctx.options = chunk, logit_scale, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):  # type: ignore[no-untyped-def]
        _check_once_differentiated()
        hidden, weight, labels, entropy = ctx.saved_tensors
        (chunk, logit_scale, autocast), (need_hidden, need_weight) = ctx.options, ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=entropy.dtype) if need_weight else None
        for start in range(0, len(labels), chunk):
            rows = slice(start, start + chunk)
            labelled, target = _targets(labels[rows])
            with torch.autocast(*autocast):
                log_p = _logits(hidden[rows], weight, logit_scale).log_softmax(1, dtype=entropy.dtype)
            grad = torch.zeros_like(log_p)
            if grad_entropy is not None:
                grad -= log_p.exp() * (log_p + entropy[rows, None]) * grad_entropy[rows, None]
            if grad_log_probs is not None:
                grad_rows = grad_log_probs[rows, None]
                grad -= log_p.exp_() * grad_rows
                grad.scatter_add_(1, target, grad_rows)
            grad = (grad * labelled[:, None] * logit_scale).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight.to(hidden.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, hidden[rows])
            del log_p, grad
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _check_once_differentiated() -> None:
    """Raise NotImplementedError in a backward that keeps a graph, since the graph would have constant gradients.

    torch's `once_differentiable` does so only if the gradients of the outputs require grad.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "create_graph must be False, got True; second derivatives of ringflash.loss are not implemented."
        )


def _targets(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that have labels, and labels as an index of columns; a label out of range raises an error."""
    labelled = labels != IGNORE_INDEX
    return labelled, labels.masked_fill(~labelled, 0).unsqueeze(1)


def _logits(hidden: Tensor, weight: Tensor, logit_scale: float) -> Tensor:
    logits = hidden @ weight.T
    return logits if logit_scale == 1 else logits.mul_(logit_scale)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total. On GPUs, a product of bf16 or fp16 is accumulated in fp32."""
    narrow = total.is_cuda and total.dtype == torch.float32 and a.dtype == b.dtype != torch.float32
    if narrow and not torch.compiler.is_compiling():  # torch 2.11's decomposition does not know `out_dtype`
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _scale(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad * factor, rounded once. A 2-D factor keeps its dtype; torch would cast a 0-D one to grad's."""
    return torch.mul(grad, factor.view(1, 1), out=torch.empty_like(grad, dtype=dtype))


def _checked_chunk(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None, logit_scale: float) -> int:
    """Check the arguments; return the number of tokens whose logits are in memory together."""
    from torch.distributed.tensor import DTensor  # takes as long as a third of `import ringflash`

    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be 1 or more, got {chunk_tokens}; leave it out for 512 MiB of logits.")
    if isinstance(logit_scale, Tensor) and logit_scale.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "logit_scale must be a number, got a tensor that requires grad, whose gradient would be lost; multiply "
            "hidden by it, and leave logit_scale out."
        )
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
            f"got {tuple(labels.shape)}; shard the shifted labels like the tokens."
        )
    return chunk_tokens or max(1, CHUNK_LOGITS // weight.shape[0])
