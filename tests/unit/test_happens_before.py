"""Every order in which lanes and ranks may run leaves a ring call right. CPU, one process.

Programs are drawn at random: transports, masks, layouts, lengths that grow, blocks of keys, groups in turn, backwards
in any order, recomputed forwards, and calls that all ranks leave alike with an error. They have no race, deadlock or
memory that is freed too early (tests/helpers/happens_before.py). Then each wait, barrier and buffer is left out in
turn, and the fault must be found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ringflash.attention.gathered_buffers import GatheredKV
from ringflash.attention.gradient_return import GradientReturn
from ringflash.attention.ulysses import Ulysses
from ringflash.comm.transport.peer_memory import BEGIN, FREE, PUBLISHED, PULLED, READY
from tests.helpers import happens_before
from tests.helpers.happens_before import CALLER, Call, Pass, Point, Rank, RecordedMemory, Step, faults


def drawn_call(draw: random.Random, world: int) -> Call:
    """One call of 2 to 4 ranks."""
    transport = draw.choice(("copy_engine", "nccl", "ulysses", *(["by_host"] if world == 4 else [])))
    by_heads = transport in ("copy_engine", "nccl")
    rows, documents = draw.choice((4, 8, 12)), None
    layout = draw.choice(("zigzag", "zigzag", "contiguous"))
    if by_heads and draw.random() < 0.5:
        cuts = draw.sample(range(1, rows * world), draw.randrange(4))
        documents, layout = tuple(sorted((0, rows * world, *cuts))), draw.choice((layout, "balanced"))
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


def program_of(call: Call, **last: Any) -> list[Step]:
    """Forwards and backwards of two masks, and a third call."""
    windowed = replace(call, window=(3, 0))
    steps = [("a", call), ("b", windowed), ("b", windowed, True), ("a", call, True), ("c", call), ("c", call, True)]
    return [Step(*step) for step in steps]


def failing(call: Call, place: int) -> list[Step]:
    """A call that ends with an error, then one of another group, which shares its buffers."""
    other = replace(call, group="B")
    return [Step("a", other), Step("b", call), Step("fails", call, fails_at=place), Step("c", other)]


def failing_backward(call: Call) -> list[Step]:
    return [Step("a", call), Step("a", call, True), Step("b", call), Step("b", call, True, fails_at=9), Step("c", call)]


COPIES, MESSAGES = Call("copy_engine"), Call("nccl")
ULYSSES, HOSTS = Call("ulysses", heads=(6, 6)), Call("by_host", heads=(8, 8))
BLOCKS = Call("copy_engine", blocks=3)


def without(channel: int) -> Callable[..., None]:
    """Barriers of a channel that wait for nobody."""
    return lambda self, other: None if other == channel else _barrier(self, other)


def no_lane(lane: str) -> Callable[..., Point]:
    """Nobody waits for the work of a lane."""

    def run(self: RecordedMemory, name: str, *args: Any, **options: Any) -> Point:
        marker = _run_in_lane(self, name, *args, **options)
        return Point(None) if name == lane else marker

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


def one_area_reserved(self: RecordedMemory, name: str, num_bytes: int) -> None:
    _reserve(self, *(("heads", 1 << 16) if name in ("heads", "rows") else (name, num_bytes)))


def caller_without(lane: str) -> Callable[..., None]:
    """The caller's stream does not wait for a lane."""

    def wait(self: RecordedMemory, *markers: Point) -> None:
        names = self.process.graph.names
        at_end = self.process.stream == CALLER
        _wait(self, *(x for x in markers if not (at_end and x.node is not None and f" {lane}]" in names[x.node])))

    return wait


class LatePass(Pass):
    """Gradients whose accumulator of dQ is allocated by the kernel, as those of FP8 once were."""

    def add(self, *args: Any, **options: Any) -> None:
        if not hasattr(self, "late"):
            self.late = self.dq = torch.empty_like(self.dq)
        super().add(*args, **options)


_barrier, _run_in_lane, _view = RecordedMemory.barrier, RecordedMemory.run_in_lane, RecordedMemory.view
_reserve, _wait, _pull, _buffer = RecordedMemory.reserve, RecordedMemory.wait, GatheredKV.pull, Rank.buffer


