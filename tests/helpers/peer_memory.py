"""Peer memory of CPU processes: areas are shared files, streams are threads that dawdle.

The protocol over it is the one that runs on GPUs; only who copies differs. What runs beside starts at some random
moment up to `DELAY_S` after it was posted, so that a wait or a barrier that is missing shows as wrong numbers. The
host of each rank also pauses at random, so that ranks drift apart.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ringflash
from ringflash_kernels import reference

DELAY_S = 0.004
TIMEOUT_S = 20.0
_FLAGS = 4  # rows of the table of flags: one for the barrier, the others by channel


class Later:
    """Work of a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result(TIMEOUT_S)


class SharedMemory:
    """As ringflash.transport.PeerMemory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.group = group.rank(), group
        self.folder = _agreed_folder(group)
        self.areas: dict[str, list[torch.Tensor]] = {}
        self.lanes: dict[str, ThreadPoolExecutor] = {}
        self.barriers = 0
        self.random = random.Random(self.rank)
        # A row of barrier counts, then for each channel a matrix of signals: from, to.
        self.reserve("flags", _FLAGS * group.size() ** 2 * 8)
        shape = (_FLAGS, group.size(), group.size())
        self.flags = self.areas["flags"][0].view(torch.int64).view(shape).numpy()

    def reserve(self, name: str, num_bytes: int) -> None:
        if name in self.areas and self.areas[name][0].numel() >= num_bytes:
            return
        paths = [self.folder / f"{name}.{num_bytes}.{rank}" for rank in range(self.group.size())]
        paths[self.rank].write_bytes(bytes(num_bytes))
        dist.barrier(self.group)
        self.areas[name] = [
            torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths
        ]
        dist.barrier(self.group)
        paths[self.rank].unlink()

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.areas[name][rank][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def barrier(self) -> None:
        self._dawdle()
        self.barriers += 1
        self.flags[0, 0, self.rank] = self.barriers
        _until(lambda: bool((self.flags[0, 0] >= self.barriers).all()), f"barrier {self.barriers}")

    def signal(self, rank: int, channel: int) -> None:
        _until(lambda: self.flags[channel, self.rank, rank] == 0, f"room for a signal to rank {rank}")
        self.flags[channel, self.rank, rank] = 1

    def wait_signal(self, rank: int, channel: int) -> None:
        _until(lambda: self.flags[channel, rank, self.rank] == 1, f"signal {channel} of rank {rank}")
        self.flags[channel, rank, self.rank] = 0

    def beside(self, lane: str, work: Callable[[], None]) -> Later:
        if lane not in self.lanes:
            self.lanes[lane] = ThreadPoolExecutor(1)
        return Later(self.lanes[lane].submit(lambda: (self._dawdle(), work())[1]))

    def num_bytes(self) -> int:
        return sum(areas[0].numel() for name, areas in self.areas.items() if name != "flags")

    def release(self) -> None:
        self.areas = {"flags": self.areas["flags"]}

    def _dawdle(self) -> None:
        time.sleep(self.random.choice((0.0, 0.0, DELAY_S * self.random.random())))


@contextmanager
def copy_engine(*, pushed: bool) -> Iterator[None]:
    """Calls on the CPU take the transport "copy_engine", over shared memory; gradients pushed or staged.

    Nothing but the transport orders the ranks: they do not compare their calls.
    """
    ringflash.set_agreement_check("never")
    try:
        with (
            mock.patch("ringflash.ops.choose_transport", lambda *_: "copy_engine"),
            mock.patch("ringflash.transport._opened", lambda _, group: SharedMemory(group)),
            mock.patch("ringflash.ring.PUSHING", {"reference"} if pushed else set()),
            mock.patch.object(reference.Backward, "add", _add_atomically(reference.Backward.add)),
        ):
            yield
    finally:
        ringflash.set_agreement_check("changed")


def _add_atomically(add: Callable[..., None]) -> Callable[..., None]:
    """What reductions in memory do: no sum of one rank is lost to that of another."""

    def locked(*args: Any, **options: Any) -> None:
        with _THREADS, _LOCK_FILE.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            add(*args, **options)

    return locked


_THREADS = threading.Lock()
_LOCK_FILE = Path(tempfile.gettempdir()) / f"ringflash-atomic-{os.getppid()}"


def _agreed_folder(group: dist.ProcessGroup) -> Path:
    chosen: list[str | None] = [tempfile.mkdtemp(prefix="ringflash-peers-") if group.rank() == 0 else None]
    dist.broadcast_object_list(chosen, group=group, group_src=0)
    assert chosen[0] is not None
    return Path(chosen[0])


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} must come within {TIMEOUT_S:.0f} s, got nothing; a peer died or waits too.")
        time.sleep(0.0001)
