"""Where and how the attention of a model runs."""

from __future__ import annotations

import torch.distributed as dist

from ringflash.attention.options import RingOptions

NAME = "ringflash"


class ModelRing(RingOptions):
    """Group and options of one model's attention; arguments as `ring_attention`."""

    __slots__ = ()


def check_lone_process() -> None:
    """Raise ValueError where several processes do not say which of them share a sequence."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"group must be given where there are several processes, got none of {dist.get_world_size()}; "
            "call ringflash.huggingface.set_group(model, group)."
        )
