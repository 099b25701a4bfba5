"""Memory that CUDA graphs use when they are replayed, kept alive at its address."""

from __future__ import annotations

import torch
from torch import Tensor

_held: dict[int, object] = {}


def capturing(device: torch.device) -> bool:
    """Return True if the current stream is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_if_captured(thing: object, device: torch.device) -> None:
    """Keep an object alive until `drop_captured` if the current call is captured, even if a larger one replaces it."""
    if capturing(device):
        keep_alive(thing)


def keep_alive(thing: object) -> None:
    """Keep an object of a captured call alive until `drop_captured`."""
    _held[id(thing)] = thing


def held_tensors() -> list[Tensor]:
    """Return the tensors that were kept directly, not as part of another object."""
    return [thing for thing in _held.values() if isinstance(thing, Tensor)]


def drop_captured() -> None:
    """Release all kept objects. Graphs captured so far must not be replayed afterwards."""
    _held.clear()


def check_growth(name: str, num_bytes: int, device: torch.device) -> None:
    """Raise RuntimeError if a buffer would grow during a capture, which would place it in the graph's private pool."""
    if capturing(device):
        raise RuntimeError(
            f"buffers must have their full size before a CUDA graph is captured, but {name!r} would grow to "
            f"{num_bytes} bytes; run the same call once before the capture."
        )
