"""What a module of one's own computes on the ring beside what it computes on the whole sequence, and from which batch.

`check_wrapped` compares all that comes before the last attention; the losses here come after it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ringflash.comm.agreement import agree, gather
from ringflash.comm.group import Group, resolve


class _Stopped(Exception):
    """At the first backward of a step that does its own (automatic_optimization = False)."""


@dataclass(eq=False)
class FirstStep:
    """A training step that trains nothing.

    Args:
        whole: on the whole sequence, by this rank alone.
        num_tokens: labelled tokens of the whole sequence, of each call of `token_loss`.
        loss: this rank's, if the step has one.
    """

    whole: bool
    num_tokens: list[int] = field(default_factory=list)
    loss: float | None = None

    def run(self, training_step: Callable[[Any, int], Any], batch: Any) -> None:
        """The step, up to its backward."""
        try:
            self._keep(training_step(batch, 0))
        except _Stopped:
            pass

    def stop(self, loss: Any, *_: Any, **__: Any) -> None:
        """In the place of manual_backward: optimizers and schedulers are stepped behind it."""
        self._keep(loss)
        raise _Stopped

    def _keep(self, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self.loss = loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def check_step(local: FirstStep, whole: FirstStep, group: Group, dtype: torch.dtype) -> None:
    """Return if the ring's loss, the mean over its ranks, is that of the whole sequence.

    Or the whole one is cp_size times it: a step that multiplies by cp_size itself does so there, too.

    Args:
        dtype: in which the module computes.
    Raises:
        ValueError: other labels, or a loss further off than sqrt(eps); on every rank.
    """
    resolved = resolve(group)
    if resolved is None:
        return
    error = _difference(local, whole, gather(resolved, local.loss), torch.finfo(dtype).eps ** 0.5)
    agree(group, {"first step": len(local.num_tokens)}, error)


def check_same(batch: Any, group: Group) -> None:
    """Return if all ranks of a ring, of which each takes its part of the batch, have the same one: by its tensors.

    A rank may be late, with a callback of its own, by as much as in a ring (`ringflash.set_timeout`).

    Raises:
        ValueError: they have not; on every rank.
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
            f"batch must be the same on all ranks of a ring, which each take a part of it, got {len(set(sums))} "
            f"different ones on {len(sums)} ranks; share data out by data ranks alone (DistributedSampler with "
            "num_replicas=strategy.dp_size and rank=strategy.dp_rank), and seed all that draws alike on them."
        )


def _difference(local: FirstStep, whole: FirstStep, losses: list[Any], bound: float) -> ValueError | None:
    if local.num_tokens != whole.num_tokens:
        return ValueError(
            f"token_loss must be given the labels of the whole sequence ({whole.num_tokens} in its calls), got "
            f"{local.num_tokens} over the ring; shift labels before the batch is cut (ringflash.loss.shift_labels)."
        )
    if whole.loss is None or None in losses or not math.isfinite(whole.loss):
        return None
    mean, wanted = sum(losses) / len(losses), (whole.loss, whole.loss / len(losses))
    if any(abs(mean - x) <= bound * abs(x) for x in wanted):
        return None
    return ValueError(
        f"training_step's loss, averaged over the ring, must be that of the whole sequence ({whole.loss:.6g}), got "
        f"{mean:.6g}; use token_loss, which counts the tokens of all ranks, with labels shifted before the batch is "
        "cut, or set check_sequence_sharding = False if another loss is meant."
    )
