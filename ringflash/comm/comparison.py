"""Values of any size that ranks compare outside of calls, and checksums of tensors."""

from __future__ import annotations

import zlib
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def gather_values(group: dist.ProcessGroup, value: T) -> list[T]:
    """Return the value of every rank, in rank order, pickled; a collective call. Small ones fit `agreement.gather`."""
    found: list[T] = [value] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def checksum(x: Tensor, start: int = 0) -> int:
    """Return a CRC-32 of the dtype, shape and bytes of a tensor, which continues the CRC-32 `start` of others."""
    contents = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(contents.numpy().data, zlib.crc32(f"{x.dtype}{tuple(x.shape)}".encode(), start))


def checksum_of_integers(*shared: Tensor) -> Tensor:
    """Return an int64 scalar in [0, 2**62) that depends on every value and its index. The host reads nothing."""
    total = torch.zeros((), dtype=torch.int64, device=shared[0].device)
    for x in shared:
        indices = torch.arange(x.numel(), device=x.device)
        mixed = x.flatten().long() * 0x1E3779B97F4A7C15 + indices * 0x3F58476D1CE4E5B9  # modulo 2**64
        mixed = (mixed ^ (mixed >> 29)) * 0x14D049BB133111EB
        total = total * 31 + (mixed ^ (mixed >> 32)).sum()
    return total & (1 << 62) - 1
