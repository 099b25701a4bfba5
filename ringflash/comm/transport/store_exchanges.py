"""Count of torch's store exchanges in this process, made equal on all ranks before memory is mapped.

A rendezvous of symmetric memory takes two or three exchanges over the group's store. torch up to 2.14 counts them by
process, and the number is part of the keys through which the ranks of a group find one another. If the counts of two
ranks differ, each waits for keys that nobody sets (pytorch issue 196082). They differ after some ranks have grown areas
of other groups, or have mapped memory for another library. Later versions count by store, so all counts here are equal.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

_KEY = re.compile(r"CUDASymmetricMemory/(\d+)")
_AT_ONCE = timedelta(milliseconds=1)
_names = itertools.count()


class StoreExchangeCount:
    """Number of store exchanges that torch has counted in this process.

    It is read from the keys of a rendezvous that only this rank joins. This also finds errors early: in a rendezvous of
    several ranks, an error on one rank would leave the others waiting.

    Args:
        allocate: function that returns a new area of a few bytes on the device.
    Attributes:
        count: number of exchanges so far; 0 if torch exchanges over the communicator of the group.
    """

    def __init__(self, allocate: Callable[[], Tensor], device: torch.device) -> None:
        self._allocate = allocate
        self.count, self._step = 0, 1
        if _SymmetricMemory.get_backend(device) == "CUDA":  # others exchange over the communicator of the group
            store = dist.HashStore()
            self._map(store)
            numbers = {int(found[1]) for key in store.list_keys() if (found := _KEY.match(key))}
            self.count, self._step = max(numbers) + 1, len(numbers)

    def catch_up(self, count: int) -> None:
        """Add rendezvous that only this rank joins, until torch has counted as many as on another rank."""
        while self.count + self._step <= count:
            self._map(dist.HashStore())
            self.count += self._step
        while self.count < count:  # the rest is less than one mapping: begin one, which fails because it has no peer
            store = dist.HashStore()
            store.set_timeout(_AT_ONCE)
            with suppress(dist.DistStoreError):
                self._map(store, num_ranks=2)
            self.count += 1

    def _map(self, store: dist.Store, num_ranks: int = 1) -> None:
        """Map memory as rank 0 of a group with this store."""
        name, group = f"ringflash alone {next(_names)}", dist.ProcessGroup(store, 0, num_ranks)
        torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]
        try:
            _SymmetricMemory.rendezvous(self._allocate(), name)
        finally:
            torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]
