"""The calls of a group as this rank issued them, and how far its device came in them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringflash.comm.communicator import note_end


class Waypoint(Protocol):
    """A token of peer memory, or an event of a stream."""

    def query(self) -> bool:
        """Whether the device has come to it."""


Ended = Callable[[Any], bool]  # of a waypoint
LATE_S = 2.0  # of a call over NCCL that does not move: its peers may have met an error that this rank does not


class Unwatched:
    """A call that nobody looks at: of one process, over gloo, or captured into a graph, whose events say nothing."""

    def __enter__(self) -> Unwatched:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def reach(self, waypoint: Waypoint, what: str, *values: object) -> None:
        pass

    def mark(self, what: str, *values: object) -> None:
        pass


class Call:
    """One call of this rank, while it is issued and until the device has ended it.

    Args:
        serial: its place among all calls of the process.
        number: its place among those of the group, the same on every rank.
        way: "forward" or "backward".
        begun: when its issue began.
        broken: called where a message could not be issued; raises.
    """

    __slots__ = ("begun", "broken", "issued", "number", "passed", "serial", "way", "waypoints")

    def __init__(
        self, serial: int, number: int, way: str, begun: float, broken: Callable[[Exception], None] | None = None
    ) -> None:
        self.serial, self.number, self.way, self.begun, self.broken = serial, number, way, begun, broken
        self.waypoints: list[tuple[Waypoint, str, tuple[object, ...]]] = []
        self.passed = 0
        self.issued = False

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        note_end(error)
        try:
            if self.broken is not None and isinstance(error, dist.DistBackendError):
                self.broken(error)
        finally:
            if error is not None:  # what the caller does about it is no stall
                self.waypoints = []
            self.issued = True

    def reach(self, waypoint: Waypoint, what: str, *values: object) -> None:
        """What the device comes to next, and what it has waited for until then: `what`, formatted with the values."""
        self.waypoints.append((waypoint, what, values))

    def mark(self, what: str, *values: object) -> None:
        """`reach`, for what the current stream holds so far."""
        self.reach(torch.cuda.current_stream().record_event(), what, *values)

    def over(self, ended: Ended) -> bool:
        return self.issued and (not self.waypoints or ended(self.waypoints[-1][0]))

    def advance(self, ended: Ended) -> bool:
        """Go on to the first waypoint that the device has not come to; whether that is further than before."""
        before, waypoints = self.passed, self.waypoints
        while self.passed < len(waypoints) and ended(waypoints[self.passed][0]):
            self.passed += 1
        return self.passed > before

    def place(self) -> str:
        """What the device waits for; nothing where it has come to all that was issued."""
        ahead = self.waypoints[self.passed :]
        if not ahead:
            return ""
        _, what, values = ahead[0]
        return f"{what.format(*values)} in {self}"

    def __str__(self) -> str:
        return f"{self.way} call {self.number}"


class Line:
    """The calls of one group that may still be under way, oldest first.

    Args:
        transport: its name.
        rank: of this process in the group.
        timeout: seconds without progress that are a stall.
        now: the time.
    """

    def __init__(self, transport: str, rank: int, timeout: float, now: float) -> None:
        self.transport, self.rank, self.timeout = transport, rank, timeout
        self.calls: deque[Call] = deque()
        self.num_calls = 0
        self.last: Call | None = None  # of those that are over
        self.moved = now  # when the oldest call began or came further, or a call before it
        self.idle = now  # when a call was last seen to be over, or to come further
        self._lock = Lock()

    def begin(self, serial: int, way: str, now: float, broken: Callable[[Exception], None] | None = None) -> Call:
        """A new call."""
        with self._lock:
            self.num_calls += 1
            call = Call(serial, self.num_calls, way, now, broken)
            self.calls.append(call)
        return call

    def look(self, ended: Ended, now: float) -> int | None:
        """Drop what is over; the serial number of the first call that came further since the last look.

        The calls of a group end in their order, so that few questions find the first that has not ended.
        """
        calls = list(self.calls)
        over = bisect_left(calls, True, key=lambda call: not call.over(ended))
        self._drop(calls[:over])
        came_further = bool(over)
        if over < len(calls):
            head = calls[over]
            if head.advance(ended):
                came_further = True
            if not head.place():  # the host is slow, which nobody waits for here
                self.moved = now
            self.moved = max(self.moved, head.begun)
        if not came_further:
            return None
        self.moved = self.idle = now
        return calls[0].serial

    def follows(self, serial: int) -> bool:
        """Whether the oldest call was issued after that one: until then, it waited for its turn."""
        return bool(self.calls) and self.calls[0].serial > serial

    def is_stalled(self, now: float) -> bool:
        return bool(self.calls) and now - self.moved >= self.timeout

    def is_quiet(self, now: float) -> bool:
        """Whether so little moves that another rank of the group may soon call this a stall, or has lost NCCL."""
        waits_for_nccl = self.transport == "nccl" and bool(self.calls) and now - self.moved >= LATE_S
        return waits_for_nccl or now - self.idle >= self.timeout / 2

    def place(self) -> str:
        """Where it waits, also where the oldest call has no waypoint yet, or there is none."""
        if not self.calls:
            return f"before call {self.num_calls + 1}"
        return self.calls[0].place() or f"in {self.calls[0]}"

    def state(self, now: float) -> str:
        """What this rank does, in words."""
        if not self.calls:
            last = f"its last, {self.last}, is done" if self.last else "it has made none"
            return f"has not begun call {self.num_calls + 1} ({last})"
        place = self.calls[0].place()
        return (
            f"has waited {now - self.moved:.0f} s {place}"
            if place
            else f"still issues {self.calls[0]}: its host is busy"
        )

    def _drop(self, calls: list[Call]) -> None:
        if not calls:
            return
        with self._lock:
            for _ in calls:
                self.calls.popleft()
        calls[-1].waypoints = []  # its events need not live on
        self.last = calls[-1]
