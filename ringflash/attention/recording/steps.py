"""Steps of a repeated call: functions of the `Repetition` that they are run for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.driver import CommandList, Driver
from ringflash.comm.driver_commands import Command
from ringflash.comm.event_pool import address_of, take_event
from ringflash.comm.transport.lanes import Lanes
from ringflash.comm.watchdog import CallInFlight, Unwatched

Tensors = Sequence[Tensor | None]


class Repetition:
    """A call that repeats a tape.

    Attributes:
        tensors: by slot: the call's inputs, then its allocations; None once freed.
        addresses: addresses of these.
        events: events that it has recorded, and results of `run_on_host`, by index.
    """

    __slots__ = ("addresses", "events", "number", "tensors", "watched")

    def __init__(
        self, tensors: Tensors, number: CallNumber, watched: CallInFlight | Unwatched, num_events: int
    ) -> None:
        self.tensors, self.number, self.watched = list(tensors), number, watched
        self.addresses = [0 if x is None else x.data_ptr() for x in tensors]
        self.events: list[Any] = [None] * num_events


Step = Callable[[Repetition], None]


def view_of(x: Tensor, offset: int) -> Callable[[Tensor], Tensor]:
    """Return the function that takes of a slot's tensor the view that x is of it.

    Args:
        offset: bytes from the address of the slot's tensor to that of x.
    """
    shape, strides, dtype = tuple(x.shape), x.stride(), x.dtype
    first = offset // dtype.itemsize

    def view(base: Tensor) -> Tensor:
        return base.as_strided(shape, strides, base.storage_offset() + first)

    return view


def record_step(index: int, stream: torch.cuda.Stream, event: torch.cuda.Event | None = None) -> Step:
    """Return the step that records an event on a stream: the given one, or a new one, as event `index` of the call."""

    def record(now: Repetition) -> None:
        now.events[index] = stream.record_event(event)

    return record


def take_event_step(index: int, stream: torch.cuda.Stream) -> Step:
    """Return the step that takes a free event from the pool, which a command then records, as event `index`."""

    def take(now: Repetition) -> None:
        now.events[index] = take_event(stream)

    return take


def issue_step(cuda_driver: Driver, commands: list[Command]) -> Step:
    """Return the step that issues a list of commands."""
    places = sorted({command.value for command in commands if command.value >= 0})
    values = {place: value for value, place in enumerate(places)}
    made = CommandList(cuda_driver, [command._replace(value=values.get(command.value, -1)) for command in commands])

    def issue(now: Repetition) -> None:
        made.issue(now.addresses, [address_of(now.events[place]) for place in places], now.number.word)

    return issue


def enter_step(areas: Lanes, stream: torch.cuda.Stream) -> Step:
    """Return the step that makes a stream current."""

    def enter(_: Repetition) -> None:
        areas.enter(stream)

    return enter


def free_step(slot: int) -> Step:
    """Return the step that frees the tensor of a slot."""

    def drop(now: Repetition) -> None:
        now.tensors[slot] = None

    return drop
