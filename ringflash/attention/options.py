"""Options of ring attention, listed only here: every public call fills in a `RingOptions`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist


class RingOptions(NamedTuple):
    """Group of ranks that share the sequence, and how their attention runs; arguments as `ring_attention`."""

    group: dist.ProcessGroup | None = None
    layout: str = "zigzag"
    impl: str = "auto"
    transport: str = "auto"
    deterministic: bool = False
    fp8_backward: str = "bf16"

    def __deepcopy__(self, memo: dict[int, Any]) -> RingOptions:
        return self  # a process group cannot be copied

    @property
    def group_name(self) -> str:
        """Name of the group in the operator's schema; "" for a single process."""
        return "" if self.group is None else self.group.group_name

    @property
    def size_and_rank(self) -> tuple[int, int]:
        """(cp_size, cp_rank)."""
        return (1, 0) if self.group is None else (self.group.size(), self.group.rank())
