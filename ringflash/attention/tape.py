"""Tape of a pass: what its host code asks of the device, recorded in one call and repeated in later ones.

Calls of one form (shapes, strides, mask, options) ask for the same allocations, launches, copies, barriers, events and
waits, on the same streams and in the same order. Only addresses, events and the number of the call differ. Deciding on
them takes the host several times as long as asking the driver, so it is done in the first calls only.

    Tape.record   the second call of a form: it runs as usual, and is recorded
    Tape.repeat   later ones

`Recorder` sees launches and torch's operators of their own accord, and through the memory (`Lanes`) what concerns
streams. Whatever it cannot repeat makes it give up, and calls of that form go on as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.transport.lanes import Lanes
from ringflash.comm.wait_timer import measuring
from ringflash.comm.watchdog import CallInFlight, Unwatched
from ringflash_kernels.api import launches_are_traced, observed_launches

_MAX_BOUND = 256  # launches of a step that are kept
_CALLS = 4  # of a form, after which it is no longer recorded
ALLOCATIONS = {
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
}  # fmt: skip

Tensors = Sequence[torch.Tensor | None]


class Repetition:
    """A call that repeats a tape.

    Attributes:
        tensors: the call's inputs, then what it allocates.
        addresses: of these.
        events: what it has recorded, and results of notes.
    """

    __slots__ = ("addresses", "events", "number", "tensors", "watched")

    def __init__(self, tensors: Tensors, number: CallNumber, watched: CallInFlight | Unwatched) -> None:
        self.tensors, self.number, self.watched = list(tensors), number, watched
        self.addresses = [0 if x is None else x.data_ptr() for x in tensors]
        self.events: list[Any] = []


Step = Callable[[Repetition], None]


class Tape:
    """Steps of the calls of one form; none before a call has been recorded.

    Args:
        kept: what the key of the tape refers to.
    """

    def __init__(self, kept: object) -> None:
        self.kept = [kept]
        self.steps: list[Step] = []
        self.results: list[int] = []
        self.calls = 0

    def record(
        self, memory: Lanes, tensors: Tensors, issue: Callable[..., tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """Make a call by `issue(*tensors)`. The first one builds tables that later ones reuse, and is not recorded."""
        self.calls += 1
        given = [id(x) for x in tensors if x is not None]
        if not 1 < self.calls <= _CALLS or len(set(given)) < len(given):  # one tensor that is given twice
            return issue(*tensors)
        recorder = memory.recorder = Recorder(memory, tensors)
        try:
            with observed_launches(recorder.launch), recorder:
                results = issue(*tensors)
        finally:
            memory.recorder = None
        slots = recorder.finish(results)
        if not recorder.problem:
            self.kept += recorder.kept
            self.steps, self.results = recorder.steps, slots
        return results

    def repeat(
        self, memory: Lanes, tensors: Tensors, number: CallNumber, watched: CallInFlight | Unwatched
    ) -> tuple[torch.Tensor, ...]:
        """Make a call with other tensors of the same form, and return its results."""
        now, caller = Repetition(tensors, number, watched), memory.current()
        try:
            for step in self.steps:
                step(now)
        finally:
            memory.enter(caller)
        return tuple([now.tensors[slot] for slot in self.results])  # type: ignore[misc]


def form_of(tensors: Tensors) -> Hashable:
    """Return what the steps of a call depend on, of its tensors, if they are aligned."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])


def can_repeat(impl: str, device: torch.device, tensors: Tensors) -> bool:
    """Return True if a call is a list of steps: all launches are observed, and nobody else observes or captures them.

    Kernels are compiled for tensors at multiples of 16 bytes.
    """
    return (
        device.type == "cuda"
        and impl.startswith("hopper")
        and not torch.cuda.is_current_stream_capturing()
        and not torch.autograd._profiler_enabled()
        and not measuring()
        and not launches_are_traced()
        and not any([x is not None and x.data_ptr() % 16 for x in tensors])
    )


