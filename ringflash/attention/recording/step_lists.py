"""The steps of a recorded call as a repetition makes them: one by one or, with the driver, in lists of commands.

Between the commands of a list, other steps were recorded. Allocations, and work of the host that may precede commands,
are moved before the list; work of the host that may follow, and steps that free memory, are moved after it. A list ends
at an operator of torch. It also ends if a stream allocates memory after it has freed some, because torch may give it
the same memory again. If a call has no such operator and frees little memory, that is one allocation, and the call one
list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch

from ringflash.attention.recording.steps import (
    Allocate,
    Step,
    allocate_together_step,
    enter_step,
    free_step,
    issue_step,
    record_step,
    take_event_step,
)
from ringflash.comm.driver import Driver, driver
from ringflash.comm.driver_commands import Command, record_command, wait_command
from ringflash.comm.event_pool import new_event
from ringflash.comm.transport.gpu_areas import GpuAreas

_TOGETHER_BYTES = 256 << 20  # the most memory that is one allocation; the host has time in calls that need more


class Role(Enum):
    """Kinds of steps, which decide on their places among commands."""

    WORK = auto()
    ALLOCATE = auto()
    DROP = auto()
    ENTER = auto()  # changes the current stream, which commands do not need
    EARLY = auto()  # work of the host that may precede commands
    LATE = auto()  # work of the host that may follow commands


class RecordedStep(NamedTuple):
    """A step of the recorded call.

    Args:
        stream: stream that must be current; None if any may be. For a DROP: the stream whose memory is freed.
        commands: commands of the driver that do the same as `step`, or None.
        slot, num_bytes: of the memory that the step allocates or frees.
    """

    role: Role
    step: Step
    stream: torch.cuda.Stream | None = None
    commands: Sequence[Command] | None = None
    slot: int = -1
    num_bytes: int = 0


class RecordedEvent(NamedTuple):
    """An event that a stream records or waits for, in the recorded call.

    Args:
        event: index among the events of the call.
    """

    event: int
    stream: torch.cuda.Stream
    waits: bool

    def step(self, shared: torch.cuda.Event | None) -> Step:
        """Return the step that does the same, with an event that all calls share, or if that is None with a new one."""
        event, stream = self.event, self.stream
        return (lambda now: now.own[event].wait(stream)) if self.waits else record_step(event, stream, shared)

    def command(self, shared: torch.cuda.Event | None) -> Command:
        """Return the command that does the same."""
        make, stream = wait_command if self.waits else record_command, self.stream.cuda_stream
        if shared is None:
            return make(stream, 0, self.event)
        return make(stream, shared.cuda_event)._replace(kept=shared)


def repeated_steps(
    recorded: Sequence[RecordedStep | RecordedEvent],
    seen_by_host: set[int],
    areas: GpuAreas,
    current: torch.cuda.Stream,
    allocate: Allocate,
) -> list[Step]:
    """Return the steps of a repetition.

    Args:
        seen_by_host: indices of events that the host queries. All calls share one CUDA event for each of the others.
        current: the stream on which the repetition begins.
    """
    # Only streams wait for other events. A wait is for the last record before it, so one event serves all calls.
    records = [x for x in recorded if isinstance(x, RecordedEvent) and not x.waits]
    shared = {x.event: new_event(x.stream) for x in records if x.event not in seen_by_host}
    cuda_driver = driver()
    if cuda_driver is not None:
        together = _with_memory_together(recorded, current, allocate)
        return list(_steps_in_lists(together, shared, cuda_driver, areas, current))
    return [x.step(shared.get(x.event)) if isinstance(x, RecordedEvent) else x.step for x in recorded]


def _with_memory_together(
    recorded: Sequence[RecordedStep | RecordedEvent], current: torch.cuda.Stream, allocate: Allocate
) -> Sequence[RecordedStep | RecordedEvent]:
    """Return the steps with one allocation for all memory that the call frees: each one takes the host 5 µs.

    The memory is that of the caller's stream: all streams begin after it, and it waits for all of them at the end. It
    is not used again within the call. So the steps stay as they are if it is large, and if torch's operators use it.
    """
    steps = [x for x in recorded if isinstance(x, RecordedStep)]
    freed = {x.slot for x in steps if x.role is Role.DROP}
    sizes = {x.slot: x.num_bytes for x in steps if x.role is Role.ALLOCATE and x.slot in freed}
    of_torch = any(x.role is Role.WORK and x.commands is None for x in steps)
    if of_torch or not sizes or sum(sizes.values()) > _TOGETHER_BYTES:
        return recorded
    others = [x for x in recorded if isinstance(x, RecordedEvent) or x.slot not in sizes]
    first = RecordedStep(Role.ALLOCATE, allocate_together_step(sizes, allocate), current)
    return [first, *others, RecordedStep(Role.DROP, free_step(next(iter(sizes))), current)]


def _steps_in_lists(
    recorded: Sequence[RecordedStep | RecordedEvent],
    shared: dict[int, torch.cuda.Event],
    cuda_driver: Driver,
    areas: GpuAreas,
    current: torch.cuda.Stream,
) -> Iterator[Step]:
    """Yield the steps of a repetition, with as many commands in each list as possible.

    Args:
        shared: events that serve all calls, by index.
    """
    commands, late, freed = list[Command](), list[Step](), set[torch.cuda.Stream | None]()
    for x in recorded:
        if isinstance(x, RecordedEvent):
            commands.append(x.command(shared.get(x.event)))
            if not x.waits and x.event not in shared:
                yield take_event_step(x.event, x.stream)
        elif x.commands is not None:
            commands += x.commands
        elif x.role in (Role.LATE, Role.DROP):
            late.append(x.step)
            if x.role is Role.DROP:
                freed.add(x.stream)
        elif x.role is not Role.ENTER:
            if not (x.role is Role.EARLY or x.role is Role.ALLOCATE and x.stream not in freed):
                yield from _command_list(cuda_driver, commands, late)
                commands, late, freed = [], [], set()
            if x.stream is not None and x.stream != current:
                current = x.stream
                yield enter_step(areas, current)
            yield x.step
    yield from _command_list(cuda_driver, commands, late)


def _command_list(cuda_driver: Driver, commands: list[Command], late: list[Step]) -> list[Step]:
    """Return the step that issues commands, if there are any, and the late steps that follow it."""
    return [issue_step(cuda_driver, commands), *late] if commands else late
