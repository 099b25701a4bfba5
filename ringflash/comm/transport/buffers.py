"""Communication buffers: allocated once, grown when a longer sequence comes, shared by all layers."""

from __future__ import annotations

import math
from typing import Protocol
from weakref import WeakSet

import torch

from ringflash.comm import cuda_graphs


class Views(Protocol):
    """Views of buffers, kept from call to call."""

    def drop(self) -> None:
        """Keep them no longer."""


_storage: dict[tuple[torch.device, str], torch.Tensor] = {}
_views: WeakSet[Views] = WeakSet()


def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor over the pooled storage of this name, with whatever its last user left in it.

    One process computes one ring at a time on a stream, so layers and groups share their buffers. What a CUDA graph
    captured stays beside a larger one that comes later.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    storage = _storage.get((device, name))
    if storage is None or storage.numel() < num_bytes:
        cuda_graphs.check_growth(name, num_bytes, device)
        if storage is not None:
            settle(device)
            for views in _views:
                views.drop()
            del storage, _storage[device, name]  # before the larger one is there
        storage = _storage[device, name] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    cuda_graphs.hold(storage, device)
    return storage[:num_bytes].view(dtype).view(shape)


def drop_with_growth(views: Views) -> None:
    """From now on, have these dropped when a buffer grows: they would hold what it was before."""
    _views.add(views)


def settle(device: torch.device) -> None:
    """Wait for the device: memory that is given up may come to another stream than the one that still uses it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def buffer_bytes() -> int:
    """Bytes of the buffers of this process alone, on all devices."""
    return sum({id(x): x.nbytes for x in (*_storage.values(), *cuda_graphs.held_tensors())}.values())


def release_buffers() -> None:
    """Give these buffers back; the next call allocates them anew."""
    for device in {device for device, _ in _storage}:
        settle(device)
    _storage.clear()
    cuda_graphs.let_go()