class LeftOut(NamedTuple):
    """What is left out, a program that needs it, and a part of the fault's line."""

    patches: Mapping[tuple[Any, str], object]
    program: list[Step]
    fault: str
    options: dict[str, Any] = {}


_TURNS, _PARTS = {"turns": True}, {"parts": True}
LEFT_OUT = {
    "begin": LeftOut({(RecordedMemory, "barrier"): without(BEGIN)}, program_of(COPIES), "publish writes"),
    "published": LeftOut(
        {(RecordedMemory, "barrier"): without(PUBLISHED)}, program_of(COPIES), "publish writes", _PARTS
    ),
    "pulled": LeftOut({(RecordedMemory, "barrier"): without(PULLED)}, program_of(COPIES), "publish writes"),
    "ready": LeftOut({(RecordedMemory, "barrier"): without(READY)}, program_of(COPIES), "backward writes"),
    "free": LeftOut({(RecordedMemory, "barrier"): without(FREE)}, program_of(COPIES), "backward writes"),
    "begin of heads": LeftOut({(RecordedMemory, "barrier"): without(BEGIN)}, program_of(ULYSSES), "fill heads writes"),
    "second area of heads": LeftOut(
        {(RecordedMemory, "view"): one_area, (RecordedMemory, "reserve"): one_area_reserved},
        program_of(ULYSSES),
        "fill rows writes",
    ),
    "arrival of queries": LeftOut(
        {(Ulysses, "_attention"): lambda self, q, k, v, _: self.attention(q, k)},
        program_of(HOSTS),
        "round queries reads",
    ),
    "arrival of keys": LeftOut({(RecordedMemory, "run_in_lane"): no_lane("pull")}, program_of(COPIES), "forward reads"),
    "arrival of messages": LeftOut(
        {(RecordedMemory, "run_in_lane"): no_lane("pull")}, program_of(MESSAGES), "forward reads"
    ),
    "buffer in use": LeftOut({(GatheredKV, "pull"): too_early}, program_of(COPIES), "forward reads", _TURNS),
    "buffer of messages in use": LeftOut({(GatheredKV, "pull"): too_early}, program_of(MESSAGES), "reads", _TURNS),
    "second buffer": LeftOut({(Rank, "buffer"): one_buffer("kv")}, program_of(COPIES), "forward reads", _TURNS),
    "buffer of gradients in use": LeftOut(
        {(GradientReturn, "freed"): lambda *_: []}, program_of(BLOCKS), "backward writes"
    ),
    "sums of each section": LeftOut({(Rank, "buffer"): one_buffer("dkv.sum")}, program_of(BLOCKS), "writes"),
    "outputs of each section": LeftOut({(Rank, "buffer"): one_buffer("out")}, program_of(BLOCKS), "forward writes"),
    "last even section": LeftOut({(RecordedMemory, "wait"): caller_without("even")}, program_of(COPIES), "use out"),
    "last odd section": LeftOut({(RecordedMemory, "wait"): caller_without("odd")}, program_of(MESSAGES), "use out"),
    "last return": LeftOut({(RecordedMemory, "wait"): caller_without("begin")}, program_of(COPIES), "use dq, dk, dv"),
    "last pull": LeftOut({(RecordedMemory, "wait"): caller_without("pull")}, program_of(COPIES), "publish writes"),
    "place of dQ": LeftOut(
        {(happens_before, "Pass"): LatePass}, program_of(COPIES), "under: rank 0 [A.copy_engine end] cast"
    ),
    "join after an error": LeftOut(
        {(RecordedMemory, "join"): lambda _: None}, failing_backward(COPIES), "freed by [caller] under"
    ),
    "join of heads after an error": LeftOut(
        {(Ulysses, "_joined_after_errors"): lambda _: nullcontext()}, failing(HOSTS, 2), "exchanged heads writes"
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_found(name: str) -> None:
    patches, program, fault, options = LEFT_OUT[name]
    world = 4 if program[0].call.transport == "by_host" else 3
    assert faults(world, program, **options) == []
    with ExitStack() as stack:
        for (target, attribute), value in patches.items():
            stack.enter_context(mock.patch.object(target, attribute, value))
        found = faults(world, program, **options)
    assert any(fault in line for line in found), found[:6]
