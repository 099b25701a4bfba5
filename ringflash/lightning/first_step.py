"""Comparison of a user's training step on the ring with the same step on the whole sequence, before training.

`ringflash.wrap.check.check_wrapped` compares everything up to the last attention; this file compares the losses, which
are computed after it, and the batches of the ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ringflash.comm.agreement import agree, gather
from ringflash.comm.group import Group, resolve


class _Stopped(Exception):
    """Raised at the first manual backward of a step (automatic_optimization = False), to end it there."""


@dataclass(eq=False)
class FirstStep:
    """Trial run of a training step, which changes no parameters.

    Args:
        whole: True for the whole sequence on this rank, False for this rank's shard.
        num_tokens: labelled tokens of the whole sequence, for each call of `token_loss`.
        loss: this rank's loss, if the step has one.
    """

    whole: bool
    num_tokens: list[int] = field(default_factory=list)
    loss: float | None = None

    def run(self, training_step: Callable[..., Any], batch: Any) -> None:
        """Run the step up to its backward. It may take the batch only, as in Lightning."""
        index = (0,) if is_param_in_hook_signature(training_step, "batch_idx", min_args=2) else ()
        try:
            self._keep(training_step(batch, *index))
        except _Stopped:
            pass

    def stop(self, loss: Any, *_: Any, **__: Any) -> None:
        """Keep the loss and end the step; used as manual_backward, after which optimizers would step."""
        self._keep(loss)
        raise _Stopped

    def _keep(self, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self.loss = loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def check_step(local: FirstStep, whole: FirstStep, group: Group, dtype: torch.dtype) -> None:
    """Check that the mean loss over the ring's ranks is the loss of the whole sequence, or 1 / cp_size of it.

    The second case is a step that multiplies its loss by cp_size itself: it does so on the whole sequence as well.

    Args:
        dtype: dtype in which the module computes.
    Raises:
        ValueError: labels differ, or losses differ by more than sqrt(eps); on every rank.
    """
    resolved = resolve(group)
    if resolved is None:
        return
    error = _difference(local, whole, gather(resolved, local.loss), torch.finfo(dtype).eps ** 0.5)
    agree(group, {"first step": len(local.num_tokens)}, error)


def check_same_batch(batch: Any, group: Group) -> None:
    """Check that all ranks of a ring have a batch with the same tensors, of which each then takes its shard.

    A rank may arrive late, after a callback for example, within the timeout of a ring (`ringflash.set_timeout`).

    Raises:
        ValueError: the batches differ; on every rank.
    """
    resolved, checksum = resolve(group), 0
    if resolved is None:
        return

    def add(x: Tensor) -> None:
        nonlocal checksum
        head = f"{x.dtype}{tuple(x.shape)}".encode()
        contents = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(contents.numpy().data, zlib.crc32(head, checksum))

    apply_to_collection(batch, Tensor, add)
    sums = gather(resolved, checksum)
    if len(set(sums)) > 1:
        raise ValueError(
            f"batch must be the same on all ranks of a ring, because each takes a part of it, got {len(set(sums))} "
            f"different ones on {len(sums)} ranks; split data over data ranks only (DistributedSampler with "
            "num_replicas=strategy.dp_size and rank=strategy.dp_rank), and seed random draws alike on them."
        )


def _difference(local: FirstStep, whole: FirstStep, losses: list[Any], bound: float) -> ValueError | None:
    if local.num_tokens != whole.num_tokens:
        return ValueError(
            f"token_loss must be given the labels of the whole sequence ({whole.num_tokens} in its calls), got "
            f"{local.num_tokens} over the ring; shift labels before the batch is sharded (ringflash.loss.shift_labels)."
        )
    if whole.loss is None or None in losses or not math.isfinite(whole.loss):
        return None
    mean, wanted = sum(losses) / len(losses), (whole.loss, whole.loss / len(losses))
    if any(abs(mean - x) <= bound * abs(x) for x in wanted):
        return None
    return ValueError(
        f"training_step's loss, averaged over the ring, must be that of the whole sequence ({whole.loss:.6g}), got "
        f"{mean:.6g}; use token_loss, which counts the tokens of all ranks, with labels shifted before the batch is "
        "sharded, or set check_sequence_sharding = False if another loss is intended."
    )
