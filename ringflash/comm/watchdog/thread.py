"""The thread that looks after this process's calls, decides that one is stalled, reports it and ends the process."""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringflash.comm.cuda_graphs import capturing
from ringflash.comm.timeouts import timeout
from ringflash.comm.transport import MessageMemory, PointToPoint, Transport, transport_name
from ringflash.comm.watchdog.calls import Call, Ended, Line, Unwatched
from ringflash.comm.watchdog.cuda_events import DeviceLost, Events
from ringflash.comm.watchdog.store import ANSWER_S, Board, StoreGone

END_S = 25.0  # from a stall to the end of the process: a trap or NCCL's error comes before, and says where Python was
_PERIOD_S = 1.0  # between two looks, where the timeout is not short
_MANY = 256  # calls that wait to be looked at: so many events are let go before the period is over

_log = logging.getLogger("ringflash")


class RingStalled(RuntimeError):
    """A ring of this process or of one of its peers is stuck; the process is about to end."""


class Watched:
    """A line of calls with what looks after it."""

    def __init__(self, line: Line, board: Board, device: torch.device, names: list[str]) -> None:
        self.line, self.board, self.device, self.names = line, board, device, names
        self.lost = ""  # what the device or NCCL failed with


class Watch:
    """Looks after all calls of a process.

    Args:
        clock, pause: time.
        say: tells the user.
        end: sees to it that the process ends in so many seconds, whatever it does.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
        say: Callable[[str], None] | None = None,
        end: Callable[[float], None] | None = None,
    ) -> None:
        self.clock, self.pause = clock, pause
        self.say, self.end = say or _say, end or _end
        self.stalled = ""  # the report
        self._watched: WeakKeyDictionary[Transport, Watched] = WeakKeyDictionary()
        self._events: dict[torch.device, Ended] = {}
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._looked = clock()

    def begin(self, transport: Transport, way: str, device: torch.device) -> Call:
        """A call that is issued now.

        Raises:
            RingStalled: another one is stuck.
        """
        if self.stalled:
            raise RingStalled(self.stalled)
        watched = self._watched.get(transport)
        if watched is None:
            watched = self.add(transport, device)
        line = watched.line
        if len(line.calls) % _MANY == _MANY - 1:
            self._wake.set()
        return line.begin(next(self._serials), way, self.clock(), lambda error: self._break(watched, error))

    def add(self, transport: Transport, device: torch.device) -> Watched:
        """Look after the calls of a transport from now on."""
        group, name = transport.group, transport_name(transport)
        assert name is not None
        line = Line(name, group.rank(), timeout(group).total_seconds(), self.clock())
        watched = Watched(line, Board(group), device, _names(group))
        with self._lock:
            self._watched[transport] = watched
        return watched

    def start(self) -> None:
        """Look from a thread until the process ends."""
        self._thread = threading.Thread(target=self._run, name="ringflash-watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Leave no thread in foreign code for an interpreter that ends; a report is brought to its end."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * ANSWER_S)

    def look(self) -> None:
        """Once round all lines. The report of a stall is made before it returns."""
        now = self.clock()
        gap = now - self._looked  # without the time that a look takes
        with self._lock:
            lines = list(self._watched.items())
        lines = [(transport, watched) for transport, watched in lines if watched.board.is_open()]
        serials = [serial for _, watched in lines if (serial := self._look_at(watched, now)) is not None]
        for transport, watched in lines:
            line = watched.line
            if gap > line.timeout / 2 or (serials and line.follows(min(serials))):  # a stopped process, or its turn
                line.moved = now
            if _is_broken(transport):
                watched.lost = f"lost NCCL (its log says how) when it waited {watched.line.place()}"
                return self._report(watched, now, _UNREACHED)
            if not watched.lost and line.is_stalled(now):
                return self._report(watched, now)
            if line.is_quiet(now) and (why := watched.board.asked(now)):
                return self._report(watched, now, why)
        self._looked = self.clock()

    def _look_at(self, watched: Watched, now: float) -> int | None:
        """As `Line.look`; a device that failed is left to the error that its host will meet."""
        if watched.lost:
            return None
        try:
            return watched.line.look(self._ended(watched.device), now)
        except DeviceLost as error:
            line = watched.line
            watched.lost = f"lost its device ({error}) when it waited {line.place()}"
            self.say(f"{watched.names[line.rank]} {watched.lost} over {line.transport}")
            return None

    def _ended(self, device: torch.device) -> Ended:
        if device not in self._events:
            self._events[device] = Events(device).ended if device.type == "cuda" else lambda token: token.query()
        return self._events[device]

    def _break(self, watched: Watched, error: Exception) -> None:
        """What the working thread does with an error of NCCL.

        Raises:
            RingStalled: with the report.
        """
        cause = str(error).strip().rpartition("\n")[2]
        watched.lost = f"lost NCCL ({cause}) when it waited {watched.line.place()}"
        self._report(watched, self.clock(), _UNREACHED)
        raise RingStalled(self.stalled) from error

    def _report(self, watched: Watched, now: float, why: str = "") -> None:
        """Say who waits for what, as far as ranks answer, and see to the end; once, whichever thread begins.

        Args:
            why: its first words; default that nothing moved for too long.
        """
        with self._reporting:
            if not self.stalled:
                self._report_once(watched, now, why)

    def _report_once(self, watched: Watched, now: float, why: str) -> None:
        self.end(END_S)
        line, names = watched.line, watched.names
        own = watched.lost or line.state(now)
        limit = why or f"ring attention over {line.transport} must get on within {line.timeout:.0f} s, got:"
        self.say(f"{limit} {names[line.rank]} {own}; asking the other ranks")
        try:
            answers = watched.board.exchange(limit, own, self.clock, self.pause)
            told = [f"{name} {answers.get(rank, _SILENT)}" for rank, name in enumerate(names)]
        except StoreGone as problem:
            told = [f"{names[line.rank]} {own}", _NO_STORE.format(problem=str(problem).partition("\n")[0])]
        self.stalled = f"{limit} {'; '.join(told)}; {_REMEDY}"
        self.say(self.stalled)
        if _log.hasHandlers():  # last: the thread that is stuck may hold a handler
            _log.error(self.stalled)

    def _run(self) -> None:
        try:
            while not self._stopped and not self.stalled:
                self._wake.wait(self._period())
                self._wake.clear()
                if not self._stopped:
                    self.look()
        except Exception:  # better no watch than a healthy run that ends
            _log.exception("the watch over rings ended; a rank that stalls may go unnoticed")

    def _period(self) -> float:
        with self._lock:
            return min([_PERIOD_S, *(watched.line.timeout / 10 for watched in self._watched.values())])


_UNREACHED = "ring attention over nccl must reach all of its ranks, got:"
_SILENT = "says nothing: it died, or its host is stuck"
_NO_STORE = (
    "no other rank could be asked ({problem}): the process that keeps the group's store, often rank 0, may be gone"
)
_REMEDY = "a rank that says nothing or has not begun is the cause: see its log (ringflash.set_timeout waits longer)."


def _names(group: dist.ProcessGroup) -> list[str]:
    """Of the ranks, in the errors: by their number in the group, and in the world where that is another."""
    everywhere = dist.get_process_group_ranks(group)
    return [f"rank {rank}" + ("" if rank == there else f" ({there})") for rank, there in enumerate(everywhere)]


def _is_broken(transport: Transport) -> bool:
    return isinstance(transport, PointToPoint) and transport.is_broken()


def _say(text: str) -> None:
    print(f"ringflash: {text}", file=sys.__stderr__, flush=True)


def _end(seconds: float) -> None:
    """Not by Python, whose lock the stuck thread may hold: prints where every thread is, then exits with 1."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


_watch: Watch | None = None
_unwatched = Unwatched()


def watching(transport: Transport | None, way: str, device: torch.device) -> Call | Unwatched:
    """A call, to be entered while it is issued.

    Args:
        transport: what carries it; None for a single process.
        way: "forward" or "backward".
    Raises:
        RingStalled: an earlier call of this process is stuck.
    """
    global _watch
    if transport_name(transport) in (None, "gloo"):
        return _unwatched
    if capturing(device):
        return _unwatched
    assert transport is not None
    if isinstance(transport, MessageMemory):  # calls of a group have one order, by heads and by hops
        transport = transport.channel
    if _watch is None:
        _watch = Watch()
        _watch.start()
    return _watch.begin(transport, way, device)


def _forget() -> None:
    """A forked process has the calls of its parent, but not the thread that looked after them."""
    global _watch
    _watch = None


os.register_at_fork(after_in_child=_forget)
