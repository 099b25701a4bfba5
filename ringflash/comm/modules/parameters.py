"""Comparison of parameters, which the ranks of a ring must have alike.

Ranks that were initialised by different seeds, or whose gradients are not averaged over the ring, each have another
model. Their attention mixes keys of all of these, without an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ringflash.comm import cuda_graphs
from ringflash.comm.agreement import gather
from ringflash.comm.comparison import gather_values


class EqualParameters:
    """Parameters of a module that every rank has whole; not those that FSDP or ZeRO-3 shards.

    They are compared in the forwards 1, 2, 4, 8, ... with gradients.
    """

    def __init__(self) -> None:
        self._num_forwards = 0
        self._sums: dict[str, int] = {}

    def begin(self, module: nn.Module) -> None:
        """Note the values at the start of a forward, if this one is compared."""
        self._num_forwards += 1
        self._sums = {}
        if not self._is_due:
            return
        parameters = dict(_whole_parameters(module))
        if parameters and not any(cuda_graphs.capturing(x.device) for x in parameters.values()):
            sums = [_sum_of_bits(x) for x in parameters.values()]
            on_one_device = torch.stack([x.to(sums[0].device) for x in sums])
            self._sums = dict(zip(parameters, on_one_device.tolist(), strict=True))

    @property
    def _is_due(self) -> bool:
        return not self._num_forwards & (self._num_forwards - 1)

    @property
    def checksum(self) -> int:
        """Checksum of the values that were noted, 32 bits; 0 if there are none."""
        return zlib.crc32(str(self._sums).encode()) if self._sums else 0

    def raise_for(self, group: dist.ProcessGroup) -> NoReturn:
        """Raise ValueError on every rank, with names; all ranks of the ring call this together."""
        of_ranks = gather_values(group, self._sums)
        names = sorted({name for rank in of_ranks for name in rank})
        unequal = [name for name in names if len({rank.get(name) for rank in of_ranks}) > 1]
        raise ValueError(
            "parameters must be equal on all ranks of a ring, which compute parts of one model's result, got different "
            f"values of {', '.join(unequal[:3])} ({len(unequal)} of {len(names)}); seed all ranks alike before the "
            "model is made, and average gradients over all ranks, those of a ring included "
            "(ringflash.average_gradients, DDP, or FSDP2 without a mesh). Of a parameter that is meant to differ, as "
            "that of an expert that other ranks do not have, set parameter.allreduce = False."
        )

    def compare(self, module: nn.Module, group: dist.ProcessGroup | None, batch: Sequence[torch.Tensor] = ()) -> None:
        """Compare the values at the start of a forward; all ranks of the ring call this together.

        Args:
            batch: checksums of the whole sequences of this forward, scalars, as far as they are known.
        Raises:
            ValueError: a parameter or a sequence differs between ranks; on every rank.
        """
        if group is None:
            return
        self.begin(module)
        if not self._is_due:
            return
        sequences = [int(x) for x in batch[:8] if not cuda_graphs.capturing(x.device)]
        checksums, of_ranks = zip(*gather(group, [self.checksum, sequences]), strict=True)
        if len(set(checksums)) > 1:
            self.raise_for(group)
        if len(set(map(len, of_ranks))) == 1 and len(set(map(tuple, of_ranks))) > 1:
            raise ValueError(
                "the sequences that shard_sequence cuts must be the same on all ranks of a ring, because each takes a "
                "part of them, got different ones; split data over rings, not over all ranks (DistributedSampler with "
                "num_replicas and rank of the data axis), and seed random draws alike on the ranks of a ring."
            )


def _whole_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters by name, without shards and quantized ones.

    Shards are DTensors, parameters of ZeRO-3, and all inside a unit of FSDP1.
    """
    for name, x in module.named_parameters(prefix, recurse=False):
        plain = type(x) is nn.Parameter and not x.is_meta and not hasattr(x, "ds_status")
        if plain and getattr(x, "allreduce", True):
            yield name, x
    for name, child in module.named_children():
        if type(child).__name__ != "FullyShardedDataParallel":
            yield from _whole_parameters(child, f"{prefix}.{name}" if prefix else name)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Return a checksum, an int64 scalar. A sum in another dtype than the summands' would make a copy of these."""
    bits = _BITS.get(x.dtype.itemsize, torch.int64)
    return x.detach().reshape(-1).view(bits).sum(dtype=bits).long()
