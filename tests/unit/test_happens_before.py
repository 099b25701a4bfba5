"""Every order on which streams and ranks may run leaves a ring call right. CPU, one process.

Programs are drawn at random: transports, masks, layouts, lengths that grow, blocks of keys, groups in turn, backwards
in any order, recomputed forwards, and calls that all ranks leave alike with an error. They have no race, deadlock or
memory that is freed too early (tests/helpers/happens_before.py). Then each wait, barrier and buffer is left out in
turn, and the fault must be found.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ringflash.attention import ulysses
from ringflash.attention.gathered_buffers import GatheredKV
from ringflash.attention.gradient_return import GradientReturn
from ringflash.attention.ulysses import Ulysses
from ringflash.comm.transport.areas import BEGIN, FREE, PUBLISHED, PULLED, READY
from tests.helpers import recorded_calls
from tests.helpers.happens_before import CALLER, Point, Rank, RecordedMemory
from tests.helpers.recorded_calls import Call, Pass, Step, faults


def drawn_call(draw: random.Random, world: int) -> Call:
    """One call of 2 to 4 ranks."""
    transport = draw.choice(("copy_engine", "nccl", "ulysses", *(["by_host"] if world == 4 else [])))
    by_heads = transport in ("copy_engine", "nccl")
    rows, documents = draw.choice((4, 8, 12)), None
    layout = draw.choice(("zigzag", "zigzag", "contiguous"))
    if by_heads and draw.random() < 0.5:
        cuts = draw.sample(range(1, rows * world), draw.randrange(4))
        documents, layout = tuple(sorted((0, rows * world, *cuts))), draw.choice((layout, "balanced"))
        if layout == "balanced" and draw.random() < 0.5:
            unit = 2 * world
            documents, layout = tuple(sorted({x // unit * unit for x in documents})), "documents"
    window, causal = draw.choice((((-1, -1), True), ((-1, -1), False), ((3, 0), True), ((2, 2), False)))
    heads = (4, draw.choice((1, 2, 4))) if by_heads else (2 * world, 2 * world)
    batch = 1 if documents else draw.choice((1, 1, 2))
    blocks, group = draw.choice((1, 1, 2, 3)), draw.choice("AB")
    return Call(transport, rows, causal, window, layout, heads, blocks, group, documents, batch)


def drawn_program(draw: random.Random, world: int) -> list[Step]:
    """Forwards and the backwards of some of them, one call in six with an error."""
    program: list[Step] = []
    pending: list[Step] = []
    for number in range(draw.randrange(4, 9)):
        fails_at = draw.randrange(12) if draw.random() < 1 / 6 else None
        if pending and draw.random() < 0.45:
            step = pending.pop(draw.randrange(len(pending)))
            program.append(step._replace(backward=True, fails_at=fails_at))
            continue
        step = Step(f"call {number}", drawn_call(draw, world))
        program.append(step._replace(fails_at=fails_at))
        if fails_at is None:
            pending.append(step)
            program += [step] if draw.random() < 0.15 else []  # recomputed
    return program


@pytest.mark.parametrize("seed", range(48))
def test_random_programs_are_ordered(seed: int) -> None:
    draw = random.Random(seed)
    world = draw.choice((2, 3, 4))
    program = drawn_program(draw, world)
    turns, parts = draw.random() < 0.5, draw.random() < 0.5
    assert faults(world, program, turns=turns, parts=parts, gradient_buffers=draw.choice((2, 3))) == [], program


def passes(call: Call) -> list[Step]:
    """Forwards and backwards of two masks, and a third call."""
    windowed = replace(call, window=(3, 0))
    steps = [("a", call), ("b", windowed), ("b", windowed, True), ("a", call, True), ("c", call), ("c", call, True)]
    return [Step(*step) for step in steps]


COPIES, MESSAGES, BLOCKS, ULYSSES, HOSTS = map(
    passes,
    (
        Call("copy_engine"), Call("nccl"), Call("copy_engine", blocks=3), Call("ulysses", heads=(6, 6)),
        Call("by_host", heads=(8, 8)),
    ),
)  # fmt: skip
FAILING = [*COPIES[::3], COPIES[0], COPIES[3]._replace(fails_at=9), COPIES[0]]
ANOTHER = HOSTS[0]._replace(call=replace(HOSTS[0].call, group="B"))  # group, with the same buffers
FAILING_HOSTS = [ANOTHER, HOSTS[0], HOSTS[0]._replace(fails_at=2), ANOTHER]


def without(channel: int) -> Callable[..., None]:
    """Barriers of a channel that wait for no rank."""
    return lambda self, other: None if other == channel else _barrier(self, other)


def no_stream(stream: str) -> Callable[..., Point]:
    """Nobody waits for the work of a stream."""

    def run(self: RecordedMemory, name: str, *args: Any, **options: Any) -> Point:
        marker = _run_on_stream(self, name, *args, **options)
        return Point(None) if name == stream else marker

    return run


def too_early(self: GatheredKV, index: int, start: Any, computed: list[Any]) -> Any:
    """K/V arrive in a buffer that is still read."""
    return _pull(self, index, start, [start] * len(computed))


def one_buffer(kind: str) -> Callable[..., torch.Tensor]:
    """All sections share one buffer of this kind."""
    return lambda self, name, *rest: _buffer(self, f"{kind}.0" if name.startswith(kind) else name, *rest)


def one_area(self: RecordedMemory, name: str, *rest: Any) -> Any:
    """Heads are exchanged there and back in one area."""
    return _view(self, "heads" if name == "rows" else name, *rest)


def caller_without(stream: str) -> Callable[..., None]:
    """The caller's stream does not wait for a stream."""

    def wait(self: RecordedMemory, *markers: Point) -> None:
        names = self.process.graph.names
        at_end = self.process.stream == CALLER
        _wait(self, *(x for x in markers if not (at_end and x.node is not None and f" {stream}]" in names[x.node])))

    return wait


