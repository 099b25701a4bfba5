"""Happens-before graph of ring calls on GPUs: all interleavings of streams and ranks, not those of one run.

Calls run over memories that move nothing (`recorded_calls.py`). They record which stream of which rank reads and writes
which bytes, and what streams wait for: their earlier work, markers, barriers and messages. The records of all ranks
form one graph.

    race       two accesses to a byte, of which one writes, that the graph does not order
    deadlock   a cycle, or a barrier or message that a rank does not join
    lifetime   a block that is freed when the stream that allocated it is not ordered after every access: torch may give
               the block to later work of that stream at once, or unmap it as soon as the stream is idle
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringflash.comm.transport.areas import Incoming, Outgoing
from ringflash.comm.transport.gpu_areas import T, ViewCache

Work = Callable[[], None]
CALLER = "caller"  # stream on which calls are made


class Block:
    """Memory that torch has allocated, and the accesses to it: bits of its 2-byte places, by nodes and kind."""

    def __init__(self, rank: Rank, stream: str, storage: torch.UntypedStorage) -> None:
        self.rank, self.stream, self.storage = rank, stream, StorageWeakRef(storage)
        self.accesses: defaultdict[tuple[int, int, bool], int] = defaultdict(int)  # by first node, last node, writes


class Graph:
    """Work of all ranks, as nodes, and what each node waits for."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []
        self.names: list[str] = []
        self.calls: list[int] = []  # step of the program to which a node belongs
        self.failed: set[int] = set()  # steps that end with an error
        self.blocks: dict[int, Block] = {}  # that are not freed
        self.old_blocks: list[Block] = []
        self.freed: list[tuple[Block, int | None]] = []  # with the last node of the allocating stream
        self.barriers: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)  # arrival, departure
        self.barrier_sizes: dict[Hashable, int] = {}
        self.messages: defaultdict[Hashable, list[tuple[int, int, int]]] = defaultdict(list)  # begin, end, bytes

    def block_of(self, x: torch.Tensor, rank: Rank, stream: str = CALLER) -> Block:
        """Return the block of a tensor; if it is new, it was allocated on this stream."""
        storage = x.untyped_storage()
        if storage._cdata not in self.blocks:
            self.blocks[storage._cdata] = Block(rank, stream, storage)
        return self.blocks[storage._cdata]

    def look_for_freed(self) -> None:
        """Note the blocks that were freed since the last look."""
        for key in [key for key, block in self.blocks.items() if block.storage.expired()]:
            block = self.blocks.pop(key)
            self.old_blocks.append(block)
            self.freed.append((block, block.rank.tail(block.stream)))

    def faults(self) -> list[str]:
        """Return a line for each kind of fault."""
        found = self._join_barriers() + self._join_messages()
        order = self._topological()
        if isinstance(order, str):
            return [*found, order]
        past = [0] * len(order)
        for node in order:
            past[node] = 1 << node
            for other in self.before[node]:
                past[node] |= past[other]
        for block, tail in self.freed:
            seen = 0 if tail is None else past[tail]
            for _, last, writes in block.accesses:
                if not seen >> last & 1:
                    found.append(f"freed by [{block.stream}] under: {self._tell(last, writes)}")
        for block in (*self.blocks.values(), *self.old_blocks):
            found += self._races(block, past)
        return sorted(set(found))

    def _races(self, block: Block, past: list[int]) -> Iterator[str]:
        for (one, places), (other, other_places) in combinations(block.accesses.items(), 2):
            if not (one[2] or other[2]) or not places & other_places:
                continue
            if one[:2] == other[:2] or past[other[0]] >> one[1] & 1 or past[one[0]] >> other[1] & 1:
                continue
            if not any(self.calls[last] in self.failed and not writes for _, last, writes in (one, other)):
                yield " | ".join(sorted(self._tell(last, writes) for _, last, writes in (one, other)))

    def _tell(self, node: int, writes: bool) -> str:
        return f"{self.names[node]} {'writes' if writes else 'reads'}"

    def _join_barriers(self) -> list[str]:
        """Let every rank leave a barrier after all have arrived."""
        for both in self.barriers.values():
            for _, departure in both:
                self.before[departure] |= {arrival for arrival, _ in both}
        return [f"{key} lacks ranks" for key, both in self.barriers.items() if len(both) < self.barrier_sizes[key]]

    def _join_messages(self) -> list[str]:
        """Let both ends of a message end after both have begun."""
        found = [f"message {key} lacks an end" for key, ends in self.messages.items() if len(ends) < 2]
        for key, (one, other) in ((key, ends) for key, ends in self.messages.items() if len(ends) == 2):
            self.before[one[1]].add(other[0])
            self.before[other[1]].add(one[0])
            if one[2] != other[2]:
                found.append(f"message {key} has {one[2]} bytes at one end, {other[2]} at the other")
        return found

    def _topological(self) -> list[int] | str:
        """Return all nodes, each after those that it waits for, or a cycle."""
        after: list[list[int]] = [[] for _ in self.before]
        for node, others in enumerate(self.before):
            for other in others:
                after[other].append(node)
        left = [len(others) for others in self.before]
        order = [node for node, count in enumerate(left) if not count]
        for node in order:
            for other in after[node]:
                left[other] -= 1
                if not left[other]:
                    order.append(other)
        stuck = [self.names[node] for node, count in enumerate(left) if count]
        return f"deadlock: {stuck[:4]} wait for one another" if stuck else order


