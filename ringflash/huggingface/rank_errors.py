"""Errors of one rank that every rank of a ring raises, once a forward, in its first layer."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.comm import agreement

NUM_VALUES = 7  # in the all-reduce of a forward; the first three are flags of errors


def raise_together(group: dist.ProcessGroup | None, error: Exception, device: torch.device) -> None:
    """Raise an error that this rank finds before its first layer; the others raise it there, in `check_consistency`."""
    if device.type == "meta":
        raise error
    maxima_of_ranks(group, torch.zeros(NUM_VALUES, dtype=torch.int64, device=device), error)
    raise_on_every_rank(group, error)


def maxima_of_ranks(group: dist.ProcessGroup | None, found: Tensor, error: Exception | None) -> list[int]:
    """Return the maxima over the ranks, with all flags set if a rank has an error."""
    worst = found.clone()
    worst[:3] |= int(error is not None)
    if group is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return worst.tolist()


@torch.compiler.disable(reason="ranks tell one another")
def raise_on_every_rank(group: dist.ProcessGroup | None, error: Exception | None) -> NoReturn:
    """Raise this rank's error, or without one the error that another rank has sent."""
    agreement.agree(group, {"huggingface": "refused on a rank"}, error)
    raise error or ValueError(
        "inputs must be right on all ranks of the group, got an error on another rank; see its log."
    )
