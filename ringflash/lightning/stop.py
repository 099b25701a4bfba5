"""Graceful stop on SIGTERM, which clusters send before they take a machine away."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from ringflash.lightning.trainer_checks import TrainerChecks


class StopOnSignal(lightning.Callback):
    """Callback that stops all ranks after SIGTERM to any of them, once they have written a checkpoint together.

    The handler only sets a flag. Ranks combine their flags at the end of each batch, and stop within two more steps,
    without another evaluation; an evaluation that is running is finished first. Lightning's own handler broadcasts
    from inside whatever collective the signal has interrupted, and hangs.

    `trainer.validate`, `test` and `predict` have nothing to save: there SIGTERM has the handler that it had before
    Lightning, which by default ends the process.

    The strategies add this callback to every trainer that has none, and run it after the other callbacks.
    """

    def __init__(self) -> None:
        self.noted = False
        self._agreed: Tensor | None = None  # at the end of the last batch: 1 if any rank was signalled
        self._step = 0  # global step at the end of the last batch
        self._limits: tuple[Any, Any, Any] | None = None  # the trainer's own limits, restored after the stop

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Replace Lightning's handler, which it installs next and which would communicate before the first step."""
        trainer._signal_connector._sigterm_notifier_fn = self._note

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Install our handler; Lightning restores the original one at the end."""
        _handle_sigterm(self._note)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        """Stop if any rank was signalled before the end of the previous batch: reading that result costs no waiting.

        A run stops only at the end of a step, because checkpoints do not contain accumulated gradients.
        """
        stepped, self._step = trainer.global_step != self._step, trainer.global_step
        if stepped and self._agreed is not None and self._agreed.item():
            path = Path(trainer.log_dir or trainer.default_root_dir, f"interrupted-step={trainer.global_step}.ckpt")
            trainer.save_checkpoint(path)
            if isinstance(trainer.strategy, TrainerChecks):
                trainer.strategy.finish_checkpoints()  # before the path is printed and the run ends
            trainer.should_stop = True
            # Lightning would continue to min_steps and min_epochs and evaluate again; there may be no time.
            loop = trainer.fit_loop
            self._limits = trainer.limit_val_batches, loop.min_epochs, loop.epoch_loop.min_steps
            trainer.limit_val_batches, loop.min_epochs, loop.epoch_loop.min_steps = 0, 0, None
            lightning.pytorch.utilities.rank_zero_info(f"Interrupted; continue with --ckpt_path {path}")
        self._agreed = torch.tensor(int(self.noted), device=pl_module.device)
        if dist.is_initialized():
            dist.all_reduce(self._agreed, op=dist.ReduceOp.MAX)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Restore the trainer's limits."""
        if self._limits is not None:
            loop = trainer.fit_loop
            trainer.limit_val_batches, loop.min_epochs, loop.epoch_loop.min_steps = self._limits
            self._limits = None

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Restore the handler from before Lightning, unless this evaluation is part of a training."""
        if trainer.state.fn != TrainerFn.FITTING:
            _handle_sigterm(trainer._signal_connector._original_handlers.get(signal.SIGTERM))

    on_test_start = on_predict_start = on_validation_start

    def _note(self, signum: int, frame: Any) -> None:
        self.noted = True


def add_stop_on_signal(trainer: lightning.Trainer) -> None:
    """Place the `StopOnSignal` of a trainer, or a new one, after all callbacks but those that write checkpoints.

    Its checkpoint then has the other callbacks' state as of the end of the step, not of the step before.
    """
    others: list[Any] = trainer.callbacks
    stop = next((x for x in others if isinstance(x, StopOnSignal)), StopOnSignal())
    others = [x for x in others if x is not stop]
    first = next((i for i, x in enumerate(others) if isinstance(x, Checkpoint)), len(others))
    trainer.callbacks[:] = [*others[:first], stop, *others[first:]]


def _handle_sigterm(handler: Any) -> None:
    """Install a handler of SIGTERM; do nothing outside the main thread, where Python allows none."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