class LatePass(Pass):
    """Gradients whose accumulator of dQ is allocated by the kernel, as those of FP8 once were."""

    def add(self, *args: Any, **options: Any) -> None:
        if not hasattr(self, "late"):
            self.late = self.dq = torch.empty_like(self.dq)
        super().add(*args, **options)


_barrier, _run_on_stream, _view = RecordedMemory.barrier, RecordedMemory.run_on_stream, RecordedMemory.view
_wait, _pull, _buffer = RecordedMemory.wait, GatheredKV.pull, Rank.buffer
MEMORY = RecordedMemory

# What is left out: a program that needs it, a part of the fault's line, and what takes its place.
LEFT_OUT: dict[str, tuple[list[Step], str, Any, str, Any]] = {
    "begin": (COPIES, "publish writes", MEMORY, "barrier", without(BEGIN)),
    "published": (COPIES, "publish writes", MEMORY, "barrier", without(PUBLISHED)),
    "pulled": (COPIES, "publish writes", MEMORY, "barrier", without(PULLED)),
    "ready": (COPIES, "backward writes", MEMORY, "barrier", without(READY)),
    "free": (COPIES, "backward writes", MEMORY, "barrier", without(FREE)),
    "begin of heads": (ULYSSES, "fill heads writes", MEMORY, "barrier", without(BEGIN)),
    "second area of heads": (ULYSSES, "fill rows writes", MEMORY, "view", one_area),
    "arrival of queries": (HOSTS, "round queries reads", Ulysses, "_attention", lambda x, *_: x.attention),
    "arrival of keys": (COPIES, "forward reads", MEMORY, "run_on_stream", no_stream("pull")),
    "arrival of messages": (MESSAGES, "forward reads", MEMORY, "run_on_stream", no_stream("pull")),
    "buffer in use": (COPIES, "forward reads", GatheredKV, "pull", too_early),
    "buffer of messages in use": (MESSAGES, "forward reads", GatheredKV, "pull", too_early),
    "second buffer": (COPIES, "forward reads", Rank, "buffer", one_buffer("kv")),
    "buffer of gradients in use": (BLOCKS, "backward writes", GradientReturn, "freed", lambda *_: []),
    "sums of each section": (BLOCKS, "collect writes", Rank, "buffer", one_buffer("dkv.sum")),
    "outputs of each section": (BLOCKS, "forward writes", Rank, "buffer", one_buffer("out")),
    "last even section": (COPIES, "use out, lse reads", MEMORY, "wait", caller_without("even")),
    "last odd section": (MESSAGES, "use out, lse reads", MEMORY, "wait", caller_without("odd")),
    "last return": (COPIES, "use dq, dk, dv reads", MEMORY, "wait", caller_without("begin")),
    "last pull": (COPIES, "publish writes", MEMORY, "wait", caller_without("pull")),
    "place of dQ": (COPIES, "under: rank 0 [A.copy_engine end] cast dQ", recorded_calls, "Pass", LatePass),
    "join": (FAILING, "freed by [caller] under", MEMORY, "join", lambda _: None),
    "join of heads": (FAILING_HOSTS, "exchanged heads", ulysses, "JoinAfterError", lambda _: nullcontext()),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_found(name: str) -> None:
    program, fault, *place = LEFT_OUT[name]
    turns, world = "buffer" in name, 4 if program[0].call.transport == "by_host" else 3
    assert faults(world, program, parts=True, turns=turns) == []
    with mock.patch.object(*place):
        found = faults(world, program, parts=True, turns=turns)
    assert any(fault in line for line in found), found[:6]
