"""Ring calls over recorded memories (`happens_before.py`): the code of the calls, without kernels.

GatherAttention, GatheredKV, GradientReturn, HeadExchange and Ulysses run for one rank after another, in one process.
Kernels are replaced by lists of the tensors that they read and write. Sections have one KV head.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from ringflash.attention import (
    gather_by_heads,
    gather_units,
    gathered_buffers,
    gradient_return,
    head_exchange,
    schedule,
    sections,
)
from ringflash.attention.gather_by_heads import GatherAttention
from ringflash.attention.head_exchange import AllToAll
from ringflash.attention.inputs import BackwardInputs
from ringflash.attention.kv_format import KVFormat
from ringflash.attention.local_attention import LocalAttention
from ringflash.attention.sections import Sections
from ringflash.attention.ulysses import Ulysses
from ringflash.comm import call_numbers
from ringflash.comm.call_numbers import CallNumber, CallWords
from ringflash.comm.watchdog import Unwatched
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.mask import Mask
from tests.helpers.happens_before import Graph, Rank, RecordedMemory, RecordedMessages


@dataclass(frozen=True)
class Call:
    """Arguments of a call of all ranks.

    Args:
        transport: "copy_engine", "nccl", "ulysses", or "by_host" with two ranks on a host.
        rows: tokens of a rank.
        heads: heads of q and of k.
        blocks: number of blocks of keys.
        group: groups of different names have separate memories.
    """

    transport: str = "copy_engine"
    rows: int = 8
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    layout: str = "zigzag"
    heads: tuple[int, int] = (4, 4)
    blocks: int = 1
    group: str = "A"
    documents: tuple[int, ...] | None = None
    batch: int = 1


class Step(NamedTuple):
    """Forward or backward of a call, which all ranks leave alike if it fails at a place."""

    name: str
    call: Call
    backward: bool = False
    fails_at: int | None = None


class Process:
    """One rank, which makes the calls of a program."""

    def __init__(self, rank: Rank, world: int, areas: dict[Hashable, torch.Tensor]) -> None:
        self.rank, self.world, self.areas = rank, world, areas
        self.saved: dict[str, tuple[torch.Tensor, ...]] = {}

    def run(self, number: int, step: Step) -> None:
        self.rank.step, self.rank.places_left = number, step.fails_at
        try:
            (self._backward if step.backward else self._forward)(step)
        except MemoryError:
            self.rank.graph.failed.add(number)
        self.rank.places_left = None

    def _forward(self, step: Step) -> None:
        shapes = [(step.call.batch, step.call.rows, step.call.heads[index], 2) for index in (0, 1, 1)]
        q, k, v = tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        self.rank.work("make q, k, v", [], tensors)
        out, lse = self._opened(step.call).forward(q, k, v)
        self.rank.work("use out, lse", [out, lse])
        self.saved[step.name] = q, k, v, out, lse

    def _backward(self, step: Step) -> None:
        q, k, v, out, lse = self.saved.pop(step.name)
        dout = torch.empty_like(out)
        self.rank.work("make dout", [], [dout])
        inputs = BackwardInputs(dout, None, q, k, v, out, lse)
        self.rank.work("use dq, dk, dv", self._opened(step.call).backward(inputs))

    def _opened(self, call: Call) -> GatherAttention | Ulysses:
        index, everyone = self.rank.index, tuple(range(self.world))
        if call.transport in ("copy_engine", "nccl"):
            return self._gather(call, self._memory(call, call.transport, everyone))
        size = self.world if call.transport == "ulysses" else 2
        host, rail = everyone[index - index % size :][:size], everyone[index % size :: size]
        memory = self._memory(call, f"heads of {host}", host)

        if len(rail) == 1:
            inner: Any = LocalAttention(None, "reference", 1.0, False)  # type: ignore[arg-type]
        else:
            inner = self._gather(call, self._memory(call, f"nccl of {rail}", rail))
        return Ulysses(inner, memory, host, memory, call.layout, CallNumber(1))  # type: ignore[arg-type]

    def _memory(self, call: Call, kind: str, members: tuple[int, ...]) -> RecordedMemory:
        key = f"{call.group}.{kind}"
        make = RecordedMessages if kind.startswith("nccl") else RecordedMemory
        return self.rank.memories.get(key) or make(self.rank, key, members, self.areas)

    def _gather(self, call: Call, memory: RecordedMemory) -> GatherAttention:
        mask, size = SequenceMask(call.rows * self.world, call.causal, call.window, call.documents), len(memory.members)
        others = len(schedule.active_distances(mask, size, call.layout)) - 1
        if call.blocks == 1 or not others:
            blocks: tuple[schedule.KeyBlock, ...] = (schedule.plan_single_block(mask, size, memory.rank, call.layout),)
        else:
            ends = [round(others * n / (call.blocks - 1)) for n in range(call.blocks)]
            sizes = tuple(b - a for a, b in zip(ends, ends[1:], strict=False) if b > a)
            blocks = schedule.plan_blocks(mask, size, memory.rank, call.layout, (1, *sizes))
        return GatherAttention(blocks, memory, "reference", 1.0, False, CallNumber(1))  # type: ignore[arg-type]


def faults(
    world: int, program: Sequence[Step], *, turns: bool = False, parts: bool = False, gradient_buffers: int = 2
) -> list[str]:
    """Return the faults of a program that all ranks run.

    Args:
        turns: K/V are gathered into buffers in rotation.
        parts: the first section of K/V is published before the others.
        gradient_buffers: buffers of gradients on their way.
    """
    graph, areas, now = Graph(), dict[Hashable, torch.Tensor](), list[Rank]()
    with _recorded(now, turns, parts, gradient_buffers):
        for index in range(world):
            now[:] = [Rank(graph, index)]
            process = Process(now[0], world, areas)
            for number, step in enumerate(program):
                process.run(number, step)
        return graph.faults()


class Pass:
    """Gradients of a section, whose accumulator of dQ is allocated when it begins."""

    def __init__(self, now: list[Rank], dout: Any, q: Any, out: Any, lse: Any, **_: object) -> None:
        self.now, self.given = now, (dout, q)
        self.dq = torch.empty(q.shape)
        now[0].work("row sums, dQ = 0", [dout, q, out, lse], [self.dq])

    def add(self, *args: Any, **_: object) -> None:
        *keys, _, dk, dv = args
        self.now[0].work("backward", [*self.given, *keys], [dk, dv, self.dq])

    def finish(self, out: torch.Tensor) -> None:
        self.now[0].work("cast dQ", [self.dq], [out])


def _recorded(now: list[Rank], turns: bool, parts: bool, gradient_buffers: int) -> ExitStack:
    """Return a context in which kernels, buffers and numbers of calls belong to the rank in `now`."""

    def work(name: str, reads: Iterable[Any], writes: Iterable[Any] = ()) -> None:
        now[0].work(name, reads, writes)

    def forward(queries: Any, *args: Any, out: Any, lse: Any, acc: Any = None, **_: object) -> None:
        work("forward", [queries, *args[:-2], acc], [out, lse])

    def rounded(_: KVFormat, q: torch.Tensor, kernel: object) -> torch.Tensor:
        copy = torch.empty_like(q)
        work("round queries", [q], [copy])
        return copy

    def publish(_: str, k: Any, v: Any, area: Any, head_offsets: Any, row_map: Any, area_rows: int) -> None:
        work("publish", [k, v], _published(k, v, area, head_offsets, row_map, area_rows))

    def collect(_: str, own: Any, others: Any, sources: Any, most: int, dk: Any, dv: Any) -> None:
        work("collect", _collected(own, others, sources), [dk, dv])

    def local_forward(_: object, q: Any, k: Any, v: Any, row_max: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1])
        work("local forward", [q, k, v], [out, lse])
        return out, lse

    def local_backward(_: object, inputs: BackwardInputs) -> Any:
        gradients = [torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v)]
        work("local backward", [x for x in inputs if x is not None], gradients)
        return gradients

    def words_on_host(words: CallWords, _: CallNumber) -> Any:
        return SimpleNamespace(copy_=lambda x, non_blocking: work("words to the host", [x])) if words.senders else None

    def arrived_heads(exchange: AllToAll) -> list[torch.Tensor]:
        if not exchange.to_host:  # else they stay in the buffer
            work("copy of the rows", exchange.received)
        return arrived(exchange)

    arrived, one_head = AllToAll.received_tensors, lambda sizes, *_: Sections(*[(1,) * sizes.kv[2]] * 2)
    stack = ExitStack()
    for module in (gathered_buffers, gradient_return, gather_units, head_exchange):
        stack.enter_context(mock.patch.object(module, "buffer", lambda *args: now[0].buffer(*args)))
    for target, name, value in (
        (sections, "MAX_UNBUFFERED_KV_BYTES", 0 if turns else 1 << 40),
        (sections, "PUBLISHED_BYTES", 0 if parts else 1 << 40),
        (sections, "choose_num_gradient_buffers", lambda *args: min(gradient_buffers, len(args[-1]))),
        (sections, "choose_sections", one_head),
        (gathered_buffers, "publish", publish),
        (gradient_return, "collect", collect),
        (gather_units, "begin_checked_backward", lambda *args, **options: Pass(now, *args, **options)),
        (gather_by_heads, "watching", lambda *_: Unwatched()),
        (gather_by_heads, "transport_name", lambda memory: memory.name),
        (head_exchange, "watching", lambda *_: Unwatched()),
        (call_numbers, "compare_later", lambda *_: None),
        (KVFormat, "forward_kernel", lambda *_: forward),
        (KVFormat, "pack_queries", rounded),
        (CallWords, "write", lambda words, _: work("write the number", [], [words.own])),
        (CallWords, "for_host", words_on_host),
        (Mask, "is_cached", lambda *_: True),
        (AllToAll, "fill", lambda exchange, *tensors: work(f"fill {exchange.area}", tensors, exchange.own)),
        (AllToAll, "received_tensors", arrived_heads),
        (LocalAttention, "forward", local_forward),
        (LocalAttention, "backward", local_backward),
    ):
        stack.enter_context(mock.patch.object(target, name, value))
    return stack


def _published(
    k: torch.Tensor, v: torch.Tensor, area: torch.Tensor, head_offsets: torch.Tensor, row_map: torch.Tensor, rows: int
) -> Iterator[torch.Tensor]:
    """List the lines of an area that `ringflash_kernels.api.publish` writes."""
    width = k.shape[3] + v.shape[3]
    for first, step in head_offsets.tolist():
        for batch in range(k.shape[0]):
            for row in row_map.tolist():
                yield area[first + (batch * rows + row) * step :][:width]


def _collected(own: torch.Tensor, others: torch.Tensor, sources: torch.Tensor) -> Iterator[torch.Tensor]:
    """List the rows of gradients that `ringflash_kernels.api.collect` reads."""
    for row, first, size, count in sources.T.tolist():
        yield own[:, row]
        for index in range(count * own.shape[0]):
            yield others[first + index * size]
