"""Worker processes that stay: one per rank, started once a session, each test a message to all of them.

    pool = Pool(4, backend="gloo")
    results = pool.run(body, case, size=2)     # body(ctx, case) on ranks 0 and 1, with a group of these two

`body` is a module-level function; workers import it by name. If a rank raises, all ranks' tracebacks are in
the error; if one hangs, the stacks of all are. Either way the processes are replaced before the next run.
A body is a test by itself with `@on_ranks(2)`.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import signal
import socket
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

from tests.helpers.forked import forked
from tests.helpers.nan_memory import fill_new_memory

START_SECONDS = 120  # to import torch in every worker on a busy machine
GRACE_SECONDS = 10  # after one rank raised: the others either finish or are stuck on it


class Context(NamedTuple):
    """A rank's place, for a body."""

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device


class WorkerError(AssertionError):
    """A rank raised, died or hung."""


class Pool:
    """Persistent ranks.

    Args:
        world_size: processes; groups of every size from 2 on are made of the first ranks.
        backend: "gloo" (CPU) or "nccl" (a GPU a rank, as far as there are any).
        timeout_s: default limit of a run.
        patience: by which all limits grow.
    """

    def __init__(self, world_size: int, backend: str = "gloo", timeout_s: float = 60.0, patience: float = 1.0) -> None:
        self.world_size, self.backend, self.timeout_s, self.patience = world_size, backend, timeout_s, patience
        self._workers: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ringflash-pool-")
        self._generation = 0

    def run(
        self, body: Callable[..., Any], *args: Any, size: int | None = None, timeout_s: float | None = None
    ) -> list:
        """Return what `body(context, *args)` returns on each of the first `size` ranks.

        Args:
            args: picklable; results must be too.
        Raises:
            WorkerError: tracebacks of the ranks that raised, stacks of those that hang.
        """
        if not self._workers:
            self._start_with_a_free_port()
        size = size or self.world_size
        for pipe in self._pipes[:size]:
            pipe.send((body.__module__, body.__qualname__, size, args))
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
        for worker, pipe in zip(self._workers, self._pipes, strict=True):
            pipe.close()
            worker.kill()
            worker.join()
        self._workers, self._pipes = [], []

    def _start_with_a_free_port(self) -> None:
        """Another process may take the port between its choice and its use."""
        for left in (2, 1, 0):
            try:
                return self._start()
            except WorkerError as error:
                if not left or "EADDRINUSE" not in str(error):
                    raise

    def _start(self) -> None:
        processes = multiprocessing.get_context("spawn") if self.backend == "nccl" else forked()
        self._generation += 1
        port = _free_port()
        for rank in range(self.world_size):
            mine, theirs = processes.Pipe()
            place = (rank, self.world_size, self.backend, port, str(self._stack_file(rank)))
            worker = processes.Process(target=_serve, args=(theirs, *place), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(mine)
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
                    self._workers[rank].join(1)
                    answers[rank] = False, f"the process ended with code {self._workers[rank].exitcode}"
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _stack(self, rank: int) -> str:
        """Python stacks of all threads of a worker that does not answer."""
        pid = self._workers[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not self._stack_file(rank).stat().st_size:
            time.sleep(0.05)
        time.sleep(0.1)
        return self._stack_file(rank).read_text()

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack{self._generation}.{rank}"


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection, rank: int, world_size: int, backend: str, port: int, stack_file: str) -> None:
    """A worker: answer requests until the pipe closes."""
    stack = open(stack_file, "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        groups, device = _join(rank, world_size, backend, port)
        pipe.send((True, "ready"))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            module, name, size, args = pipe.recv()
        except EOFError:
            return
        try:
            body = inspect.unwrap(getattr(importlib.import_module(module), name))
            answer = True, body(Context(groups[size], rank, size, device), *args)
        except pytest.skip.Exception as skipped:
            answer = True, skipped
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


def _join(rank: int, world_size: int, backend: str, port: int) -> tuple[dict[int, dist.ProcessGroup], torch.device]:
    torch.set_num_threads(1)
    fill_new_memory()
    gc.freeze()  # collections need not walk through what the imports have made
    if "torch._dynamo" in sys.modules:  # it would flush all caches of the CPU to time each graph's guards
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if backend == "nccl":
        from tests.helpers import shared_gpu  # needs triton

        device = shared_gpu.use_gpu(rank, world_size)
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timedelta(minutes=10)
    )
    assert dist.group.WORLD is not None
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world_size)}
    return groups | {world_size: dist.group.WORLD}, device
