"""Extra CUDA streams and cached views that every kind of areas needs on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch

from ringflash.comm import cuda_graphs
from ringflash.comm.transport.buffers import drop_with_growth

T = TypeVar("T")
_MAX_CACHED = 12  # a cache of views drops the oldest entry beyond this number


class Marker(Protocol):
    """Point in the work of a stream, for which other streams and the watchdog can wait."""

    def query(self) -> bool:
        """Return True if the work before it has finished."""


class ViewCache:
    """Cache of views of areas and buffers, dropped with their areas so that the views do not outlive them."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[Any, Collection[str]]] = {}
        drop_with_growth(self)

    def get(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        """Return the entry of this key, made if it is missing; `areas` names the areas that its views belong to."""
        if key not in self._entries:
            made = make()  # may drop other entries
            if len(self._entries) == _MAX_CACHED:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = made, areas
        return cast(T, self._entries[key][0])

    def drop(self, area: str | None = None) -> None:
        """Drop the entries with views of an area; by default all entries."""
        entries = {} if area is None else self._entries
        self._entries = {key: (made, areas) for key, (made, areas) in entries.items() if area not in areas}


class Lanes:
    """Streams and areas of one GPU: what the copy engine and messages have in common."""

    members: tuple[int, ...] = ()  # ranks of the group that share the areas; empty: all

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._areas: dict[str, torch.Tensor] = {}
        self._captured: set[str] = set()  # areas that a CUDA graph reads and writes
        self._cache = ViewCache()
        self._lanes: dict[str, torch.cuda.Stream] = {}
        self._known: torch.cuda.Stream | None = None  # the current stream, in `on_one_stream` and in lanes

    def cached(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        thing = self._cache.get(key, areas, make)
        if cuda_graphs.capturing(self._device):
            cuda_graphs.keep_alive(thing)
            self._captured.update(areas)
        return thing

    def mark(self) -> Marker:
        return self._current().record_event()

    def wait(self, *markers: Marker) -> None:
        stream = self._current()
        for marker in markers:
            marker.wait(stream)  # type: ignore[attr-defined]

    @contextmanager
    def on_one_stream(self) -> Iterator[None]:
        self._known = self._current()
        try:
            yield
        finally:
            self._known = None

    def run_in_lane(
        self, lane: str, work: Callable[[], None], after: Sequence[Marker], *, urgent: bool = False
    ) -> Marker:
        if lane not in self._lanes:
            self._lanes[lane] = torch.cuda.Stream(self._device, priority=-1 if urgent else 0)
        stream, known, current = self._lanes[lane], self._known, self._current()
        torch.cuda.set_stream(stream)  # the context manager is several times slower
        self._known = stream
        try:
            for marker in after:
                marker.wait(stream)  # type: ignore[attr-defined]
            work()
            return stream.record_event()
        finally:
            self._known = known
            torch.cuda.set_stream(current)

    def join(self) -> None:
        current, lanes = self._current(), list(self._lanes.values())
        if cuda_graphs.capturing(self._device):  # waiting for a lane outside of the capture would invalidate it
            lanes = [lane for lane in lanes if _is_captured(lane)]
        for lane in lanes:
            current.wait_stream(lane)
        for lane in lanes:
            lane.wait_stream(current)

    def num_bytes(self) -> int:
        return sum(area.numel() for area in self._areas.values())

    def _retire(self, name: str) -> list[object]:
        """Forget an area that is about to grow. Return its memory if a CUDA graph captured it."""
        self._cache.drop(name)
        old = self._areas.pop(name, None)
        if name not in self._captured:
            return []
        self._captured.remove(name)
        return [old]

    def _current(self) -> torch.cuda.Stream:
        # With a torch.device as argument, or without any, torch's answer is several times slower.
        return torch.cuda.current_stream(self._device.index) if self._known is None else self._known


def _is_captured(stream: torch.cuda.Stream) -> bool:
    """Return True if a stream is part of a capture."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
