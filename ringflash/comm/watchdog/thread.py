"""The watchdog thread: it polls the calls of this process, detects and reports a stall, and ends the process."""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringflash.comm.communicator import print_notice, synchronize_at_exit
from ringflash.comm.cuda_graphs import capturing
from ringflash.comm.timeouts import timeout
from ringflash.comm.transport import PointToPoint, Transport, group_transport, transport_name
from ringflash.comm.watchdog.calls import WAITS, CallInFlight, CallQueue, HasEnded, Unwatched
from ringflash.comm.watchdog.cuda_events import DeviceLost, Events
from ringflash.comm.watchdog.store import ANSWER_S, StoreGone, WatchdogStore

END_S = 25.0  # from a stall to the end of the process: later than a trap or NCCL's error, which show the Python stack
SHOWN_RANKS = 32  # limit of the ranks that a report lists, because every rank prints one
_PERIOD_S = 1.0  # time between two polls, unless the timeout is short
_EARLY_POLL_CALLS = 256  # after this number of calls, poll before the period ends, to free their events

_log = logging.getLogger("ringflash")


class RingStalled(RuntimeError):
    """Raised if a ring call of this process or of a peer is stuck; the process is about to end."""


class WatchedGroup:
    """One group's calls in flight, with its store, device and rank names."""

    def __init__(self, queue: CallQueue, store: WatchdogStore, device: torch.device, names: list[str]) -> None:
        self.queue, self.store, self.device, self.names = queue, store, device, names
        self.lost = ""  # the error of the device or of NCCL


