"""What a CUDA graph needs of the calls captured into it: the memory that its replays use stays where it is."""

from __future__ import annotations

import torch

_held: dict[int, object] = {}


def capturing(device: torch.device) -> bool:
    """Whether the current stream is captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def hold(thing: object, device: torch.device) -> None:
    """Keep what a captured call uses until `let_go`, though longer sequences and other masks may take its place."""
    if capturing(device):
        keep(thing)


def keep(thing: object) -> None:
    """Keep something of a captured call until `let_go`."""
    _held[id(thing)] = thing


def held_tensors() -> list[torch.Tensor]:
    """Those kept themselves, not in something else."""
    return [thing for thing in _held.values() if isinstance(thing, torch.Tensor)]


def let_go() -> None:
    """Graphs captured so far must not be replayed any more."""
    _held.clear()


def check_growth(name: str, num_bytes: int, device: torch.device) -> None:
    """Raises RuntimeError where a buffer grows while a graph is captured: it would lie in the graph's own pool."""
    if capturing(device):
        raise RuntimeError(
            f"buffers must have their size before a CUDA graph is captured, got {name!r} growing to {num_bytes} "
            "bytes; run the call once before."
        )
