"""How much of a step goes by while a rank waits for its rings' messages."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning
import torch
import torch.distributed as dist

from ringflash.comm.wait_timer import Waits, measured
from ringflash.lightning.module import CausalLM
from ringflash.lightning.strategy import strategy_of


class ExposedCommunication(lightning.Callback):
    """Logs `exposed_communication_ms`: of one batch, what the rank that waited longest waited in its rings.

    Measuring waits for the device once a measured batch. FSDP2's own collectives are not counted.

    Args:
        every_n_steps: batches whose step is a multiple of this are measured.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be 1 or more, got {every_n_steps}; 10 costs nothing to speak of.")
        self.every_n_steps = every_n_steps
        self.milliseconds: float | None = None  # of the last batch that was measured
        self._stack = ExitStack()
        self._waits: Waits | None = None

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: CausalLM, *_: Any) -> None:
        """Begin to measure, now and then."""
        if trainer.global_step % self.every_n_steps == 0:
            self._waits = self._stack.enter_context(measured())

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: CausalLM, *_: Any) -> None:
        """Log what was measured."""
        if self._waits is None:
            return
        waits, self._waits = self._waits, None
        self._stack.close()
        longest = torch.tensor(waits.seconds() * 1e3, dtype=torch.float64, device=strategy_of(trainer).root_device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        self.milliseconds = longest.item()
        pl_module.log("exposed_communication_ms", self.milliseconds)

    def on_exception(self, trainer: lightning.Trainer, pl_module: CausalLM, exception: BaseException) -> None:
        """Stop measuring."""
        self._waits = None
        self._stack.close()
