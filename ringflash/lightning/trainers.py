"""What a trainer must not ask of ranks that share parameters and sequences."""

from __future__ import annotations

import lightning
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging


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
