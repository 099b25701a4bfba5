"""Peer memory of CPU processes: areas are shared files, streams are threads that dawdle.

The protocol over it is the one that runs on GPUs; only who copies differs. What runs on a stream starts at some random
moment up to `DELAY_S` after it was posted, so that a wait or a barrier that is missing shows as wrong numbers. The
host of each rank also pauses at random, so that ranks drift apart.
"""

import itertools
import math
import random
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import torch
import torch.distributed as dist

import ringflash
from ringflash.attention import sections
from ringflash.comm.group import HostSplit
from ringflash.comm.transport import NcclGather, PointToPoint
from ringflash.comm.transport.areas import Incoming, Outgoing
from ringflash.comm.transport.gpu_areas import T, ViewCache

Work = Callable[[], None]
DELAY_S = 0.004
TIMEOUT_S = 20.0
_CHANNELS = 5  # of barriers


class Later:
    """Work of a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result(2 * TIMEOUT_S)  # longer than a barrier, whose error says more

    def query(self) -> bool:
        return self._future.done() and self._future.exception() is None


class Threads:
    """Streams of a memory, a thread each."""

    threads: dict[str, ThreadPoolExecutor]

    def mark(self) -> Later:
        done: Future[None] = Future()
        done.set_result(None)
        return Later(done)

    def wait(self, *tokens: Later) -> None:
        for token in tokens:
            token.wait()

    def run(self, work: Callable[..., T], *args: Any, commands: object = None) -> T:
        return work(*args)

    run_on_host = run

    def on_one_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        self.wait(*(Later(stream.submit(lambda: None)) for stream in self.threads.values()))


class SharedMemory(Threads):
    """Peer memory as the interface of ringflash.comm.transport."""

    num_buffers = 2
    members: tuple[int, ...] = ()

    def __init__(self, group: dist.ProcessGroup, split: HostSplit | None = None) -> None:
        self.rank, self.group, self.size = group.rank(), group, group.size()
        self.name = _agreed_name(group)
        self.random = random.Random(self.rank)
        if split is not None:
            self.members = split.host_of(self.rank)
            self.rank, self.size = self.members.index(self.rank), split.num_gpus
            self.name += f".{self.members[0]}"
        self.areas: dict[str, list[torch.Tensor]] = {}
        self.threads: dict[str, ThreadPoolExecutor] = {}
        self.last: dict[str, Later] = {}  # work of each stream
        self.kept = ViewCache()
        self.reserve("barriers", _CHANNELS * self.size * 8)  # of each channel and rank: how many it came to
        self.barriers = self.areas["barriers"][0].view(torch.int64).view(_CHANNELS, self.size).numpy()

    def reserve(self, name: str, num_bytes: int) -> None:
        if name in self.areas and self.areas[name][0].numel() >= num_bytes:
            return
        stem = Path(tempfile.gettempdir(), f"{self.name}.{name}.{num_bytes}")
        paths = [stem.with_name(f"{stem.name}.{rank}") for rank in range(self.size)]
        paths[self.rank].write_bytes(bytes(num_bytes))
        self.kept.drop(name)
        dist.barrier(self.group)
        self.areas[name] = [torch.from_file(str(x), shared=True, size=num_bytes, dtype=torch.uint8) for x in paths]
        dist.barrier(self.group)
        paths[self.rank].unlink()

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.areas[name][rank][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def make_transfer(self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing], what: str) -> Work:
        def move() -> None:
            for target, _, source in incoming:
                target.copy_(source)

        return move

    def cached(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        return self.kept.get((key, sections.MAX_UNBUFFERED_KV_BYTES), areas, make)  # which tests change

    def barrier(self, channel: int) -> None:
        self._dawdle()
        self.barriers[channel, self.rank] += 1
        count = int(self.barriers[channel, self.rank])
        _until(lambda: bool((self.barriers[channel] >= count).all()), f"barrier {count} of channel {channel}")

    @property
    def num_posted(self) -> int:
        return int(self.barriers[:, self.rank].sum())

    def run_on_stream(self, stream: str, work: Work, after: Sequence[Later], *, urgent: bool = False) -> Later:
        if stream not in self.threads:
            self.threads[stream] = ThreadPoolExecutor(1)
        before = [self.last[stream]] if stream in self.last else []  # a stream does nothing more after an error
        self.last[stream] = Later(self.threads[stream].submit(self._run, work, (*before, *after)))
        return self.last[stream]

    def _run(self, work: Work, after: tuple[Later, ...]) -> None:
        self.wait(*after)
        self._dawdle()
        with torch.no_grad():
            work()

    def join(self) -> None:
        super().join()
        self.last.clear()

    def num_bytes(self) -> int:
        return sum(areas[0].numel() for name, areas in self.areas.items() if name != "barriers")

    def release(self) -> None:
        self.kept.drop()
        self.areas = {"barriers": self.areas["barriers"]}

    def _dawdle(self) -> None:
        time.sleep(self.random.choice((0.0, 0.0, DELAY_S * self.random.random())))


@contextmanager
def copy_engine() -> Iterator[None]:
    """Calls on the CPU take the transport "copy_engine", over shared memory.

    Nothing but the transport orders the ranks: they do not compare their calls.
    """
    ringflash.set_agreement_check("never")
    try:
        with (
            mock.patch("ringflash.attention.plan.choose_transport", lambda *_: "copy_engine"),
            mock.patch("ringflash.comm.transport.registry._create_transport", lambda _, group: SharedMemory(group)),
        ):
            yield
    finally:
        ringflash.set_agreement_check("changed")


@contextmanager
def heads_in_shared_memory() -> Iterator[None]:
    """Calls on the CPU exchange heads over shared memory, and gather keys between hosts by messages, as GPUs do.

    Nothing but these orders the ranks: they do not compare their calls.
    """
    made: dict[tuple[dist.ProcessGroup, HostSplit], SharedMemory] = {}

    def memory(group: dist.ProcessGroup, split: HostSplit, device: torch.device) -> SharedMemory:
        if (group, split) not in made:
            made[group, split] = SharedMemory(group, split)
        return made[group, split]

    ringflash.set_agreement_check("never")
    try:
        with mock.patch("ringflash.attention.plan.open_exchange_areas", memory), messages_by_heads():
            yield
    finally:
        ringflash.set_agreement_check("changed")


def _agreed_name(group: dist.ProcessGroup) -> str:
    """For files that no other memory has; they go as soon as all ranks have opened them."""
    chosen = [f"ringflash-peers-{uuid4().hex}"]
    dist.broadcast_object_list(chosen, group=group, group_src=0)
    return chosen[0]


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline, pause = time.monotonic() + TIMEOUT_S, 0.0005
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} must come within {TIMEOUT_S:.0f} s, got nothing; a peer died or waits too.")
        time.sleep(pause)
        pause = min(1.3 * pause, 0.02)


class MessageThreads(Threads, NcclGather):  # type: ignore[misc]
    """Messages over gloo in the order in which they were issued, as on NCCL's stream."""

    def __init__(self, channel: PointToPoint) -> None:
        super().__init__(channel, torch.device("cpu"))
        self.threads: dict[str, ThreadPoolExecutor] = {}
        self.random = random.Random(self.rank)
        self.issued = itertools.count()
        self.begun = 0
        self.turn = threading.Condition()
        self.ticket = threading.local()

    def cached(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        return super().cached((key, sections.MAX_UNBUFFERED_KV_BYTES), areas, make)

    def run_on_stream(  # type: ignore[override]
        self, stream: str, work: Work, after: Sequence[Later], *, urgent: bool = False
    ) -> Later:
        if stream not in self.threads:
            self.threads[stream] = ThreadPoolExecutor(1, stream)
        ticket = next(self.issued) if stream in ("pull", "end") else None
        return Later(self.threads[stream].submit(self._run, work, tuple(after), ticket))

    def _run(self, work: Work, after: tuple[Later, ...], ticket: int | None) -> None:
        self.wait(*after)
        time.sleep(self.random.choice((0.0, 0.0, DELAY_S * self.random.random())))
        self.ticket.number = ticket
        with torch.no_grad():
            work()
        if ticket is not None:
            self._await_turn()  # of work without a message
            with self.turn:
                self.begun += 1
                self.turn.notify_all()

    def make_transfer(self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing], what: str) -> Work:
        move = super().make_transfer(incoming, outgoing, what)

        def in_turn() -> None:
            self._await_turn()
            move()

        return in_turn

    def _await_turn(self) -> None:
        """Wait for the turn, which a piece of work keeps to its end: it may have several messages."""
        with self.turn:
            assert self.turn.wait_for(lambda: self.begun == self.ticket.number, TIMEOUT_S), "a move never began"


@contextmanager
def messages_by_heads() -> Iterator[None]:
    """Streams of calls over gloo are threads, whose work runs when that of a GPU could."""
    made: dict[PointToPoint, MessageThreads] = {}

    def memory(channel: PointToPoint, device: torch.device) -> MessageThreads:
        key = next((known for known in made if known.group is channel.group), channel)  # gloo's are made for a call
        return made.setdefault(key, MessageThreads(key))

    with mock.patch("ringflash.attention.plan.open_gather_areas", memory):
        yield
