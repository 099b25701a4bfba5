"""Ending a run in order when the machine is taken away."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from ringflash.lightning.trainers import TrainerChecks


class StopOnSignal(lightning.Callback):
    """On SIGTERM to any rank: all finish the step, write a checkpoint together, and stop without another evaluation.

    The handler only takes a note; ranks compare notes at the end of each batch, and stop within two more steps. An
    evaluation that the signal meets is finished first. Lightning's own handler broadcasts from inside whatever
    collective it has interrupted, and hangs.

    `trainer.validate`, `test` and `predict` have nothing to save: what SIGTERM did before Lightning took it, by
    default to end the process, it does again.

    The strategies add this callback to every trainer that has none.
    """

    def __init__(self) -> None:
        self.noted = False
        self._agreed: torch.Tensor | None = None  # whether any rank had a note, at the end of the last batch
        self._step = 0  # steps at the end of the last batch
        self._limits: tuple[Any, Any, Any] | None = None  # the trainer's, while it stops

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Have Lightning, which takes the signal next, call this note: before the first step it would send already."""
        trainer._signal_connector._sigterm_notifier_fn = self._note

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Take the signal over from Lightning, which gives it back when it is done."""
        _handle_sigterm(self._note)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        """Stop if a rank had a note a batch ago: that answer is here, and reading it makes nobody wait.

        Only at the end of a step: gradients that batches have accumulated are in no checkpoint.
        """
        stepped, self._step = trainer.global_step != self._step, trainer.global_step
        if stepped and self._agreed is not None and self._agreed.item():
            path = Path(trainer.log_dir or trainer.default_root_dir, f"interrupted-step={trainer.global_step}.ckpt")
            trainer.save_checkpoint(path)
            if isinstance(trainer.strategy, TrainerChecks):
                trainer.strategy.finish_checkpoints()  # before the path is named, and whatever the end still does
            trainer.should_stop = True
            # Lightning goes on to its least steps and epochs, and evaluates once more: there may be no time.
            loop = trainer.fit_loop
            self._limits = trainer.limit_val_batches, loop.min_epochs, loop.epoch_loop.min_steps
            trainer.limit_val_batches, loop.min_epochs, loop.epoch_loop.min_steps = 0, 0, None
            lightning.pytorch.utilities.rank_zero_info(f"Interrupted; go on with --ckpt_path {path}")
        self._agreed = torch.tensor(int(self.noted), device=pl_module.device)
        if dist.is_initialized():
            dist.all_reduce(self._agreed, op=dist.ReduceOp.MAX)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Leave the trainer as it was."""
        if self._limits is not None:
            loop = trainer.fit_loop
            trainer.limit_val_batches, loop.min_epochs, loop.epoch_loop.min_steps = self._limits
            self._limits = None

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Give the signal back to what had it before Lightning, unless this evaluation is a part of a training."""
        if trainer.state.fn != TrainerFn.FITTING:
            _handle_sigterm(trainer._signal_connector._original_handlers.get(signal.SIGTERM))

    on_test_start = on_predict_start = on_validation_start

    def _note(self, signum: int, frame: Any) -> None:
        self.noted = True


def add_stop_on_signal(trainer: lightning.Trainer) -> None:
    """Put a `StopOnSignal` before the other callbacks of a trainer that has none."""
    if not any(isinstance(callback, StopOnSignal) for callback in trainer.callbacks):
        trainer.callbacks.insert(0, StopOnSignal())


def _handle_sigterm(handler: Any) -> None:
    """Have SIGTERM call `handler`; in a thread, whose process belongs to others, leave it alone, as Lightning does."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
