"""Cooperative scheduling of the partitions of resident thread blocks, in a seeded random order.

One partition runs at a time, in a thread of its own. At every synchronising operation the scheduler may hand over
to another partition, or let an asynchronous copy land. When no partition can go on and no copy is in flight, the
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


class _Aborted(BaseException):
    """Unwinds the other partitions after one has failed."""


class Task:
    """One partition of one thread block, run by `scheduler`."""

    def __init__(self, scheduler: Scheduler, name: str, body: Callable[[Task], None]) -> None:
        self.scheduler, self.name, self._body = scheduler, name, body
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.done = False
        self._go = threading.Semaphore(0)
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
        self.scheduler.take_over()

    def resume(self) -> None:
        """Run until the task waits, is switched away from, or ends (called by the scheduler)."""
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
        scheduler.take_over()
        self._go.acquire()
        self.condition = None
        if scheduler.aborted:
            raise _Aborted


class Scheduler:
    """Runs tasks to completion; `seed` decides every interleaving."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._control = threading.Semaphore(0)
        self._tasks: list[Task] = []
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

    def take_over(self) -> None:
        """Give control back to the scheduler's thread (called by a task)."""
        self._control.release()

    def fail(self, task: Task, error: BaseException) -> None:
        if self._error is None:
            error.add_note(f"in {task.name}")
            self._error = error

    def run(self, blocks: list[Callable[[Task], None]], resident: int) -> None:
        """Run thread blocks in order, at most `resident` at a time.

        Raises:
            EmulationError: the kernel hangs, or did something undefined.
        """
        waiting = list(enumerate(blocks))[::-1]
        roots: list[Task] = []
        for _ in range(_MAX_SWITCHES):
            roots = [task for task in roots if not task.done]
            while waiting and len(roots) < resident:
                index, body = waiting.pop()
                roots.append(self.spawn(f"block {index}", body))
            self._tasks = [task for task in self._tasks if not task.done]
            if not self._tasks:
                break
            self._advance()
            if self._error is not None:
                self._abort()
        else:
            self._error = EmulationError(f"no end after {_MAX_SWITCHES} switches\n" + self._report())
            self._abort()
        while self._in_flight:
            self._land_one()

    def _advance(self) -> None:
        ready = [task for task in self._tasks if task.ready]
        if self._in_flight and (not ready or self._random.random() < 0.5):
            self._land_one()
        elif ready:
            self._random.choice(ready).resume()
            self._control.acquire()
        else:
            self._error = EmulationError("deadlock\n" + self._report())

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
