"""Lightning's trainer for tests."""

from __future__ import annotations

import os
from typing import Any

import lightning


def quiet_trainer(**options: Any) -> lightning.Trainer:
    """Return a trainer on all ranks, on the CPU, that writes and prints nothing unless the options say so."""
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    defaults = {
        "accelerator": "cpu", "devices": per_host, "num_nodes": int(os.environ["WORLD_SIZE"]) // per_host,
        "logger": False, "log_every_n_steps": 1, "use_distributed_sampler": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return lightning.Trainer(**(defaults | options))
