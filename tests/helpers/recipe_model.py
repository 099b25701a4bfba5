"""The recipes' model with values drawn from a seed, for tests that use it without a Lightning trainer."""

from typing import Any

import torch
import torch.distributed as dist

from ringflash.huggingface import CausalLMWithLoss
from ringflash.huggingface.weights import draw_weights
from ringflash.lightning.module import empty_model
from ringflash.memory import Memory


def build_model(
    config: dict[str, Any],
    group: dist.ProcessGroup | None,
    seed: int = 0,
    memory: Memory | None = None,
    dtype: torch.dtype = torch.float32,
) -> CausalLMWithLoss:
    torch.set_default_dtype(dtype)
    try:
        model = empty_model(config, group, memory or Memory())
        draw_weights(model.model, torch.device("cpu"), seed)
    finally:
        torch.set_default_dtype(torch.float32)
    return model
