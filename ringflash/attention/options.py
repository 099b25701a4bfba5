"""Options of ring attention, listed only here: every public call fills in a `CallOptions`."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import torch.distributed as dist


class Algorithm(StrEnum):
    """Division of one call's work among the ranks; the transport says how bytes travel."""

    GATHER = "gather"  # all-gather of K/V, some heads at a time
    LOCAL = "local"  # a single process, with its own K/V only
    ULYSSES = "ulysses"  # an all-to-all of heads between all ranks
    BY_HOST = "by_host"  # an all-to-all of heads in each host, around GATHER between hosts


ULYSSES_ALGORITHMS = Algorithm.BY_HOST, Algorithm.ULYSSES  # the argument `transport` takes their names, too


class CallOptions(NamedTuple):
    """All arguments of a call but tensors, in the order of the operator's schema; as `ring_attention`.

    Options of a module or model leave the mask and the scale at their defaults; its calls replace them.
    """

    group: dist.ProcessGroup | None = None
    causal: bool = True
    softmax_scale: float | None = None  # a number in every call
    window_left: int = -1
    window_right: int = -1
    layout: str = "zigzag"
    impl: str = "auto"
    transport: str = "auto"
    deterministic: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CallOptions:
        return self  # a process group cannot be copied

    @property
    def group_name(self) -> str:
        """Name of the group in the operator's schema; "" for a single process."""
        return "" if self.group is None else self.group.group_name

    @property
    def size_and_rank(self) -> tuple[int, int]:
        """(cp_size, cp_rank)."""
        return (1, 0) if self.group is None else (self.group.size(), self.group.rank())

    @property
    def scale(self) -> float:
        """The softmax_scale of a call."""
        assert self.softmax_scale is not None
        return self.softmax_scale
