"""Events of calls, which are used again."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class ReusedEvent:
    """An event of a call; once nobody refers to this object, the event is used again."""

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
    """Return an event that nobody uses, of the device of a stream."""
    unused = _unused_events[stream.device_index]
    return ReusedEvent(unused.pop() if unused else new_event(stream), unused)


def new_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event that has a handle, which torch makes when it is recorded first."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def address_of(thing: ReusedEvent | Tensor) -> int:
    """Return the handle of an event, or the address of a tensor."""
    return thing.data_ptr() if isinstance(thing, Tensor) else thing.cuda_event
