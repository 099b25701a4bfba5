"""CUDA streams and cached views of areas, for the copy engine and for messages of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from ringflash.comm import cuda_graphs
from ringflash.comm.call_numbers import Marker
from ringflash.comm.transport.buffers import drop_with_growth

T = TypeVar("T")
_MAX_CACHED = 80  # a cache of views drops the oldest entry beyond this number: five for each of 16 forms of call
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and handle


def current_stream(index: int) -> torch.cuda.Stream:
    """Return the current stream of a GPU. Cached, because torch takes 2 µs to make a stream object."""
    key = index, torch._C._cuda_getCurrentRawStream(index)
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream(index)
    return _streams[key]


class ViewCache:
    """Cache of views of areas and buffers, dropped with their areas so that the views do not outlive them."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[Any, Collection[str]]] = {}
        drop_with_growth(self)

    def get(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        """Return the entry of this key, or make it if it is missing; its views are of these areas."""
        entry = self._entries.get(key)
        if entry is None:
            entry = make(), areas  # may drop other entries
            if len(self._entries) == _MAX_CACHED:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = entry
        return cast(T, entry[0])

    def has(self, key: Hashable) -> bool:
        """Return True if there is an entry of this key."""
        return key in self._entries

    def drop(self, area: str | None = None) -> None:
        """Drop the entries with views of an area; by default all entries."""
        entries = {} if area is None else self._entries
        self._entries = {key: (made, areas) for key, (made, areas) in entries.items() if area not in areas}


Commands = Callable[[int, Callable[[object], int]], list[Any] | None]


class CallRecorder(Protocol):
    """Recorder of a call, notified of its work on streams."""

    def mark(self, event: Any, stream: torch.cuda.Stream) -> None: ...

    def wait(self, event: Any, stream: torch.cuda.Stream) -> None: ...

    def run(self, work: Callable[..., None], args: tuple[Any, ...], commands: Commands | None) -> None: ...

    def run_on_host(self, work: Callable[..., T], args: tuple[Any, ...]) -> T: ...

    def give_up(self, problem: str) -> None: ...


class GpuAreas:
    """Streams and areas of one GPU: base class of the copy engine and of messages.

    Attributes:
        recorder: recorder of the present call, if it is recorded.
        entered: the current stream inside `on_one_stream` or `run_on_stream`; None elsewhere.
    """

    recorder: CallRecorder | None = None

    members: tuple[int, ...] = ()  # ranks of the group that share the areas; empty: all

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._areas: dict[str, Tensor] = {}
        self._captured: set[str] = set()  # areas that a CUDA graph reads and writes
        self._cache = ViewCache()
        self._named_streams: dict[str, torch.cuda.Stream] = {}
        self.entered: torch.cuda.Stream | None = None

    def cached(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        if self.recorder is not None and not self._cache.has(key):
            self.recorder.give_up("views are made")
        thing = self._cache.get(key, areas, make)
        if cuda_graphs.capturing(self._device):
            cuda_graphs.keep_alive(thing)
            self._captured.update(areas)
        return thing

    def kept(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        """Return what `cached` returns, for a call that is neither captured nor recorded."""
        return self._cache.get(key, areas, make)

    def mark(self) -> Marker:
        return self._record(self.current())

    def wait(self, *markers: Marker) -> None:
        self._wait(self.current(), markers)

    def run(self, work: Callable[..., None], *args: Any, commands: Commands | None = None) -> None:
        if self.recorder is None:
            work(*args)
        else:
            self.recorder.run(work, args, commands)

    def run_on_host(self, work: Callable[..., T], *args: Any) -> T:
        return work(*args) if self.recorder is None else self.recorder.run_on_host(work, args)

    def on_one_stream(self) -> AbstractContextManager[None]:
        return _OneStream(self)

    def enter(self, stream: torch.cuda.Stream) -> None:
        """Make a stream current, in `on_one_stream`."""
        torch.cuda.set_stream(stream)  # the context manager is several times slower
        self.entered = stream

    def current(self) -> torch.cuda.Stream:
        """Return the current stream."""
        return current_stream(self._device.index) if self.entered is None else self.entered

    def run_on_stream(
        self, name: str, work: Callable[[], None], after: Sequence[Marker], *, urgent: bool = False
    ) -> Marker:
        if name not in self._named_streams:
            self._named_streams[name] = torch.cuda.Stream(self._device, priority=-1 if urgent else 0)
        stream, outer, current = self._named_streams[name], self.entered, self.current()
        self.enter(stream)
        try:
            self._wait(stream, after)
            work()
            return self._record(stream)
        finally:
            self.entered = outer
            torch.cuda.set_stream(current)

    def join(self) -> None:
        current, streams = self.current(), list(self._named_streams.values())
        if cuda_graphs.capturing(self._device):  # waiting for a stream outside of the capture would end it
            streams = [stream for stream in streams if _is_captured(stream)]
        for stream in streams:
            current.wait_stream(stream)
        for stream in streams:
            stream.wait_stream(current)

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

    def _record(self, stream: torch.cuda.Stream) -> Marker:
        event = stream.record_event()
        if self.recorder is not None:
            self.recorder.mark(event, stream)
        return event

    def _wait(self, stream: torch.cuda.Stream, markers: Sequence[Marker]) -> None:
        for marker in markers:
            marker.wait(stream)  # type: ignore[attr-defined]
            if self.recorder is not None:
                self.recorder.wait(marker, stream)


class _OneStream:
    """Context of `GpuAreas.on_one_stream`, not by contextlib, whose context managers take several times as long."""

    def __init__(self, areas: GpuAreas) -> None:
        self._areas = areas

    def __enter__(self) -> None:
        self._areas.entered = self._areas.current()

    def __exit__(self, *error: object) -> None:
        self._areas.entered = None


def _is_captured(stream: torch.cuda.Stream) -> bool:
    """Return True if a stream is part of a capture."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
