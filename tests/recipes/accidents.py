"""Accidents of machines, as callbacks of a run: `--trainer.callbacks+=tests.recipes.accidents.Crash`."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning
from torch.distributed.checkpoint import FileSystemWriter

from recipes.lightning.resume import newest_checkpoint
from ringflash.lightning import StopOnSignal

STEP = 3  # after which it happens: one past a checkpoint


class Preemption(lightning.Callback):
    """Sends the signal $SIGNAL to the process $LAUNCHER, or to rank 0 itself, and waits until this rank hears of it."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP and trainer.is_global_zero:
            os.kill(int(os.environ.get("LAUNCHER", os.getpid())), signal.Signals[os.environ["SIGNAL"]])
            (stop,) = (x for x in trainer.callbacks if isinstance(x, StopOnSignal))
            while not stop.noted:
                time.sleep(0.01)


class CrashThenPreemption(Preemption):
    """Kills the last rank of a new run once the previous checkpoint is whole; preempts a run that continues."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.ckpt_path is not None:
            super().on_train_batch_end(trainer)
        elif trainer.global_step == STEP and trainer.global_rank == trainer.world_size - 1:
            (checkpoints,) = trainer.checkpoint_callbacks
            while newest_checkpoint(checkpoints.dirpath) is None:  # type: ignore[attr-defined]
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class CrashWhileSaving(lightning.Callback):
    """Kills the last rank of a new run, when another has written its part of the second checkpoint."""

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.ckpt_path is None and trainer.global_rank == trainer.world_size - 1:
            FileSystemWriter.write_data = _killed_at_second_call(FileSystemWriter.write_data)  # type: ignore[method-assign]


def _killed_at_second_call(write: Any) -> Any:
    calls: list[FileSystemWriter] = []

    def write_data(self: FileSystemWriter, *args: Any) -> Any:
        calls.append(self)
        while len(calls) == 2 and not Path(self.path, "__0_0.distcp").exists():
            time.sleep(0.01)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *args)

    return write_data
