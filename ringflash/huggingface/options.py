"""Where and how the attention of a model runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

NAME = "ringflash"


@dataclass(frozen=True)
class Options:
    """Where and how the attention of a model runs; arguments as `ring_attention`."""

    group: dist.ProcessGroup | None
    layout: str = "zigzag"
    impl: str = "auto"
    transport: str = "auto"
    deterministic: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self  # a process group cannot be copied

    @property
    def place(self) -> tuple[int, int]:
        """(cp_size, cp_rank)."""
        return (1, 0) if self.group is None else (self.group.size(), self.group.rank())


def check_lone_process() -> None:
    """Raise ValueError where several processes do not say which of them share a sequence."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"group must be given where there are several processes, got none of {dist.get_world_size()}; "
            "call ringflash.huggingface.set_group(model, group)."
        )
