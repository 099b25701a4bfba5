"""Comparison of parameters, which must be equal on the ranks of a ring.

Ranks that were initialised by different seeds, or whose gradients are not averaged over the ring, have different
models. Attention would mix the keys of different models, without an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash.comm import cuda_graphs
from ringflash.comm.agreement import gather
from ringflash.comm.comparison import gather_values


class ParameterCheck:
    """Comparison of the parameters that every rank of a ring has; what FSDP or ZeRO-3 shards over the ring is left out.

    Parameters are compared in the forwards (or other uses) number 1, 2, 4, 8, ... Forwards with gradients and forwards
    without are counted separately.
    """

    def __init__(self) -> None:
        self._num_forwards = {True: 0, False: 0}
        self._sums: dict[str, int] = {}

    def begin(self, named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
        """Note the values of parameters (a module's `named_whole`) at the start of a forward that is compared."""
        self._num_forwards[torch.is_grad_enabled()] += 1
        self._sums = {}
        if not self._is_due:
            return
        parameters = {name: value for name, x in named if (value := _value(x, group)) is not None}
        if parameters and not any(cuda_graphs.capturing(x.device) for x in parameters.values()):
            sums = [_sum_of_bits(x) for x in parameters.values()]
            on_one_device = torch.stack([x.to(sums[0].device) for x in sums])
            self._sums = dict(zip(parameters, on_one_device.tolist(), strict=True))

    @property
    def _is_due(self) -> bool:
        count = self._num_forwards[torch.is_grad_enabled()]
        return not count & (count - 1)

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
            "parameters must be equal on all ranks of a ring, because the ranks compute parts of one result, got "
            f"different values of {', '.join(unequal[:3])} ({len(unequal)} of {len(names)}); seed all ranks alike "
            "before the model is made, load checkpoints on all of them, and average gradients over all ranks, also "
            "over those of a ring (ringflash.average_gradients, DDP, FSDP2 without a mesh, or, in Lightning, "
            "strategy.shard_parameters). If a parameter is meant to differ, for example of an expert that only one "
            "rank has, set parameter.allreduce = False."
        )

    def compare(
        self,
        named: Iterable[tuple[str, Tensor]],
        group: dist.ProcessGroup | None,
        cuts: Callable[[], list[tuple[int, str]]] = list,
        layout: str = "",
    ) -> None:
        """Compare the values at the start of a forward; all ranks of the ring call this together.

        Args:
            cuts: returns, for each shard whose cut is known, a checksum of the whole sequence and the layout.
            layout: layout of the module's attention.
        Raises:
            ValueError: a parameter or a sequence differs between ranks, or a shard has another layout; on every rank.
        """
        if group is None:
            return
        self.begin(named, group)
        if not self._is_due:
            return
        checksums, cuts_of_ranks = zip(*gather(group, [self.checksum, cuts()[:8]]), strict=True)
        if len(set(checksums)) > 1:
            self.raise_for(group)
        if other := {cut_layout for of_rank in cuts_of_ranks for _, cut_layout in of_rank} - {layout}:
            raise ValueError(
                f"shards must be cut by the layout of the module's attention, {layout!r}, got {sorted(other)}; give "
                "wrap_attention, shard_sequence and local_positions one layout."
            )
        of_ranks = [[whole for whole, _ in of_rank] for of_rank in cuts_of_ranks]
        if len(set(map(len, of_ranks))) == 1 and len(set(map(tuple, of_ranks))) > 1:
            raise ValueError(
                "the sequences that shard_sequence cuts must be the same on all ranks of a ring, because each takes a "
                "part of them, got different sequences; split data over rings, not over all ranks (DistributedSampler "
                "with num_replicas and rank of the data axis), and seed random draws alike on the ranks of a ring."
            )


def named_whole(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield parameters by name, without those of FSDP1 units inside, but with those that a unit around has gathered."""
    yield from module.named_parameters(prefix, recurse=False)
    for name, x in vars(module).items():
        if isinstance(x, Tensor) and getattr(x._base, "_is_flat_param", False):
            yield f"{prefix}.{name}", x
    for name, child in module.named_children():
        if type(child).__name__ != "FullyShardedDataParallel":
            yield from named_whole(child, f"{prefix}.{name}" if prefix else name)


def _value(x: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    """Return the part of a parameter that all ranks of a ring have: the whole, or a shard over a mesh of other ranks.

    Return None for quantized parameters, for shards over the ring or by ZeRO-3, and for what is meant to differ.
    """
    if hasattr(x, "device_mesh"):
        shared = {*dist.get_process_group_ranks(group)}.intersection(x.device_mesh.mesh.flatten().tolist())
        over_others = len(shared) == 1
        return x.detach().to_local() if over_others and is_shared(x) else None  # type: ignore[attr-defined]
    plain = type(x) in (nn.Parameter, Tensor) and not x.is_meta and not hasattr(x, "ds_status")
    return x if plain and is_shared(x) else None


def is_shared(parameter: Tensor) -> bool:
    """Return False for a parameter that is meant to differ between ranks, for example of an expert of one rank."""
    return bool(getattr(parameter, "allreduce", True))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _sum_of_bits(x: Tensor) -> Tensor:
    """Return a checksum, an int64 scalar. The sum has the dtype of the bits: any other would copy the tensor."""
    bits = _BITS.get(x.dtype.itemsize, torch.int64)
    return x.detach().reshape(-1).view(bits).sum(dtype=bits).long()
