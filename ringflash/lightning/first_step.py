"""Trial of a user's training, validation or test step, on a few tokens, and comparison of the batches of the ranks.

`ringflash.wrap.check` compares the trial on the ring with that on the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.functional import pad

from ringflash.comm.agreement import agree, gather
from ringflash.comm.comparison import checksum, gather_values
from ringflash.comm.group import Group, resolve
from ringflash.sequence.padding import IGNORE_INDEX
from ringflash.wrap.check import RANDOM_BOUND


class _Stopped(Exception):
    """Raised at the first manual backward of a step (automatic_optimization = False), to end it there."""


@dataclass(eq=False)
class FirstStep:
    """Trial run of a step, which changes no parameters.

    Args:
        whole: True for the whole sequence on this rank, False for this rank's shard.
        num_tokens: labelled tokens of the whole sequence, for each call of `token_loss`.
        loss: this rank's loss, if the step has one.
        logged: tensors that the last run has logged, by name, and how ranks would reduce them.
    """

    whole: bool
    num_tokens: list[int] = field(default_factory=list)
    loss: float | None = None
    logged: dict[str, tuple[float, str]] = field(default_factory=dict)

    def run(self, step: Callable[..., Any], batch: Any, dataloader_idx: int) -> None:
        """Run the step up to its backward. It may take the batch only, as in Lightning."""
        index = {"batch_idx": 0} if is_param_in_hook_signature(step, "batch_idx", min_args=2) else {}
        if is_param_in_hook_signature(step, "dataloader_idx", explicit=True):
            index["dataloader_idx"] = dataloader_idx
        self.logged = {}
        try:
            self._keep(step(batch, *index.values()))
        except _Stopped:
            pass

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Keep a tensor that ranks would reduce; Lightning logs only in steps that it runs itself."""
        sync_dist = options.get("sync_dist")
        reduced = not options.get("rank_zero_only", False) if sync_dist is None else sync_dist
        if reduced and isinstance(value, Tensor) and value.numel() == 1:
            self.logged[name] = value.item(), reduction_of(args, options)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Keep several values as `log` does."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def stop(self, loss: Any, *_: Any, **__: Any) -> None:
        """Keep the loss and end the step; used as manual_backward, after which optimizers would step."""
        self._keep(loss)
        raise _Stopped

    def _keep(self, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self.loss = loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def reduction_of(args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """Return the name of the reduction of a call of `log`, whose arguments after the value are given."""
    reduction = options.get("reduce_fx", args[4] if len(args) > 4 else "mean")
    return str(getattr(reduction, "__name__", reduction))


_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "sum": sum, "max": max, "min": min}


def warn_of_logs(step: str, local: FirstStep, whole: FirstStep, group: Group) -> None:
    """Warn of a step's logged tensors whose reduction over the ranks is not the value of the whole sequence."""
    resolved = resolve(group)
    if resolved is None:
        return
    of_ranks, wrong = gather_values(resolved, local.logged), []
    for name, (want, reduction) in whole.logged.items():
        values = [logged[name][0] for logged in of_ranks if name in logged]
        reduce = _REDUCTIONS.get(reduction)
        got = want if reduce is None or len(values) < len(of_ranks) else reduce(values)
        if isfinite(want) and not abs(got - want) <= RANDOM_BOUND * abs(want):
            wrong.append(f"{name!r} (the {reduction} of ranks is {got:.4g}, the sequence's value {want:.4g})")
    if wrong:
        rank_zero_warn(
            f"values that {step} logs, reduced over the ranks, should be those of the whole sequence, but in a trial "
            f"with random logits they differ: {', '.join(wrong)}. A mean over the labels or the mask of a shard is not "
            "that of the sequence: log what token_loss returns, or a torchmetrics Metric. If a value is meant to be "
            "each rank's own, log it with sync_dist=False."
        )


def check_labels(local: FirstStep, whole: FirstStep, group: Group) -> None:
    """Check that the shards have as many labels as the whole sequence.

    Raises:
        ValueError: they have not; on every rank.
    """
    error = None
    if local.num_tokens != whole.num_tokens:
        error = ValueError(
            f"token_loss must be given the labels of the whole sequence ({whole.num_tokens} tokens, by call), got "
            f"{local.num_tokens} over the ring; shift labels before the batch is sharded (ringflash.loss.shift_labels)."
        )
    agree(group, {"first step": len(local.num_tokens)}, error)


def check_same_batch(batch: Any, group: Group) -> None:
    """Check that all ranks of a ring have a batch with the same tensors, before each takes its shard.

    A rank may arrive late, after a callback for example, within the timeout of a ring (`ringflash.set_timeout`).

    Raises:
        ValueError: the batches differ; on every rank.
    """
    resolved, total = resolve(group), 0
    if resolved is None:
        return

    def add(x: Tensor) -> None:
        nonlocal total
        total = checksum(x, total)

    apply_to_collection(batch, Tensor, add)
    sums = gather(resolved, total)
    if len(set(sums)) > 1:
        raise ValueError(
            f"batch must be the same on all ranks of a ring, because each takes a part of it, got {len(set(sums))} "
            f"different ones on {len(sums)} ranks; split data over data ranks only (DistributedSampler with "
            "num_replicas=strategy.dp_size and rank=strategy.dp_rank), and seed random draws alike on them."
        )


def sample(batch: Any, size: int, held: Tensor) -> Any:
    """Return up to `size` successive tokens of every tensor with a sequence dim, without cu_seqlens and strings.

    - The tokens are those with the most labels.
    - If labels have a -100, or a tensor is a mask of 0 and 1 or has no negative numbers (weights), one rank keeps only
      its first label, 1 or weight. A mean over each shard then differs from the mean over the sequence.
    - If there are 2-D integers, such as tokens, tensors of another length (features of a sequence) are returned whole.

    Args:
        held: (num_tokens,), indices among the `size` tokens of those that one rank holds.
    """
    if isinstance(batch, Mapping):
        batch = {name: x for name, x in batch.items() if name != "cu_seqlens" and not isinstance(x, str)}
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, tensors.append)
    lengths = {x.shape[1] for x in tensors if x.dim() == 2 and not x.is_floating_point()}

    def has_tokens(x: Tensor) -> bool:
        return x.dim() > 1 and (not lengths or x.shape[1] in lengths)

    chosen_ones = [chosen for x in tensors if has_tokens(x) and (chosen := _chosen(x)) is not None]
    counts = [x.flatten(1).sum(0).cpu() for x in chosen_ones if x.shape[1] > size]
    start = 0
    if counts:
        counts = [x for x in counts if x.shape == counts[0].shape]
        sums = pad(torch.stack(counts).sum(0).cumsum(0), (1, 0))
        start = int((sums[size:] - sums[:-size]).argmax())

    def cut(x: Tensor) -> Tensor:
        """Return the chosen tokens of a tensor; of what counts at the tokens `held`, only the first one stays."""
        if not has_tokens(x):
            return x
        part = x[:, start : start + size]
        if (chosen := _chosen(x)) is None:
            return part
        chosen = chosen[:, start : start + size].flatten(1)
        mine = torch.zeros_like(chosen)
        mine[:, held[held < part.shape[1]].to(x.device)] = True
        mine &= chosen
        others = (mine & (mine.cumsum(1) > 1)).view(part.shape)
        if _has_ignored(x):
            return part.masked_fill(others, IGNORE_INDEX)
        return part.masked_fill(others, 0) if _is_mask(x) else torch.where(others, part / 16, part)

    return apply_to_collection(batch, Tensor, cut)


def _chosen(x: Tensor) -> Tensor | None:
    """Return which tokens of labels with a -100, of a mask or of weights count, (batch, seqlen, ...); else None."""
    if _has_ignored(x):
        return x != IGNORE_INDEX
    return x != 0 if x.shape[2:].numel() == 1 and (_is_mask(x) or _are_weights(x)) else None


def _has_ignored(x: Tensor) -> bool:
    return x.dim() == 2 and x.dtype == torch.int64 and bool((x == IGNORE_INDEX).any())


def _is_mask(x: Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all())


def _are_weights(x: Tensor) -> bool:
    return x.is_floating_point() and bool((x >= 0).all())
