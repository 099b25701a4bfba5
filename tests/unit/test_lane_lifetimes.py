"""Memory that a backward's lanes share is freed behind all of them. Streams that record their order; CPU, one process.

torch gives a freed block back to the stream that allocated it, and may unmap it once that stream is idle. So the
allocating stream must be ordered after every stream that uses the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from ringflash.attention import schedule, sections
from ringflash.attention.gather_by_heads import HeadGather
from ringflash.attention.sections import Sections
from ringflash.comm.transport import MessageMemory, Pending, PointToPoint, lanes
from ringflash.sequence.mask import SequenceMask


class Stream:
    """A stream that knows up to which work of each stream it is ordered."""

    def __init__(self, *_: object, **__: object) -> None:
        self.seen: dict[Stream, int] = {self: 0}

    def record_event(self) -> Event:
        self.seen[self] += 1  # whatever was issued since the last event
        return Event(dict(self.seen))

    def wait_stream(self, other: Stream) -> None:
        other.record_event().wait(self)

    def is_after(self, other: Stream) -> bool:
        return self.seen.get(other, 0) >= other.seen[other]


class Event:
    """A point of a stream."""

    def __init__(self, seen: dict[Stream, int]) -> None:
        self.seen = seen

    def wait(self, stream: Stream) -> None:
        for other, place in self.seen.items():
            stream.seen[other] = max(place, stream.seen.get(other, 0))


class Streams:
    """The current stream, as torch.cuda has it."""

    def __init__(self) -> None:
        self.caller = self.current = Stream()

    def set(self, stream: Stream) -> None:
        self.current = stream


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    made = Streams()
    cuda = SimpleNamespace(Stream=Stream, set_stream=made.set, current_stream=lambda _: made.current)
    with mock.patch.object(lanes, "torch", SimpleNamespace(cuda=cuda)):
        yield made


def backward(num_sections: int) -> MessageMemory:
    """The memory of one backward of rank 0 of 2, which receives nothing."""
    channel = SimpleNamespace(name="gloo", rank=0, group=None, members=(), post=lambda *_: Pending([]), num_posted=0)
    memory = MessageMemory(cast(PointToPoint, channel), torch.device("cpu"))
    gathering = schedule.plan_gather(SequenceMask(16, False), 2, 0, "zigzag")
    q = torch.zeros(1, 8, num_sections, 16)
    heads = (1,) * num_sections
    with mock.patch.object(sections, "choose_sections", lambda *_: Sections(heads, heads)):
        call = HeadGather((gathering,), memory, "reference", 1.0, False)
        try:
            call.backward(q, None, q, q, q, q, torch.zeros(1, num_sections, 8))
        except MemoryError:
            pass
    return memory


@pytest.mark.parametrize("num_sections", [1, 2, 3, 6])
def test_dq_is_freed_behind_the_lanes_that_write_it(streams: Streams, num_sections: int) -> None:
    """The lane "begin" allocates fp32 dQ, statistics and clock; all but "pull" use them."""
    memory = backward(num_sections)
    users = {name: cast(Any, lane) for name, lane in memory._lanes.items() if name != "pull"}
    assert set(users) == {"begin", "end", "even", *(["odd"] if num_sections > 1 else [])}
    assert [name for name, lane in users.items() if not users["begin"].is_after(lane)] == []
    assert all(streams.caller.is_after(cast(Any, lane)) for lane in memory._lanes.values())


@pytest.mark.parametrize("failing", range(9))
def test_after_an_error_every_lane_is_behind_the_others(streams: Streams, failing: int) -> None:
    """A call of three sections, in which the work of a lane raises."""
    issued, beside = [], lanes.Lanes.run_in_lane

    def refused(self: Any, lane: str, work: Any, *args: Any, **options: Any) -> Any:
        issued.append(lane)
        work = mock.Mock(side_effect=MemoryError("no memory left")) if len(issued) == failing + 1 else work
        return beside(self, lane, work, *args, **options)

    with mock.patch.object(lanes.Lanes, "run_in_lane", refused):
        memory = backward(3)
    assert len(issued) == failing + 1
    places = [cast(Any, lane) for lane in memory._lanes.values()]
    assert all(one.is_after(other) for one in (streams.caller, *places) for other in places)
