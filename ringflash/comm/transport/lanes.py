"""Streams beside the caller's, and what is kept between calls: what every memory of a group needs on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch

from ringflash.comm import cuda_graphs
from ringflash.comm.transport.buffers import drop_with_growth

T = TypeVar("T")
_MOST_KEPT = 12


class Token(Protocol):
    """Work under way."""

    def query(self) -> bool:
        """Whether it has ended."""


class Kept:
    """A few things made once and kept until they are dropped: views of areas and buffers, not to outlive these."""

    def __init__(self) -> None:
        self._things: dict[Hashable, tuple[Any, Collection[str]]] = {}
        drop_with_growth(self)

    def get(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        """The one of this key, with views of these areas; the oldest of others gives way to a new one."""
        if key not in self._things:
            made = make()  # may drop others
            if len(self._things) == _MOST_KEPT:
                del self._things[next(iter(self._things))]
            self._things[key] = made, areas
        return cast(T, self._things[key][0])

    def drop(self, area: str | None = None) -> None:
        """Those with views of an area, default all."""
        kept = {} if area is None else {key: both for key, both in self._things.items() if area not in both[1]}
        self._things = kept


class Lanes:
    """See `PeerMemory`, whose part this is, on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._areas: dict[str, torch.Tensor] = {}
        self._captured: set[str] = set()  # areas that a CUDA graph reads and writes
        self._kept = Kept()
        self._lanes: dict[str, torch.cuda.Stream] = {}

    def keep(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        thing = self._kept.get(key, areas, make)
        if cuda_graphs.capturing(self._device):
            cuda_graphs.keep(thing)
            self._captured.update(areas)
        return thing

    def mark(self) -> Token:
        return self._current().record_event()

    def wait(self, *tokens: Token) -> None:
        stream = self._current()
        for token in tokens:
            token.wait(stream)  # type: ignore[attr-defined]

    def beside(self, lane: str, work: Callable[[], None], after: Sequence[Token], *, urgent: bool = False) -> Token:
        if lane not in self._lanes:
            self._lanes[lane] = torch.cuda.Stream(self._device, priority=-1 if urgent else 0)
        stream, current = self._lanes[lane], self._current()
        torch.cuda.set_stream(stream)  # the context manager takes several times as long
        try:
            for token in after:
                token.wait(stream)  # type: ignore[attr-defined]
            work()
            return stream.record_event()
        finally:
            torch.cuda.set_stream(current)

    def join(self) -> None:
        current = self._current()
        for lane in self._lanes.values():
            current.wait_stream(lane)
        for lane in self._lanes.values():
            lane.wait_stream(current)

    def num_bytes(self) -> int:
        return sum(area.numel() for area in self._areas.values())

    def _retire(self, name: str) -> list[object]:
        """Forget an area that grows; what a graph captured of it is kept, the caller adds to that."""
        self._kept.drop(name)
        old = self._areas.pop(name, None)
        if name not in self._captured:
            return []
        self._captured.remove(name)
        return [old]

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device.index)  # of a device or of none it takes several times as long
