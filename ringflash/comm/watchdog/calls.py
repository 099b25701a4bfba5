"""Ring calls of a group that this rank has issued, and the progress of its device in them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from ringflash.comm.communicator import record_call_end
from ringflash.comm.transport.gpu_areas import Marker

HasEnded = Callable[[Any], bool]  # takes a Marker; True if the device has passed it
WAITS = "has been waiting"  # first words of the state of a rank whose device waits for other ranks
NCCL_QUIET_S = 2.0  # time without progress over NCCL after which a peer may have an error that this rank does not see


class Unwatched:
    """A call that is not watched: in a single process, over gloo, or captured into a CUDA graph."""

    def __enter__(self) -> Unwatched:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def reach(self, marker: Marker, what: str, *values: object) -> None:
        pass

    def mark(self, what: str, *values: object) -> None:
        pass


class CallInFlight:
    """A call of this rank, from the start of its issue until the device has finished it.

    Args:
        serial: its number among all calls of the process.
        number: its number among the calls of the group, equal on every rank.
        pass_name: "forward" or "backward".
        begun: time at which its issue began.
        broken: called if a message could not be issued; raises.
    """

    __slots__ = ("begun", "broken", "issued", "markers", "number", "passed", "serial", "pass_name")

    def __init__(
        self, serial: int, number: int, pass_name: str, begun: float, broken: Callable[[Exception], None] | None = None
    ) -> None:
        self.serial, self.number, self.pass_name, self.begun, self.broken = serial, number, pass_name, begun, broken
        self.markers: list[tuple[Marker, str, tuple[object, ...]]] = []
        self.passed = 0
        self.issued = False

    def __enter__(self) -> CallInFlight:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        record_call_end(error)
        try:
            if self.broken is not None and isinstance(error, dist.DistBackendError):
                self.broken(error)
        finally:
            if error is not None:  # without markers the call counts as ended while the caller handles the error
                self.markers = []
            self.issued = True

    def reach(self, marker: Marker, what: str, *values: object) -> None:
        """Append a marker. Until it is passed, the device waits for `what`, formatted with the values."""
        self.markers.append((marker, what, values))

    def mark(self, what: str, *values: object) -> None:
        """Append a marker after the work that the current stream holds so far."""
        self.reach(torch.cuda.current_stream().record_event(), what, *values)

    def has_ended(self, ended: HasEnded) -> bool:
        markers = self.markers  # another thread may take them away
        return self.issued and (not markers or ended(markers[-1][0]))

    def advance(self, ended: HasEnded) -> bool:
        """Skip the markers that the device has passed; return True if there were any."""
        before, markers = self.passed, self.markers
        while self.passed < len(markers) and ended(markers[self.passed][0]):
            self.passed += 1
        return self.passed > before

    def describe_wait(self) -> str:
        """Return what the device waits for; empty if it has passed all markers."""
        ahead = self.markers[self.passed :]
        if not ahead:
            return ""
        _, what, values = ahead[0]
        return f"{what.format(*values)} in {self}"

    def __str__(self) -> str:
        return f"{self.pass_name} call {self.number}"


class CallQueue:
    """Calls of one group that may still be in flight, oldest first.

    Args:
        timeout: seconds without progress that count as a stall.
    """

    def __init__(self, transport: str, rank: int, timeout: float, now: float) -> None:
        self.transport, self.rank, self.timeout = transport, rank, timeout
        self.calls: deque[CallInFlight] = deque()
        self.num_calls = 0
        self.last: CallInFlight | None = None  # the last call that has ended
        self.last_progress = now  # time at which the oldest call, or an earlier one, last began or advanced
        self.last_change = now  # time of the poll that last saw a call end or advance
        self._lock = Lock()
        self._with_events: deque[CallInFlight] = deque()  # used by the host's thread only

    def begin(
        self, serial: int, pass_name: str, now: float, broken: Callable[[Exception], None] | None = None
    ) -> CallInFlight:
        """Append a new call. Free the events of calls that have ended, so that it can use them again."""
        with_events = self._with_events
        while with_events and with_events[0].has_ended(lambda marker: marker.query()):
            with_events.popleft().markers = []
        with self._lock:
            self.num_calls += 1
            call = CallInFlight(serial, self.num_calls, pass_name, now, broken)
            self.calls.append(call)
        with_events.append(call)
        return call

    def poll(self, ended: HasEnded, now: float) -> int | None:
        """Drop calls that have ended; return the serial number of the first call that advanced since the last poll.

        The calls of a group end in order, so a bisection finds the first one that has not ended with few queries.
        """
        calls = list(self.calls)
        num_ended = bisect_left(calls, True, key=lambda call: not call.has_ended(ended))
        self._drop(calls[:num_ended])
        advanced = bool(num_ended)
        if num_ended < len(calls):
            head = calls[num_ended]
            if head.advance(ended):
                advanced = True
            if not head.describe_wait():  # the device has passed all markers: it waits for its own host to issue more
                self.last_progress = now
            self.last_progress = max(self.last_progress, head.begun)
        if not advanced:
            return None
        self.last_progress = self.last_change = now
        return calls[0].serial

    def follows(self, serial: int) -> bool:
        """Return True if the oldest call was issued after the call `serial`, and may have queued behind it."""
        return bool(self.calls) and self.calls[0].serial > serial

    def is_stalled(self, now: float) -> bool:
        return bool(self.calls) and now - self.last_progress >= self.timeout

    def is_quiet(self, now: float) -> bool:
        """Return True if another rank of the group may be about to report a stall, or may have lost NCCL."""
        waits_for_nccl = self.transport == "nccl" and bool(self.calls) and now - self.last_progress >= NCCL_QUIET_S
        return waits_for_nccl or now - self.last_change >= self.timeout / 2

    def describe_wait(self) -> str:
        """Return what this rank waits for; its call if no marker is ahead; the next call if it is in none."""
        if not self.calls:
            return f"before call {self.num_calls + 1}"
        return self.calls[0].describe_wait() or f"in {self.calls[0]}"

    def state(self, now: float) -> str:
        """Describe what this rank is doing."""
        if not self.calls:
            last = f"its previous call, {self.last}, has ended" if self.last else "it has made no call"
            return f"has not begun call {self.num_calls + 1} ({last})"
        wait = self.calls[0].describe_wait()
        return (
            f"{WAITS} {now - self.last_progress:.0f} s {wait}"
            if wait
            else f"is still issuing {self.calls[0]}, so its host is busy"
        )

    def _drop(self, calls: list[CallInFlight]) -> None:
        """Drop the oldest calls, which have ended, and remember the newest of these."""
        if not calls:
            return
        with self._lock:
            for _ in calls:
                self.calls.popleft().markers = []  # free its events
        self.last = calls[-1]