class Rank:
    """One process: its streams, the buffers that its groups share, and its memories."""

    def __init__(self, graph: Graph, index: int) -> None:
        self.graph, self.index, self.stream, self.step = graph, index, CALLER, 0
        self.buffers: dict[str, torch.Tensor] = {}
        self.memories: dict[str, RecordedMemory] = {}
        self.places_left: int | None = None  # until an error
        self._tails: dict[str, int] = {}
        self._last_sync: int | None = None
        self.allocated = _Allocated(self)

    def tail(self, stream: str) -> int | None:
        """Return the last node of a stream."""
        return self._tails.get(stream, self._last_sync)

    def add(self, name: str, stream: str, *before: int | None) -> int:
        """Add a node to a stream, after its last one and others."""
        self.graph.look_for_freed()
        others = {node for node in (self.tail(stream), *before) if node is not None}
        self.graph.before.append(others)
        self.graph.names.append(f"rank {self.index} [{stream}] {name}")
        self.graph.calls.append(self.step)
        self._tails[stream] = len(self.graph.before) - 1
        return self._tails[stream]

    def work(self, name: str, reads: Iterable[Any], writes: Iterable[Any] = ()) -> None:
        """Read and write tensors on the current stream."""
        node = self.add(name, self.stream)
        self.access(node, node, reads, writes)

    def access(self, first: int, last: int, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        """Note accesses that begin with one node and end with another; what is None is left out."""
        for is_write, tensors in enumerate((reads, writes)):
            for x in tensors:
                if x is not None and x.numel():
                    places = _places(x.shape, x.stride(), x.storage_offset() * x.itemsize, x.itemsize)
                    self.graph.block_of(x, self).accesses[first, last, bool(is_write)] |= places

    def wait(self, *nodes: int | None) -> None:
        """Order the current stream after these nodes."""
        self.add("wait", self.stream, *nodes)

    def synchronize(self) -> int:
        """Order all later work after all earlier work."""
        node = self.add("synchronize", CALLER, *self._tails.values())
        self._tails.clear()
        self._last_sync = node
        return node

    def place(self) -> None:
        """Raise MemoryError if the step is to fail here: where streams get work."""
        if self.places_left is not None:
            self.places_left -= 1
            if self.places_left < 0:
                raise MemoryError("no memory left")

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a pooled buffer, as `ringflash.comm.transport.buffers` does."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if name not in self.buffers or self.buffers[name].numel() < num_bytes:
            if self.buffers.pop(name, None) is not None:
                self.synchronize()
                for memory in self.memories.values():
                    memory.views.drop()
            self.buffers[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return self.buffers[name][:num_bytes].view(dtype).view(shape)


class _Allocated(TorchDispatchMode):
    """Notes what a stream allocates. All other memory is the caller's stream's."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    self.rank.graph.block_of(x, self.rank, self.rank.stream)
        return out


@functools.lru_cache(maxsize=1 << 16)
def _places(shape: tuple[int, ...], strides: tuple[int, ...], first_byte: int, itemsize: int) -> int:
    """Return the bits of the 2-byte places of a storage that a tensor covers."""
    if strides[-1] != 1:
        shape, strides = (*shape, 1), (*strides, 1)
    starts = np.zeros(1, dtype=np.int64)
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        starts = (starts[:, None] + np.arange(size) * stride).ravel()
    run = (1 << shape[-1] * itemsize // 2) - 1
    return functools.reduce(lambda bits, at: bits | run << at, ((first_byte + starts * itemsize) // 2).tolist(), 0)


class Point(NamedTuple):
    """Marker: the last node of a stream at a time."""

    node: int | None

    def query(self) -> bool:
        """Never finished: the host must not rely on it."""
        return False


class RecordedMemory:
    """Peer memory of one rank, as `ringflash.comm.transport.GroupAreas`, over which nothing moves."""

    num_buffers, name = 2, "copy_engine"

    def __init__(self, rank: Rank, key: str, members: tuple[int, ...], areas: dict[Hashable, torch.Tensor]) -> None:
        self.process, self.key, self.members, self.group = rank, key, members, SimpleNamespace()
        self.rank, self.areas = members.index(rank.index), areas
        self.views = ViewCache()
        self.sizes: dict[str, int] = {}
        self.times_grown = Counter[str]()
        self.counts = Counter[Hashable]()  # of barriers by channel, of messages by peer
        self.streams: set[str] = set()
        self.num_posted = 0
        rank.memories[key] = self

    def reserve(self, name: str, num_bytes: int) -> None:
        if self.sizes.get(name, 0) < num_bytes:
            self.times_grown[name] += 1
            self.grow(name)
            self.views.drop(name)
            self.sizes[name] = num_bytes

    def grow(self, name: str) -> None:
        """Synchronise this rank's device, then all hosts."""
        node = self.process.synchronize()
        self.meet((self.key, "growth of", name, self.times_grown[name]), node, self.process.add("grown", CALLER, node))
        self.process.synchronize()

    def meet(self, key: Hashable, arrival: int, departure: int) -> None:
        """Join a barrier of all members."""
        graph = self.process.graph
        graph.barriers[key].append((arrival, departure))
        graph.barrier_sizes[key] = len(self.members)

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        key = self.key, name, self.times_grown[name], rank
        if key not in self.areas:
            self.areas[key] = torch.empty(self.sizes[name], dtype=torch.uint8)
        return self.areas[key][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def make_transfer(self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing], what: str) -> Work:
        return lambda: self.process.work(what, [x.source for x in incoming], [x.target for x in incoming])

    def cached(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        return self.views.get(key, areas, make)

    def barrier(self, channel: int) -> None:
        self.num_posted += 1
        self.counts[channel] += 1
        name, stream = f"barrier {channel}", self.process.stream
        arrival = self.process.add(name, stream)
        self.meet((self.key, name, self.counts[channel]), arrival, self.process.add(f"left {name}", stream))

    def mark(self) -> Point:
        return Point(self.process.tail(self.process.stream))

    def wait(self, *markers: Point) -> None:
        self.process.wait(*(marker.node for marker in markers))

    def run(self, work: Callable[..., T], *args: Any, commands: object = None) -> T:
        return work(*args)

    run_on_host = run

    def on_one_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run_on_stream(self, stream: str, work: Work, after: Sequence[Point], *, urgent: bool = False) -> Point:
        self.process.place()
        before, self.process.stream = self.process.stream, f"{self.key} {stream}"
        self.streams.add(self.process.stream)
        try:
            self.wait(*after)
            with self.process.allocated:
                work()
            return self.mark()
        finally:
            self.process.stream = before

    def join(self) -> None:
        self.process.wait(*map(self.process.tail, self.streams))
        for stream in self.streams:
            self.process.add("join", stream, self.process.tail(self.process.stream))


class RecordedMessages(RecordedMemory):
    """Memory of messages, as `ringflash.comm.transport.NcclGather` over NCCL, which has one stream for them."""

    num_buffers, name = 3, "nccl"

    def grow(self, name: str) -> None:
        self.process.synchronize()

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        return super().view(name, rank, shape, dtype) if rank == self.rank else None

    def barrier(self, channel: int) -> None:
        pass

    def make_transfer(self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing], what: str) -> Work:
        received = [x for x in incoming if x.source is None]
        own = [x for x in incoming if x.source is not None]

        def move() -> None:
            process, stream = self.process, f"{self.key} NCCL"
            first = process.add(f"begin {what}", stream, process.tail(process.stream))
            last = process.add(what, stream)
            self.num_posted += 1
            process.access(first, last, [x.tensor for x in outgoing], [x.target for x in received])
            ends = [(self.rank, x.rank, x.tensor) for x in outgoing]
            ends += [(x.rank, self.rank, x.target) for x in received]
            for sender, receiver, x in ends:
                self.counts[sender, receiver] += 1
                key = self.key, sender, receiver, self.counts[sender, receiver]
                process.graph.messages[key].append((first, last, x.nbytes))
            if own:
                process.work(f"own {what}", [x.source for x in own], [x.target for x in own])
            process.wait(last)

        return move
