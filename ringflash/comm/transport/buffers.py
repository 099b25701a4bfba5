"""Pool of communication buffers: allocated once, grown for longer sequences, shared by all layers."""

from __future__ import annotations

import math
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from ringflash.comm import cuda_graphs


class Views(Protocol):
    """Views of buffers, cached between calls."""

    def drop(self) -> None:
        """Forget the views."""


_storage: dict[tuple[torch.device, str], Tensor] = {}
_views: WeakSet[Views] = WeakSet()


def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a contiguous, uninitialised tensor over the pooled storage of this name.

    A process runs one ring call at a time, so layers and groups share their buffers. A buffer that a
    CUDA graph captured stays alive even if a larger one replaces it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    storage = _storage.get((device, name))
    if storage is None or storage.numel() < num_bytes:
        cuda_graphs.check_growth(name, num_bytes, device)
        if storage is not None:
            synchronize(device)
            for views in _views:
                views.drop()
            del storage, _storage[device, name]  # free it before the larger one is allocated
        storage = _storage[device, name] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    cuda_graphs.keep_if_captured(storage, device)
    return storage[:num_bytes].view(dtype).view(shape)


def drop_with_growth(views: Views) -> None:
    """Register views to be dropped when a buffer grows, because they would keep its old storage alive."""
    _views.add(views)


def synchronize(device: torch.device) -> None:
    """Synchronise the device before memory is freed, because a stream may get memory that another one still reads."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def buffer_bytes() -> int:
    """Return the bytes of the pooled buffers of this process on all devices, without memory mapped by peers."""
    return sum({id(x): x.nbytes for x in (*_storage.values(), *cuda_graphs.held_tensors())}.values())


def release_buffers() -> None:
    """Free the pooled buffers; the next call allocates them again."""
    for device in {device for device, _ in _storage}:
        synchronize(device)
    _storage.clear()
    cuda_graphs.drop_captured()