class Watchdog:
    """Watches all ring calls of a process.

    Args:
        clock, pause: return the time in seconds, and sleep.
        say: prints a message for the user.
        end: makes the process end after the given number of seconds, whatever it does until then.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
        say: Callable[[str], None] | None = None,
        end: Callable[[float], None] | None = None,
    ) -> None:
        self.clock, self.pause = clock, pause
        self.say, self.end = say or print_notice, end or _end
        self.stalled = ""  # the report
        self._watched: WeakKeyDictionary[Transport, WatchedGroup] = WeakKeyDictionary()
        self._events: dict[torch.device, HasEnded] = {}
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._last_poll = clock()

    def begin(self, transport: Transport, pass_name: str, device: torch.device) -> CallInFlight:
        """Return a new call, which is issued now.

        Raises:
            RingStalled: an earlier call is stuck.
        """
        if self.stalled:
            raise RingStalled(self.stalled)
        watched = self._watched.get(transport)
        if watched is None:
            watched = self.add(transport, device)
        queue = watched.queue
        if len(queue.calls) % _EARLY_POLL_CALLS == _EARLY_POLL_CALLS - 1:
            self._wake.set()
        return queue.begin(
            next(self._serials), pass_name, self.clock(), lambda error: self._report_nccl_error(watched, error)
        )

    def add(self, transport: Transport, device: torch.device) -> WatchedGroup:
        """Start watching the calls of a transport."""
        group, name = transport.group, transport_name(transport)
        assert name is not None
        queue = CallQueue(name, group.rank(), timeout(group).total_seconds(), self.clock())
        watched = WatchedGroup(queue, WatchdogStore(group, _location(device)), device, _names(group))
        with self._lock:
            self._watched[transport] = watched
        return watched

    def start(self) -> None:
        """Poll from a daemon thread until the process ends."""
        self._thread = threading.Thread(target=self._run, name="ringflash-watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """At the end of the program, wait for its calls, then for a report that is being made, and stop the thread."""
        synchronize_at_exit()
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * ANSWER_S)

    def poll(self) -> None:
        """Poll all groups once. If a call is stalled, report it before returning."""
        now = self.clock()
        gap = now - self._last_poll  # since the end of the previous poll
        with self._lock:
            groups = list(self._watched.items())
        groups = [(transport, watched) for transport, watched in groups if watched.store.is_open()]
        serials = [serial for _, watched in groups if (serial := self._poll_group(watched, now)) is not None]
        for transport, watched in groups:
            queue = watched.queue
            # The process was stopped, or the oldest call was queued behind a call of another group.
            if gap > queue.timeout / 2 or (serials and queue.follows(min(serials))):
                queue.last_progress = now
            if isinstance(transport, PointToPoint) and transport.is_broken():
                watched.lost = (
                    f"lost its NCCL connection (see NCCL's log) while it waited {watched.queue.describe_wait()}"
                )
                return self._report(watched, now, _LOST_CONNECTION)
            if not watched.lost and queue.is_stalled(now):
                return self._report(watched, now)
            if queue.is_quiet(now) and (why := watched.store.asked(now)):
                # If a group has several transports, the one with calls in flight answers.
                waiting = (other for t, other in groups if t.group is transport.group and other.queue.calls)
                return self._report(next(waiting, watched), now, why)
        self._last_poll = self.clock()

    def _poll_group(self, watched: WatchedGroup, now: float) -> int | None:
        """Run `CallQueue.poll`. If the device has failed, print a message; the main thread will raise the error."""
        if watched.lost:
            return None
        try:
            return watched.queue.poll(self._event_query(watched.device), now)
        except DeviceLost as error:
            queue = watched.queue
            watched.lost = f"lost its device ({error}) while it waited {queue.describe_wait()}"
            self.say(f"ring attention over {queue.transport}: {watched.names[queue.rank]} {watched.lost}")
            return None

    def _event_query(self, device: torch.device) -> HasEnded:
        """Return the query that tells if a marker on this device has been passed."""
        if device not in self._events:
            self._events[device] = Events(device).ended if device.type == "cuda" else lambda marker: marker.query()
        return self._events[device]

    def _report_nccl_error(self, watched: WatchedGroup, error: Exception) -> None:
        """Report an NCCL error that occurred in the main thread.

        Raises:
            RingStalled: with the report.
        """
        cause = str(error).strip().rpartition("\n")[2]
        watched.lost = f"lost its NCCL connection ({cause}) while it waited {watched.queue.describe_wait()}"
        self._report(watched, self.clock(), _LOST_CONNECTION)
        raise RingStalled(self.stalled) from error

    def _report(self, watched: WatchedGroup, now: float, why: str = "") -> None:
        """Report what every rank that answers waits for, and make the process end. Only the first thread does so.

        Args:
            why: first words of the report; by default that no progress was made within the timeout.
        """
        with self._reporting:
            if not self.stalled:
                self._report_once(watched, now, why)

    def _report_once(self, watched: WatchedGroup, now: float, why: str) -> None:
        """Exchange answers with the other watchdogs, print the report, and let the process end.

        Args:
            why: beginning of the report, if another rank asked or a connection broke; "" for a stall of this rank.
        """
        self.end(END_S)
        queue, names = watched.queue, watched.names
        own = watched.lost or queue.state(now)
        event = why or f"ring attention over {queue.transport} made no progress for {queue.timeout:.0f} s:"
        self.say(f"{event} {names[queue.rank]} {own}; it asks the other ranks what they wait for")
        try:
            answers, locations = watched.store.exchange(event, own, self.clock, self.pause)
            states = _states(names, answers, locations, _SILENT_OR_IDLE if event == _LOST_CONNECTION else _SILENT)
        except StoreGone as problem:
            states = [f"{names[queue.rank]} {own}", _NO_STORE.format(problem=str(problem).partition("\n")[0])]
        self.stalled = f"{event} {'; '.join(states)}; {_REMEDY}"
        self.say(self.stalled)
        if _log.hasHandlers():  # last, since the stuck thread may hold the lock of a handler
            _log.error(self.stalled)

    def _run(self) -> None:
        """Poll until the watchdog is stopped or has reported a stall."""
        try:
            while not self._stopped and not self.stalled:
                self._wake.wait(self._period())
                self._wake.clear()
                if not self._stopped:
                    self.poll()
        except Exception:  # never end a healthy run
            _log.exception("the watchdog of ring attention has failed; a rank that stalls may go unnoticed")

    def _period(self) -> float:
        with self._lock:
            return min([_PERIOD_S, *(watched.queue.timeout / 10 for watched in self._watched.values())])


_LOST_CONNECTION = "ring attention over nccl lost the connection to a rank:"
_SILENT = "does not answer: it has died, or its host is stuck"
_SILENT_OR_IDLE = "does not answer: it has died, its host is stuck, or it is in no call"  # an idle rank does not ask
_NO_STORE = (
    "no other rank could be asked ({problem}): the process that keeps the group's store, often rank 0, may be gone"
)
_REMEDY = (
    "the cause is a rank that does not answer or has not begun: see its log (ringflash.set_timeout raises the limit)."
)


def _names(group: dist.ProcessGroup) -> list[str]:
    """Return rank names for error messages: the group rank, plus the world rank if it differs."""
    world_ranks = dist.get_process_group_ranks(group)
    return [f"rank {rank}" + ("" if rank == world else f" ({world})") for rank, world in enumerate(world_ranks)]


def _location(device: torch.device) -> str:
    """Return where this rank runs, for the report; empty on a CPU."""
    return f"GPU {device.index} of {socket.gethostname()}" if device.type == "cuda" else ""


def _states(names: list[str], answers: dict[int, str], locations: dict[int, str], silent: str = _SILENT) -> list[str]:
    """Return a line per rank. Of more than SHOWN_RANKS ranks, list those that wait for nobody first; count the rest."""
    states = [
        (f"{name} on {locations[rank]}" if rank in locations else name) + f" {answers.get(rank, silent)}"
        for rank, name in enumerate(names)
    ]
    if len(names) <= SHOWN_RANKS:
        return states
    waiting = [state for rank, state in enumerate(states) if answers.get(rank, "").startswith(WAITS)]
    others = [state for state in states if state not in waiting]
    shown = (others + waiting)[:SHOWN_RANKS]
    return [*shown, f"and {len(names) - SHOWN_RANKS} more ranks; {len(waiting)} of all {len(names)} wait for others"]


def _end(seconds: float) -> None:
    """Print all stacks after `seconds`, and exit with 1. Needs no GIL, which the stuck thread may hold."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


_watchdog: Watchdog | None = None
_unwatched = Unwatched()


def watching(transport: Transport | None, pass_name: str, device: torch.device) -> CallInFlight | Unwatched:
    """Return a context to enter while a call is issued.

    Args:
        transport: transport of the call; None for a single process.
        pass_name: "forward" or "backward".
    Raises:
        RingStalled: an earlier call of this process is stuck.
    """
    global _watchdog
    if transport_name(transport) in (None, "gloo"):
        return _unwatched
    if capturing(device):
        return _unwatched
    assert transport is not None
    if _watchdog is None:
        _watchdog = Watchdog()
        _watchdog.start()
    return _watchdog.begin(group_transport(transport), pass_name, device)


def _forget() -> None:
    """Forget the watchdog in a forked process, which has its parent's calls but not its thread."""
    global _watchdog
    _watchdog = None


os.register_at_fork(after_in_child=_forget)
