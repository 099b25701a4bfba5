"""Cooperative scheduling of the partitions of resident thread blocks, in a seeded random order.

One partition runs at a time, each in its thread. At every synchronising operation it may hand over to another
partition, or let an asynchronous copy land. When no partition can go on and no copy is in flight, the
kernel would hang on the device; the error says who waits for what.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np

from tests.emulator.values import EmulationError

_SWITCH_CHANCE = 0.3
_MAX_SWITCHES = 2_000_000


def _closed() -> threading.Lock:
    """A lock whose next `acquire` waits for a `release`, by any thread: a semaphore's work without its Python code."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Aborted(BaseException):
    """Unwinds the other partitions after one has failed."""


class Task:
    """One partition of one thread block, run by `scheduler`."""

    def __init__(self, scheduler: Scheduler, name: str, body: Callable[[Task], None]) -> None:
        self.scheduler, self.name, self._body = scheduler, name, body
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.done = False
        self._go = _closed()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self.scheduler.aborted:
                with np.errstate(all="ignore"):
                    self._body(self)
        except _Aborted:
            pass
        except BaseException as error:
            self.scheduler.fail(self, error)
        self.done = True
        self.scheduler.pass_on()

    def resume(self) -> None:
        """Run until the task waits, is switched away from, or ends (called by whose turn ends)."""
        self._go.release()

    @property
    def ready(self) -> bool:
        return self.condition is None or self.condition()

    def pause(self, condition: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Let others run, and return once `condition` holds (called by the task itself)."""
        scheduler = self.scheduler
        if (condition is None or condition()) and not scheduler.wants_switch():
            return
        self.condition, self.waits_for = condition, waits_for
        if scheduler.pass_on(self) is not self:
            self._go.acquire()
        self.condition = None
        if scheduler.aborted:
            raise _Aborted


class Scheduler:
    """Runs tasks to completion; `seed` decides every interleaving."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._control = _closed()
        self._tasks: list[Task] = []
        self._roots: list[Task] = []
        self._waiting: list[tuple[int, Callable[[Task], None]]] = []
        self._resident = self._turns = 0
        self._in_flight: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self.aborted = False

    def spawn(self, name: str, body: Callable[[Task], None]) -> Task:
        task = Task(self, name, body)
        self._tasks.append(task)
        return task

    def launch_async(self, land: Callable[[], None]) -> None:
        """Let an asynchronous copy land at some later moment."""
        self._in_flight.append(land)

    def wants_switch(self) -> bool:
        return self._random.random() < _SWITCH_CHANCE

    def pass_on(self, by: Task | None = None) -> Task | None:
        """Resume whose turn it is next, or `run` (called by a task, or by `run`).

        Args:
            by: who would be resumed by returning.
        Returns:
            next: whose turn it is; None is `run`'s.
        """
        following = None
        if self._error is None:
            try:
                following = self._next()
            except BaseException as error:
                self._error = error
        if following is None:
            self._control.release()
        elif following is not by:
            following.resume()
        return following

    def fail(self, task: Task, error: BaseException) -> None:
        if self._error is None:
            error.add_note(f"in {task.name}")
            self._error = error

    def run(self, blocks: list[Callable[[Task], None]], resident: int) -> None:
        """Run thread blocks in order, at most `resident` at a time.

        Raises:
            EmulationError: the kernel hangs, or did something undefined.
        """
        self._waiting, self._resident = list(enumerate(blocks))[::-1], resident
        self.pass_on()
        self._control.acquire()
        if self._error is not None:
            self._abort()
        while self._in_flight:
            self._land_one()

    def _next(self) -> Task | None:
        """The task that goes on, after copies that land before; None at the end."""
        while self._turns < _MAX_SWITCHES:
            self._turns += 1
            self._roots = [task for task in self._roots if not task.done]
            while self._waiting and len(self._roots) < self._resident:
                index, body = self._waiting.pop()
                self._roots.append(self.spawn(f"block {index}", body))
            self._tasks = [task for task in self._tasks if not task.done]
            if not self._tasks:
                return None
            ready = [task for task in self._tasks if task.ready]
            if self._in_flight and (not ready or self._random.random() < 0.5):
                self._land_one()
            elif ready:
                return self._random.choice(ready)
            else:
                raise EmulationError("deadlock\n" + self._report())
        raise EmulationError(f"no end after {_MAX_SWITCHES} switches\n" + self._report())

    def _land_one(self) -> None:
        self._in_flight.pop(self._random.randrange(len(self._in_flight)))()

    def _report(self) -> str:
        return "\n".join(f"  {task.name} waits for {task.waits_for or 'its turn'}" for task in self._tasks)

    def _abort(self) -> None:
        self.aborted = True
        for task in self._tasks:
            if not task.done:
                task.resume()
                self._control.acquire()
        assert self._error is not None
        raise self._error
