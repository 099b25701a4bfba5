"""Ranks that stay: processes that are started once for many tests, each test a message to all of them.

    pool = Pool(4, backend="gloo")
    results = pool.run(body, case, size=2)     # body(ctx, case) on ranks 0 and 1, with a group of these two

`body` is a module-level function; workers import it by name. If a rank raises, all ranks' tracebacks are in
the error; if one hangs, the stacks of all are. Either way the processes are replaced before the next run.
A body is a test by itself with `@on_ranks(2)`.
"""

import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import TORCHRUN, Processes, environment_of

START_SECONDS = 120  # to import torch in every worker on a busy machine
GRACE_SECONDS = 10  # after one rank raised: the others either finish or are stuck on it


class Context(NamedTuple):
    """A rank's place, for a body."""

    group: dist.ProcessGroup  # None if the ranks start without one
    rank: int
    size: int
    device: torch.device


class WorkerError(AssertionError):
    """A rank raised, died or hung."""


class Pool:
    """Persistent ranks.

    Args:
        world_size: processes; groups of every size from 2 on are made of the first ranks.
        backend: "gloo" (CPU), "nccl" (a GPU a rank, as far as there are any), or None: CPU ranks without a group, with
            torchrun's variables, from which what they run makes one.
        timeout_s: default limit of a run.
        patience: by which all limits grow.
        on_gpus: processes know nothing of CUDA when they begin, so that they may use GPUs, by default over NCCL only.
        environment: variables added to the caller's, without a backend.
    """

    def __init__(
        self, world_size: int, backend: str | None = "gloo", timeout_s: float = 60.0, patience: float = 1.0,
        on_gpus: bool = False, **environment: str,
    ) -> None:  # fmt: skip
        self.world_size, self.backend, self.timeout_s, self.patience = world_size, backend, timeout_s, patience
        self._on_gpus = on_gpus or backend == "nccl"
        self._environment = environment
        self._processes: Processes | None = None
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ringflash-pool-")
        self._generation = self._runs = 0

    def run(
        self, body: Callable[..., Any], *args: Any, size: int | None = None, timeout_s: float | None = None
    ) -> list:
        """Return what `body(context, *args)` returns on each of the first `size` ranks.

        Args:
            args: picklable; results must be too.
        Raises:
            WorkerError: tracebacks of the ranks that raised, stacks of those that hang.
        """
        if self._processes is None:
            self._start()
        size = size or self.world_size
        self._runs += 1
        for pipe in self._pipes[:size]:
            pipe.send((body.__module__, body.__qualname__, size, args, self._runs))
        answers = self._collect(size, (timeout_s or self.timeout_s) * self.patience)
        silent = [rank for rank in range(size) if rank not in answers]
        problems = [f"rank {rank} raised\n{text}" for rank, (ok, text) in answers.items() if not ok]
        if problems or silent:
            problems += [f"rank {rank} gave no answer\n{self._stack(rank)}" for rank in silent]
            self.close()
            raise WorkerError(f"{body.__qualname__}{args}\n" + "\n".join(problems))
        return [answers[rank][1] for rank in range(size)]

    def close(self) -> None:
        """End the workers; the next run starts new ones."""
        if self._processes is not None:
            self._processes.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = None, []

    def _start(self) -> None:
        self._generation += 1
        pipes = [multiprocessing.Pipe() for _ in range(self.world_size)]
        self._pipes = [mine for mine, _ in pipes]
        places = [
            (theirs, rank, self.world_size, self.backend, str(self._stack_file(rank)))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        per_host, context = None, None
        if self._on_gpus:
            from tests.helpers import shared_gpu  # needs triton

            per_host, context = shared_gpu.num_gpus(self.world_size), multiprocessing.get_context("spawn")
        base = dict(os.environ) if self.backend else environment_of()
        self._processes = Processes(_serve, places, base, per_host, context, **self._environment)
        for _, theirs in pipes:
            theirs.close()
        ready = self._collect(self.world_size, START_SECONDS)
        if len(ready) < self.world_size or not all(ok for ok, _ in ready.values()):
            self.close()
            raise WorkerError(f"workers must start within {START_SECONDS} s, got {ready}")

    def _collect(self, size: int, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        """Answers by rank, of those that gave one in time."""
        deadline = time.monotonic() + timeout_s
        waiting = {self._pipes[rank]: rank for rank in range(size)}
        answers: dict[int, tuple[bool, Any]] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._processes.started[rank].join(1)
                    answers[rank] = False, f"the process ended with code {self._processes.statuses()[rank]}"
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _stack(self, rank: int) -> str:
        """Python stacks of all threads of a worker that does not answer."""
        os.kill(self._processes.started[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not self._stack_file(rank).stat().st_size:
            time.sleep(0.05)
        time.sleep(0.1)
        return self._stack_file(rank).read_text()

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack{self._generation}.{rank}"


class Launches:
    """Ranks without a group: a pool for each size, started when a run first asks for it."""

    def __init__(self, **environment: str) -> None:
        self._environment, self._pools = environment, dict[int, Pool]()

    def run(self, body: Callable[..., Any], *args: Any, size: int, timeout_s: float | None = None) -> list:
        if size not in self._pools:
            self._pools[size] = Pool(size, backend=None, timeout_s=150.0, **self._environment)
        return self._pools[size].run(body, *args, timeout_s=timeout_s)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def on_ranks(*sizes: int, timeout_s: float | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a body a test, which so many ranks of the fixture `pool` run; with several sizes, it is run on each.

    The other arguments of the body are the test's: parameters and fixtures whose values can be pickled.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        context, *others = signature.parameters.values()

        def test(pool: Pool, num_ranks: int, **arguments: Any) -> None:
            found = pool.run(body, *(arguments[x.name] for x in others), size=num_ranks, timeout_s=timeout_s)
            for skipped in filter(None, found):
                raise skipped

        functools.update_wrapper(test, body)
        taken = [context.replace(name="pool"), context.replace(name="num_ranks"), *others]
        test.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("num_ranks", sizes)(test)

    return decorate


def _serve(pipe: Connection, rank: int, world_size: int, backend: str | None, stack_file: str) -> None:
    """A worker: answer requests until the pipe closes."""
    stack = open(stack_file, "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        groups, device = _join(rank, world_size, backend)
        pipe.send((True, "ready"))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            module, name, size, args, run = pipe.recv()
        except EOFError:
            return
        try:
            body = inspect.unwrap(getattr(importlib.import_module(module), name))
            torch.manual_seed(0)  # ranks draw alike, whatever bodies before this one drew
            # A group's name is a count of new_group, and ranks that bodies left out have counted less.
            dist.distributed_c10d._world.group_count = 1000 * run
            answer = True, body(Context(groups[size], rank, size, device), *args)
        except pytest.skip.Exception as skipped:
            answer = True, skipped
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


def _join(rank: int, world_size: int, backend: str | None) -> tuple[dict[int, dist.ProcessGroup], torch.device]:
    if "torch._dynamo" in sys.modules:  # it would flush all caches of the CPU to time each graph's guards
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if backend is None:
        return {world_size: None}, device
    if backend == "nccl":
        from tests.helpers import shared_gpu  # needs triton

        device = shared_gpu.use_gpu(rank, world_size)
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    for name in TORCHRUN:  # bodies that ask for them set their own
        del os.environ[name]
    assert dist.group.WORLD is not None
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world_size)}
    return groups | {world_size: dist.group.WORLD}, device
