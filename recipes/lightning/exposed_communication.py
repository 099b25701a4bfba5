"""Callback that measures exposed communication."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import lightning
import torch
import torch.distributed as dist

from ringflash.comm.agreement import gather
from ringflash.comm.wait_timer import Waits, measured
from ringflash.lightning.module import CausalLM


class RankTime(NamedTuple):
    """Time of one rank in a batch, in ms: waits for K/V and gradients, and the rest, which has FSDP2's collectives."""

    host: str
    waited_ms: float
    busy_ms: float


class ExposedCommunication(lightning.Callback):
    """Callback that logs `exposed_communication_ms`: how long attention waited for messages in one batch.

    The value is that of the rank that waited longest. The first rank also prints which rank waited least, and its host:
    if the waits differ, the others waited for it. Each measured batch costs two synchronisations with the device, and
    one gathering of three values from each rank. FSDP2's collectives are not counted as waits.

    Args:
        every_n_steps: measure the batches whose step is a multiple of this.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be 1 or more, got {every_n_steps}; 10 is the default.")
        self.every_n_steps = every_n_steps
        self.milliseconds: float | None = None  # exposed time of the last measured batch
        self.ranks: list[RankTime] = []  # the same by rank
        self._stack = ExitStack()
        self._waits: Waits | None = None

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: CausalLM, *_: Any) -> None:
        """Start measuring if this step is due."""
        if trainer.global_step % self.every_n_steps == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the previous batch is not this one's work
            self._waits, self._begun = self._stack.enter_context(measured()), time.perf_counter()

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: CausalLM, *_: Any) -> None:
        """Log the longest wait of any rank, and print the rank that the others waited for."""
        if self._waits is None:
            return
        waits, self._waits = self._waits, None
        self._stack.close()
        waited = waits.seconds() * 1e3
        busy = (time.perf_counter() - self._begun) * 1e3 - waited
        assert dist.group.WORLD is not None
        self.ranks = [RankTime(*x) for x in gather(dist.group.WORLD, [socket.gethostname(), waited, busy])]
        self.milliseconds = max(x.waited_ms for x in self.ranks)
        pl_module.log("exposed_communication_ms", self.milliseconds)
        if trainer.is_global_zero:
            slowest = min(range(len(self.ranks)), key=lambda rank: self.ranks[rank].waited_ms)
            host, least, busy = self.ranks[slowest]
            print(
                f"step {trainer.global_step:>6}  ranks waited {least:.1f} to {self.milliseconds:.1f} ms; the least, "
                f"rank {slowest} on {host}, was busy for {busy:.1f} ms"
            )

    def on_exception(self, trainer: lightning.Trainer, pl_module: CausalLM, exception: BaseException) -> None:
        """Stop measuring."""
        self._waits = None
        self._stack.close()
