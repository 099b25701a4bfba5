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
    """Return a CRC-32 of the dtype, shape and bytes of a tensor, continued from that of others."""
    contents = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(contents.numpy().data, zlib.crc32(f"{x.dtype}{tuple(x.shape)}".encode(), start))
