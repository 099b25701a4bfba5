"""What a trainer must not ask of ranks that share parameters and sequences."""

from __future__ import annotations

from collections.abc import Sequence

import lightning
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from ringflash.agreement import gather


def check_interval(trainer: lightning.Trainer) -> None:
    """Refuse a time between evaluations: each rank looks at its own clock; one evaluates, and one trains on.

    Raises:
        ValueError: such a time.
    """
    if trainer.world_size > 1 and trainer._val_check_time_interval is not None:
        raise ValueError(
            "val_check_interval must be a number of batches with several ranks, whose clocks do not agree after which "
            f"batch to evaluate, got {trainer._val_check_time_interval:g} s; give batches."
        )


def check_averaging(trainer: lightning.Trainer) -> None:
    """Refuse Lightning's averages of weights, which copy the module: FSDP2 allows no copies, and says not what to do.

    Raises:
        NotImplementedError: names the callback.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise NotImplementedError(
                f"callbacks must not copy the module, whose parameters are sharded, got {type(callback).__name__}; "
                "average the shards (parameters' to_local()) in a callback of your own, or average checkpoints."
            )


def check_batches(numbers: Sequence[float]) -> None:
    """Refuse data ranks with different numbers of batches: all gather each layer's parameters, and some would wait.

    Args:
        numbers: of each data loader of this rank; inf where they are not known.
    Raises:
        ValueError: on every rank.
    """
    group = dist.group.WORLD
    found = {tuple(of_rank) for of_rank in ([] if group is None else gather(group, list(numbers)))}
    if len(found) > 1:
        raise ValueError(
            "data loaders must have as many batches on every rank, got "
            f"{' and '.join(str(list(x)) for x in sorted(found))}; drop or repeat sequences until all have as many."
        )
