"""Checks of a trainer whose ranks share parameters and sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import lightning
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ringflash.comm import call_numbers
from ringflash.comm.agreement import gather
from ringflash.comm.group import resolve
from ringflash.comm.mesh import DataContextRanks
from ringflash.comm.modules.buffers import ChangedBuffers
from ringflash.comm.modules.parameters import ParameterCheck, named_whole
from ringflash.lightning.checkpoints import check_folders
from ringflash.wrap.wrapper import in_step


class TrainerChecks(ParallelStrategy):
    """Mixin of both strategies: checks before the processes join, and before the first batch of each stage."""

    def check_trainer(self, *, copies_module: bool) -> None:
        """Refuse settings that training over several ranks does not support; evaluations may have them.

        Args:
            copies_module: True if callbacks may copy the module.
        Raises:
            ValueError: the number of started processes is not devices * num_nodes; a time between evaluations.
            NotImplementedError: a callback that copies the module although `copies_module` is False.
        """
        assert self.cluster_environment is not None
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        if self._trainer.state.fn == TrainerFn.FITTING:
            check_interval(self._trainer)
            if not copies_module:
                check_averaging(self._trainer)

    def setup(self, trainer: lightning.Trainer) -> None:
        """Set up as the strategy does, after checking where checkpoints will be written.

        Raises:
            ValueError: checkpoints would be written to a bucket.
        """
        check_folders(trainer)
        super().setup(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        """Seed loaders' workers by data rank after `seed_everything(workers=True)`: ranks of a ring read the same."""
        assert isinstance(self, DataContextRanks)
        _auto_add_worker_init_fn(dataloader, self.dp_rank)
        return super().process_dataloader(dataloader)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward as a part of the step: checkpointed layers attend again in it."""
        with in_step(self.lightning_module):
            return super().backward(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step; compare parameters that all ranks have whole, and the buffers that it has changed.

        Raises:
            ValueError: a parameter differs between ranks, or a buffer between the ranks of a ring; on every rank.
        """
        assert isinstance(self, DataContextRanks) and self.lightning_module is not None
        self._equal_parameters.compare(named_whole(self.lightning_module), resolve(dist.group.WORLD))
        ring = resolve(self.cp_group)
        before = call_numbers.next_number(ring)
        self._changed_buffers.begin(self.lightning_module)
        output = super().training_step(*args, **kwargs)
        self._changed_buffers.end(self.lightning_module, ring)
        if not self._has_stepped and ring is not None and call_numbers.next_number(ring) == before:
            rank_zero_warn(
                f"no attention has run over the ring of {self.cp_size} ranks in the first training step, so that each "
                "rank trains on the sequences that it was given by itself; list SequenceSharding before "
                "LightningModule (docs/lightning.md), or give the attention strategy.cp_group."
            )
        self._has_stepped = True
        return output

    _has_stepped = False

    @cached_property
    def _equal_parameters(self) -> ParameterCheck:
        return ParameterCheck()

    @cached_property
    def _changed_buffers(self) -> ChangedBuffers:
        return ChangedBuffers()

    def finish_checkpoints(self) -> None:
        """Wait until all requested checkpoints are on disk; a strategy that saves synchronously has nothing to do."""

    def on_train_start(self) -> None:
        """Check the number of training batches, as the other stages below do theirs."""
        check_batches([self._trainer.num_training_batches])
        super().on_train_start()

    def on_validation_start(self) -> None:
        """Check the number of validation batches, also when validating during training."""
        check_batches(self._trainer.num_val_batches)
        super().on_validation_start()

    def on_test_start(self) -> None:
        """Check the number of test batches."""
        check_batches(self._trainer.num_test_batches)
        super().on_test_start()

    def on_predict_start(self) -> None:
        """Check the number of prediction batches: Lightning's sampler gives some data ranks one sequence fewer."""
        check_batches(self._trainer.num_predict_batches)
        super().on_predict_start()

    @property
    def _trainer(self) -> lightning.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def check_interval(trainer: lightning.Trainer) -> None:
    """Raise ValueError for a time between evaluations: by other clocks one rank would evaluate while another trains."""
    if trainer.world_size > 1 and trainer._val_check_time_interval is not None:
        raise ValueError(
            "val_check_interval must be a number of batches with several ranks, whose clocks differ, got "
            f"{trainer._val_check_time_interval:g} s; give batches."
        )


def check_averaging(trainer: lightning.Trainer) -> None:
    """Raise NotImplementedError for weight averaging, which copies the module: FSDP2's own error is unclear."""
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise NotImplementedError(
                f"callbacks must not copy the module, whose parameters are sharded, got {type(callback).__name__}; "
                "average the shards (parameters' to_local()) in your own callback, or average checkpoints."
            )


def check_batches(numbers: Sequence[float]) -> None:
    """Raise ValueError on every rank if data ranks have different numbers of batches: some would wait forever.

    Args:
        numbers: number of batches of each data loader of this rank; inf if unknown.
    """
    group = dist.group.WORLD
    found = {tuple(of_rank) for of_rank in ([] if group is None else gather(group, list(numbers)))}
    if len(found) > 1:
        raise ValueError(
            "data loaders must have the same number of batches on every rank, got "
            f"{' and '.join(str(list(x)) for x in sorted(found))}; drop or repeat sequences until the numbers are "
            "equal."
        )
