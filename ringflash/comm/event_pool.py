"""Pool of CUDA events, which later calls reuse."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class ReusedEvent:
    """An event from the pool, which takes it back once nothing refers to this object."""

    __slots__ = ("_event", "_passed", "_unused", "cuda_event")

    def __init__(self, event: torch.cuda.Event, unused: list[torch.cuda.Event]) -> None:
        self._event, self._unused, self.cuda_event, self._passed = event, unused, event.cuda_event, False

    def query(self) -> bool:
        """Return True if the work before it has finished."""
        self._passed = self._passed or self._event.query()
        return self._passed

    def __del__(self) -> None:
        self._unused.append(self._event)


_unused_events: defaultdict[int, list[torch.cuda.Event]] = defaultdict(list)  # by device


def take_event(stream: torch.cuda.Stream) -> ReusedEvent:
    """Return an event of the stream's device that is not in use."""
    unused = _unused_events[stream.device_index]
    return ReusedEvent(unused.pop() if unused else new_event(stream), unused)


def new_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event with a handle, which torch makes only when an event is recorded for the first time."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def address_of(thing: ReusedEvent | Tensor) -> int:
    """Return the handle of an event, or the address of a tensor."""
    return thing.data_ptr() if isinstance(thing, Tensor) else thing.cuda_event
