"""Lightning's trainer for tests."""

import os
from typing import Any

import lightning
import torch


def quiet_trainer(**options: Any) -> lightning.Trainer:
    """Return a trainer on all ranks, on the CPU, that writes and prints nothing unless the options say so."""
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    defaults = {
        "accelerator": "cpu", "devices": per_host, "num_nodes": int(os.environ["WORLD_SIZE"]) // per_host,
        "logger": False, "log_every_n_steps": 1, "use_distributed_sampler": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return lightning.Trainer(**(defaults | options))


class Losses(lightning.Callback):
    """This rank's loss of each batch, as its step returned it."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.parts.append(outputs["loss"])

    def found(self) -> list[float]:
        return [x.item() for x in self.parts]
