"""Steps of a repeated call: functions of the `Repetition` that they are run for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.driver import CommandList, Driver
from ringflash.comm.driver_commands import Command
from ringflash.comm.event_pool import ReusedEvent, address_of, take_event
from ringflash.comm.transport.gpu_areas import GpuAreas
from ringflash.comm.watchdog import CallInFlight, Unwatched

Tensors = Sequence[Tensor | None]
_ALIGNMENT = 512  # bytes, as torch's own allocations
OF_EACH_CALL = {CallInFlight: -2, Unwatched: -2, CallNumber: -1}  # indices in `Repetition.own`


class Repetition:
    """A call that repeats a tape.

    Args:
        num_slots: number of its inputs and allocations.
        num_events: number of its events and results of `run_on_host`.
    Attributes:
        tensors: by slot: the call's inputs, then its allocations; None before, once freed, or as part of another one.
        addresses: addresses of these; 0 without a tensor.
        own: events that it has recorded, and results of `run_on_host`, by index; then the watched call and the number.
        values: handles of these events and addresses of these results, for commands.
    """

    __slots__ = ("addresses", "own", "tensors", "values")

    def __init__(
        self,
        tensors: Tensors,
        number: CallNumber,
        watched: CallInFlight | Unwatched,
        num_slots: int,
        num_events: int,
    ) -> None:
        missing = num_slots - len(tensors)
        self.tensors = [*tensors, *[None] * missing]
        self.addresses = [*[0 if x is None else x.data_ptr() for x in tensors], *[0] * missing]
        self.own: list[Any] = [*[None] * num_events, watched, number]
        self.values = [0] * num_events

    def allocated(self, slot: int, made: Tensor) -> None:
        """Keep an allocation."""
        self.tensors[slot], self.addresses[slot] = made, made.data_ptr()

    def keep(self, index: int, thing: ReusedEvent | Tensor) -> None:
        """Keep an event or a result of `run_on_host`, by index."""
        self.own[index], self.values[index] = thing, address_of(thing)


Step = Callable[[Repetition], None]
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def view_of(x: Tensor, offset: int) -> Callable[[Tensor], Tensor]:
    """Return a function that makes, from the tensor of a slot, the view of it that x is.

    Args:
        offset: bytes from the address of the slot's tensor to the address of x.
    """
    shape, strides, dtype = tuple(x.shape), x.stride(), x.dtype
    first = offset // dtype.itemsize

    def view(base: Tensor) -> Tensor:
        return base.as_strided(shape, strides, base.storage_offset() + first)

    return view


def record_step(index: int, stream: torch.cuda.Stream, event: torch.cuda.Event | None = None) -> Step:
    """Return the step that records an event on a stream: the given one, or a new one, as event `index` of the call."""

    def record(now: Repetition) -> None:
        now.own[index] = stream.record_event(event)

    return record


def take_event_step(index: int, stream: torch.cuda.Stream) -> Step:
    """Return the step that takes a free event from the pool, which a command then records, as event `index`."""

    def take(now: Repetition) -> None:
        now.keep(index, take_event(stream))

    return take


def issue_step(cuda_driver: Driver, commands: list[Command]) -> Step:
    """Return the step that issues a list of commands."""
    made = CommandList(cuda_driver, commands)

    def issue(now: Repetition) -> None:
        made.issue(now.addresses, now.values, now.own[OF_EACH_CALL[CallNumber]].word)

    return issue


def enter_step(areas: GpuAreas, stream: torch.cuda.Stream) -> Step:
    """Return the step that makes a stream current."""

    def enter(_: Repetition) -> None:
        areas.enter(stream)

    return enter


def allocate_step(slot: int, x: Tensor, allocate: Allocate) -> Step:
    """Return the step that allocates a tensor like x for a slot."""
    shape, strides, dtype = tuple(x.shape), x.stride(), x.dtype
    return lambda now: now.allocated(slot, allocate(shape, strides, dtype))


def allocate_together_step(sizes: dict[int, int], allocate: Allocate) -> Step:
    """Return the step that allocates the memory of several slots as one tensor, which belongs to the first of them.

    Args:
        sizes: bytes, by slot.
    """
    slots = list(sizes)
    *offsets, total = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()), initial=0)

    def allocate_all(now: Repetition) -> None:
        now.allocated(slots[0], allocate((total // 4,), (1,), torch.float32))
        first = now.addresses[slots[0]]
        for slot, offset in zip(slots, offsets, strict=True):
            now.addresses[slot] = first + offset

    return allocate_all


def allocator(device: str) -> Allocate:
    """Return a function that allocates a tensor by shape, strides and dtype, on the current GPU or the CPU."""
    inductor = torch._C._dynamo.guards  # allocates in half the time
    if device == "cuda" and hasattr(inductor, "_empty_strided_cuda"):
        return inductor._empty_strided_cuda
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def free_step(slot: int) -> Step:
    """Return the step that frees the tensor of a slot."""

    def drop(now: Repetition) -> None:
        now.tensors[slot] = None

    return drop