class _Address:
    """Stand-in for the tensor of a descriptor."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Recorder(TorchDispatchMode):
    """Records a call: torch's operators as a dispatch mode, the rest as it is told.

    Tensors are addressed from the *slots* of a repetition: its inputs, then its allocations. All others belong to the
    group or the mask, and keep their place as long as the tape, which is dropped with the areas.
    """

    def __init__(self, memory: Lanes, tensors: Tensors) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.kept: list[torch.Tensor] = []
        self.problem = ""
        self._memory, self._entered = memory, memory.current()
        self._addresses = [0 if x is None else x.data_ptr() for x in tensors]
        self._dtypes = [None if x is None else x.dtype for x in tensors]
        # Inputs and their views. They may share a storage, and are alive anyway.
        self._inputs = {id(x): (x, slot) for slot, x in enumerate(tensors) if x is not None}
        self._input_storages = {x.untyped_storage()._cdata for x in tensors if x is not None}
        self._allocated: dict[int, tuple[int, StorageWeakRef]] = {}  # slots, by storage
        self._made: dict[int, tuple[object, int]] = {}  # what is made by each call: events, and results of notes
        self._records: dict[int, tuple[int, torch.cuda.Stream]] = {}  # steps that record an event, by its index
        self._seen_by_host: set[int] = set()  # events for whose end the host looks
        self._paused = False

    def mark(self, event: Any, stream: torch.cuda.Stream) -> None:
        """Note that an event was recorded on a stream."""
        self._drop_freed()
        self._records[len(self._made)] = len(self.steps), stream
        self._made[id(event)] = event, len(self._made)
        self.steps.append(lambda now: now.events.append(stream.record_event()))

    def wait(self, event: Any, stream: torch.cuda.Stream) -> None:
        """Note that a stream waits for an event."""
        self._drop_freed()
        index = self._event(event)
        self.steps.append(lambda now: now.events[index].wait(stream))

    def step(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Run work on the current stream, and note it."""
        self._enter()
        self.note(work, args)

    def note(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run work of the host, and note it; each repetition runs it again with its own events, number and call."""
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
            self._made[id(result)] = result, len(self._made)
            self.steps.append(lambda now: now.events.append(again(now)))
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
        template, moving = list(given), list[tuple[int, int, int, _Address | None]]()
        for place, x in enumerate(given):
            base = None
            if isinstance(x, torch.Tensor):
                slot, offset = self._place(x)
                template[place] = offset
            elif hasattr(x, "block_shape"):
                slot, offset = self._place(x.base)
                template[place], base = copy.copy(x), _Address(offset)
                template[place].base = base
            else:
                continue
            if slot is not None:
                moving.append((place, slot, offset, base))
        bound = dict[tuple[int, ...], Callable[[], object]]()  # by addresses, of which most calls have few

        def again(now: Repetition) -> None:
            at = now.addresses
            addresses = tuple([at[slot] + offset for _, slot, offset, _ in moving])
            known = bound.get(addresses)
            if known is not None:
                known()
                return
            for (place, _, _, base), address in zip(moving, addresses, strict=True):
                if base is None:
                    template[place] = address
                else:
                    base.address = address
            known = launch.bound(template)
            if known is None:
                launch.run(*launch.head, *template)
                return
            if len(bound) == _MAX_BOUND:
                bound.clear()
            bound[addresses] = known
            known()

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
        for index, (place, stream) in self._records.items():
            if index not in self._seen_by_host:
                self.steps[place] = _recording(torch.cuda.Event(), stream)
        slots = []
        for x in results:
            slot, offset = self._place(x)
            if slot is None or offset or id(x) in self._inputs:
                self.problem = "a result that the call did not allocate"
            else:
                slots.append(slot)
        return slots

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note an operator that is no view."""
        self._drop_freed()
        self._enter()
        if func in ALLOCATIONS:
            self._allocate(out)
            shape, strides, dtype, device = tuple(out.shape), out.stride(), out.dtype, out.device

            def allocate(now: Repetition) -> None:
                made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                now.tensors.append(made)
                now.addresses.append(made.data_ptr())

            self.steps.append(allocate)
            return
        tensors = [(place, x) for place, x in enumerate(args) if isinstance(x, torch.Tensor)]
        in_place = isinstance(out, torch.Tensor) and bool(tensors) and out is tensors[0][1]
        nested = len([x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]) > len(tensors)
        if nested or not (in_place or self._is_new(out)):
            self.problem = f"the operator {func}"
            return
        template, views = list(args), list[tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]]()
        for place, x in tensors:
            slot, offset = self._place(x)
            if slot is not None:
                views.append((place, slot, _view_of(x, offset)))
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
                self.steps.append(_dropping(slot))

    def _enter(self) -> None:
        """Make the current stream that of a repetition, for what follows."""
        stream, memory = self._memory.current(), self._memory
        if stream != self._entered:
            self._entered = stream
            self.steps.append(lambda now: memory.enter(stream))

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


def _view_of(x: torch.Tensor, offset: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that takes the same view as x of the tensor of its slot."""
    shape, strides, dtype = tuple(x.shape), x.stride(), x.dtype
    first = offset // dtype.itemsize

    def view(base: torch.Tensor) -> torch.Tensor:
        return base.as_strided(shape, strides, base.storage_offset() + first)

    return view


def _recording(event: torch.cuda.Event, stream: torch.cuda.Stream) -> Step:
    def record(now: Repetition) -> None:
        event.record(stream)
        now.events.append(event)

    return record


def _dropping(slot: int) -> Step:
    def drop(now: Repetition) -> None:
        now.tensors[slot] = None

    return drop
