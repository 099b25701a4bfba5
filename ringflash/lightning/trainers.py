"""What a trainer must not ask of ranks that share parameters and sequences."""

from __future__ import annotations

from collections.abc import Sequence

import lightning
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ringflash.comm.agreement import gather


class TrainerChecks(ParallelStrategy):
    """What a strategy looks at before processes join, and before the first batch of each kind."""

    def check_trainer(self, *, copies_module: bool) -> None:
        """Refuse what no training over the ranks can do; evaluations alone may have it.

        Args:
            copies_module: whether a callback may copy the module.
        Raises:
            ValueError: processes that were started in another number than devices * num_nodes; a time between
                evaluations.
            NotImplementedError: a callback that copies the module where it must not.
        """
        assert self.cluster_environment is not None
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        if self._trainer.state.fn == TrainerFn.FITTING:
            check_interval(self._trainer)
            if not copies_module:
                check_averaging(self._trainer)

    def finish_checkpoints(self) -> None:
        """Return when the checkpoints asked for are on the disk: at once if training waits for each of them."""

    def on_train_start(self) -> None:
        """Before the first batch.

        Raises:
            ValueError: data ranks with different numbers of batches; here and at the other starts, on every rank.
        """
        check_batches([self._trainer.num_training_batches])
        super().on_train_start()

    def on_validation_start(self) -> None:
        """Of an evaluation in a training, too."""
        check_batches(self._trainer.num_val_batches)
        super().on_validation_start()

    def on_test_start(self) -> None:
        """Before the first batch."""
        check_batches(self._trainer.num_test_batches)
        super().on_test_start()

    def on_predict_start(self) -> None:
        """Lightning's own sampler gives some data ranks a sequence less than others."""
        check_batches(self._trainer.num_predict_batches)
        super().on_predict_start()

    @property
    def _trainer(self) -> lightning.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


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
