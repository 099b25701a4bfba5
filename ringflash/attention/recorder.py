"""Recorder of a call, which sees launches and torch's operators of their own accord, and is told of the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringflash.attention.steps import (
    Address,
    Repetition,
    Step,
    Tensors,
    dropping,
    issuing,
    recording,
    taking,
    view_of,
)
from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.driver import (
    Command,
    Driver,
    driver,
    new_event,
    plain_launch,
    record_command,
    wait_command,
)
from ringflash.comm.transport.lanes import Commands, Lanes
from ringflash.comm.watchdog import CallInFlight, Unwatched

ALLOCATIONS = {
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Records a call: torch's operators as a dispatch mode, the rest as it is told.

    What the driver is asked for becomes commands, which a repetition issues in lists. A list ends at other work of
    torch, and where memory is allocated after some was freed. Other allocations precede the list in which they fall.
    Notes follow it, and so does what frees memory.

    Tensors are addressed from the *slots* of a repetition: its inputs, then its allocations. All others belong to the
    group or the mask, and keep their place as long as the tape, which is dropped with the areas.
    """

    def __init__(self, memory: Lanes, tensors: Tensors) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.kept: list[torch.Tensor] = []
        self.problem = ""
        self._memory, self._first = memory, memory.current()
        self._entered = self._first
        self._addresses = [0 if x is None else x.data_ptr() for x in tensors]
        self._dtypes = [None if x is None else x.dtype for x in tensors]
        # Inputs and their views. They may share a storage, and are alive anyway.
        self._inputs = {id(x): (x, slot) for slot, x in enumerate(tensors) if x is not None}
        self._input_storages = {x.untyped_storage()._cdata for x in tensors if x is not None}
        self._allocated: dict[int, tuple[int, StorageWeakRef]] = {}  # slots, by storage
        self._made: dict[int, tuple[object, int]] = {}  # what is made by each call: events, and results of notes
        self._records: dict[int, tuple[int, torch.cuda.Stream]] = {}  # steps that record an event, and its index
        self._waits: dict[int, tuple[int, torch.cuda.Stream]] = {}  # steps that wait for one
        self._seen_by_host: set[int] = set()  # events for whose end the host looks
        self._commands: dict[int, list[Command]] = {}  # of steps
        self._early: set[int] = set()  # steps of the host that may precede commands
        self._late: set[int] = set()  # and those that may follow them
        self._allocations: set[int] = set()
        self._drops: set[int] = set()
        self._enters: set[int] = set()  # steps that change the current stream, which commands do not need
        self._streams: dict[int, torch.cuda.Stream] = {}  # of the steps that need a current one
        self._paused = False

    @property
    def num_events(self) -> int:
        """Number of events of a repetition and results of notes."""
        return len(self._made)

    def mark(self, event: Any, stream: torch.cuda.Stream) -> None:
        """Note that an event was recorded on a stream."""
        self._drop_freed()
        index = len(self._made)
        self._records[len(self.steps)] = index, stream
        self._made[id(event)] = event, index
        self.steps.append(recording(index, stream))

    def wait(self, event: Any, stream: torch.cuda.Stream) -> None:
        """Note that a stream waits for an event."""
        self._drop_freed()
        index = self._event(event)
        self._waits[len(self.steps)] = index, stream
        self.steps.append(lambda now: now.events[index].wait(stream))

    def step(self, work: Callable[..., None], args: tuple[Any, ...], commands: Commands | None) -> None:
        """Run work on the current stream, and note it."""
        self._enter()
        self._note_work(work, args)
        self._streams[len(self.steps) - 1] = self._entered
        made = None if commands is None or driver() is None else commands(self._entered.cuda_stream, self._event)
        if made is not None:
            self._commands[len(self.steps) - 1] = made

    def note(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run work of the host, and note it; each repetition runs it again with its own events, number and call."""
        result = self._note_work(work, args)
        (self._late if result is None else self._early).add(len(self.steps) - 1)
        return result

    def _note_work(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._drop_freed()
        self._paused = True
        try:
            result = work(*args)
        finally:
            self._paused = False
        events = [(place, self._event(x)) for place, x in enumerate(args) if id(x) in self._made]
        self._seen_by_host |= {index for _, index in events}
        numbers = [place for place, x in enumerate(args) if isinstance(x, CallNumber)]
        calls = [place for place, x in enumerate(args) if isinstance(x, CallInFlight | Unwatched)]
        template = [None if id(x) in self._made or isinstance(x, CallInFlight | Unwatched) else x for x in args]

        def again(now: Repetition) -> Any:
            own = template.copy()
            for place, index in events:
                own[place] = now.events[index]
            for place in numbers:
                own[place] = now.number
            for place in calls:
                own[place] = now.watched
            return work(*own)

        varies = events or numbers or calls
        if result is None:
            self.steps.append(again if varies else lambda now: work(*args))
        else:
            index = len(self._made)
            self._made[id(result)] = result, index
            self.steps.append(lambda now: now.events.__setitem__(index, again(now)))
        return result

    def give_up(self, problem: str) -> None:
        """Note that the call cannot be repeated."""
        self.problem = problem

    def launch(self, launch: Any) -> None:
        """Note the launch of a kernel; None if triton compiled it, which may allocate."""
        self._drop_freed()
        if launch is None:
            self.problem = "a kernel was compiled"
            return
        given, launch = launch.args, launch._replace(args=())  # a step must not keep tensors
        template, moving = list(given), list[tuple[int, int, int, Address | None]]()
        readable = launch.is_readable  # and no address is in two slots
        pointers, maps = dict[int, tuple[int, int]](), list[tuple[int, int] | None]()
        for place, x in enumerate(given):
            base = None
            if isinstance(x, torch.Tensor):
                slot, offset = self._place(x)
                template[place] = offset
                if slot is not None:
                    readable &= pointers.setdefault(x.data_ptr(), (slot, offset)) == (slot, offset)
            elif hasattr(x, "block_shape"):
                slot, offset = self._place(x.base)
                template[place], base = copy.copy(x), Address(offset)
                template[place].base = base
                maps.append(None if slot is None else (slot, offset))
            else:
                continue
            if slot is not None:
                moving.append((place, slot, offset, base))

        def again(now: Repetition) -> None:
            for place, slot, offset, base in moving:
                if base is None:
                    template[place] = now.addresses[slot] + offset
                else:
                    base.address = now.addresses[slot] + offset
            launch.repeat(template)

        if readable and driver() is not None:
            repeat = partial(launch.repeat, given)
            command = plain_launch(lambda stream: repeat(stream.cuda_stream), launch.stream, pointers, maps)
            if command is not None:
                self._commands[len(self.steps)] = [command]
        self.steps.append(again)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        if func.is_view:
            known = self._inputs.get(id(args[0]))
            if known is not None:
                self._inputs |= {id(x): (x, known[1]) for x in tree_leaves(out)}
        else:
            self._note(func, args, kwargs or {}, out)
        return out

    def finish(self, results: tuple[torch.Tensor, ...]) -> list[int]:
        """Return the slots of the results."""
        self._drop_freed()
        # Only streams wait for the others. A wait is for the last record before it, so one event serves all calls.
        events = dict[int, torch.cuda.Event]()
        for place, (index, stream) in self._records.items():
            if index not in self._seen_by_host:
                events[index] = new_event(stream)
                self.steps[place] = recording(index, stream, events[index])
        slots = []
        for x in results:
            slot, offset = self._place(x)
            if slot is None or offset or id(x) in self._inputs:
                self.problem = "a result that the call did not allocate"
            else:
                slots.append(slot)
        known = driver()
        if known is not None and not self.problem:
            self._add_events(events)
            self.steps = list(self._in_lists(known))
        return slots

    def _add_events(self, events: dict[int, torch.cuda.Event]) -> None:
        """Make commands of records and waits, and of records that the host looks at steps that take an event for each.

        Args:
            events: those that serve all calls, by index.
        """
        for place, (index, stream) in self._records.items():
            if index in events:
                command = record_command(stream.cuda_stream, events[index].cuda_event)
                self._commands[place] = [command._replace(kept=events[index])]
            else:
                self._commands[place] = [record_command(stream.cuda_stream, 0, index)]
                self.steps[place] = taking(index, stream)
        for place, (index, stream) in self._waits.items():
            event, value = (events[index].cuda_event, -1) if index in events else (0, index)
            self._commands[place] = [wait_command(stream.cuda_stream, event, value)]

    def _in_lists(self, known: Driver) -> Iterator[Step]:
        """Yield the steps of a repetition, with as many commands in one list as may be."""
        commands, late, current, frees = list[Command](), list[Step](), self._first, False
        for place, step in enumerate([*self.steps, None]):
            own = self._commands.get(place)
            if own is not None:
                commands += own
                if place in self._records and own[0].value >= 0:
                    yield self.steps[place]
            elif step is not None and place in self._late | self._drops:
                late.append(step)
                frees |= place in self._drops
            elif place not in self._enters:
                if not (place in self._early or place in self._allocations and not frees):
                    if commands:
                        yield issuing(known, commands)
                    yield from late
                    commands, late, frees = [], [], False
                stream = self._streams.get(place, current)
                if stream != current:
                    current = stream
                    yield partial(_enter, self._memory, stream)
                if step is not None:
                    yield step

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note an operator that is no view; one that writes to no element of a tensor is left out."""
        tensors = [(place, x) for place, x in enumerate(args) if isinstance(x, torch.Tensor)]
        in_place = isinstance(out, torch.Tensor) and bool(tensors) and out is tensors[0][1]
        if in_place and not out.numel():
            return
        self._drop_freed()
        self._enter()
        self._streams[len(self.steps)] = self._entered
        if func in ALLOCATIONS:
            self._allocate(out)
            self._allocations.add(len(self.steps))
            shape, strides, dtype, device = tuple(out.shape), out.stride(), out.dtype, out.device

            def allocate(now: Repetition) -> None:
                made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                now.tensors.append(made)
                now.addresses.append(made.data_ptr())

            self.steps.append(allocate)
            return
        nested = len([x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]) > len(tensors)
        if nested or not (in_place or self._is_new(out)):
            self.problem = f"the operator {func}"
            return
        template, views = list(args), list[tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]]()
        for place, x in tensors:
            slot, offset = self._place(x)
            if slot is not None:
                views.append((place, slot, view_of(x, offset)))
                template[place] = None
                if x.dtype != self._dtypes[slot]:
                    self.problem = f"the operator {func} on a tensor of another dtype"
        if not in_place:
            self._allocate(out)

        def again(now: Repetition) -> None:
            for place, slot, view in views:
                template[place] = view(now.tensors[slot])  # type: ignore[arg-type]
            made = func(*template, **kwargs)
            for place, *_ in views:
                template[place] = None
            if not in_place:
                now.tensors.append(made)
                now.addresses.append(made.data_ptr())

        self.steps.append(again)

    def _is_new(self, out: Any) -> bool:
        """True if an operator returned one new tensor."""
        if not isinstance(out, torch.Tensor):
            return False
        storage = out.untyped_storage()._cdata
        return storage not in self._allocated and storage not in self._input_storages

    def _allocate(self, x: torch.Tensor) -> None:
        """Give a new tensor the next slot."""
        storage = x.untyped_storage()
        self._allocated[storage._cdata] = len(self._addresses), StorageWeakRef(storage)
        self._addresses.append(x.data_ptr())
        self._dtypes.append(x.dtype)

    def _drop_freed(self) -> None:
        """Let a repetition free what this call has freed since the last step."""
        for storage, (slot, alive) in list(self._allocated.items()):
            if alive.expired():
                del self._allocated[storage]
                self._drops.add(len(self.steps))
                self.steps.append(dropping(slot))

    def _enter(self) -> None:
        """Make the current stream that of a repetition, for what follows."""
        stream, memory = self._memory.current(), self._memory
        if stream != self._entered:
            self._entered = stream
            self._enters.add(len(self.steps))
            self.steps.append(partial(_enter, memory, stream))

    def _event(self, event: Any) -> int:
        if id(event) not in self._made:
            self.problem = "an event of another call"
            return 0
        return self._made[id(event)][1]

    def _place(self, x: torch.Tensor) -> tuple[int | None, int]:
        """Return the slot of a tensor and its offset there; without a slot its address."""
        storage = x.untyped_storage()._cdata
        if not x.numel():
            return None, 0
        if id(x) in self._inputs:
            slot = self._inputs[id(x)][1]
        elif storage in self._allocated:
            slot = self._allocated[storage][0]
        else:
            if storage in self._input_storages:
                self.problem = "an unknown view of an input"
            self.kept.append(x)
            return None, x.data_ptr()
        return slot, x.data_ptr() - self._addresses[slot]


def _enter(memory: Lanes, stream: torch.cuda.Stream, _: Repetition) -> None:
    """Make a stream current: a step."""
    memory.enter(stream)
