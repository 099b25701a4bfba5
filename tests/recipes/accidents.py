"""What happens to machines, as callbacks of a run: `--trainer.callbacks+=tests.recipes.accidents.Crash`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import lightning

from ringflash.lightning import StopOnSignal

STEP = 3  # after which it happens: one past a checkpoint


class Crash(lightning.Callback):
    """Kills the last rank, in its first life."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Without any chance to clean up."""
        last = trainer.global_rank == trainer.world_size - 1
        if trainer.global_step == STEP and last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


class Preemption(lightning.Callback):
    """Sends the signal $SIGNAL to the launcher, the process $LAUNCHER, and waits until this rank has heard of it."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Once, from the first rank."""
        if trainer.global_step == STEP and trainer.is_global_zero:
            os.kill(int(os.environ["LAUNCHER"]), signal.Signals[os.environ["SIGNAL"]])
            (stop,) = (x for x in trainer.callbacks if isinstance(x, StopOnSignal))
            while not stop.noted:
                time.sleep(0.01)
